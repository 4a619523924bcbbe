"""The server's messages carry its signature: no other party can give a site orders, also not through Flower."""

from __future__ import annotations

import datetime
import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from polyfed.core.checkpoint import added_to, digest, write_atomic
from polyfed.core.errors import InputError, MessageError
from polyfed.flower.keys import ServerKeys, SiteKeys, load_server_key

SCHEME = ec.ECDSA(hashes.SHA384())
Signature = dict[str, str | bytes]


class Seal:
    """Signs at the server, with the key of its certificate."""

    def __init__(self, keys: ServerKeys) -> None:
        self.key = load_server_key(keys.private_key, keys.certificate)
        self.certificate = keys.certificate.read_bytes()

    def sign(self, site: str, text: str, blob: bytes) -> Signature:
        """Return what a message to this site carries beside its head and its blob."""
        number = secrets.token_hex(16)
        signature = self.key.sign(_content(site, number, text, blob), SCHEME)
        return {"number": number, "signature": signature, "certificate": self.certificate}


class SealCheck:
    """Checks at a site that a message is the server's, for this site, and new.

    Its number is kept in a file (None: in memory only), so that it is an old one after a restart, too.
    """

    def __init__(self, keys: SiteKeys, file: Path | None = None) -> None:
        self.name = keys.name
        self.file = file
        self.authority = x509.load_pem_x509_certificate(keys.authority.read_bytes())
        self.known: dict[bytes, ec.EllipticCurvePublicKey] = {}
        self.seen = read_numbers(file) if file is not None and file.is_file() else set()

    def check(self, found: Mapping[str, Any], text: str, blob: bytes) -> None:
        """Refuse a message that the server did not write for this site.

        Raises
        ------
        MessageError
            Without a reason that would help whoever tried.
        """
        try:
            number, signature, certificate = found["number"], found["signature"], found["certificate"]
            self._key(certificate).verify(signature, _content(self.name, number, text, blob), SCHEME)
        except Exception as error:  # no signature, another one, a certificate of somebody else
            raise MessageError(
                f"A message that is not signed by the server for site {self.name} was ignored "
                f"({type(error).__name__}): tell the people who run the server."
            ) from error
        if number in self.seen:
            raise MessageError(f"A message of the server that came twice was ignored at site {self.name}.")
        self.seen.add(number)
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with added_to(self.file, 0o600) as lines:
                lines.write(f"{number} {digest(number.encode())}\n")

    def _key(self, certificate: bytes) -> ec.EllipticCurvePublicKey:
        if certificate not in self.known:
            found = x509.load_pem_x509_certificate(certificate)
            found.verify_directly_issued_by(self.authority)
            usage = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
            now = datetime.datetime.now(datetime.UTC)
            if ExtendedKeyUsageOID.SERVER_AUTH not in usage or not (
                found.not_valid_before_utc <= now <= found.not_valid_after_utc
            ):
                raise InvalidSignature("not a valid server's certificate")
            key = found.public_key()
            assert isinstance(key, ec.EllipticCurvePublicKey)
            self.known = {certificate: key}
        return self.known[certificate]


def read_numbers(file: Path) -> set[str]:
    """Return the numbers of the messages that a site has had; of one that it was killed at, the rest is removed.

    Raises
    ------
    InputError
        When the file is damaged: an old message could pass for a new one.
    """
    whole, end, rest = file.read_bytes().rpartition(b"\n")
    if rest:  # it was not answered either
        write_atomic(file, whole + end, private=True)
    lines = [line.partition(b" ") for line in whole.splitlines()]
    if any(digest(number).encode() != checksum for number, _, checksum in lines):
        raise InputError(
            f"{file} is damaged (wrong checksum), so old messages of the server could pass for new ones: restore it, "
            "or join with another --state."
        )
    return {number.decode() for number, _, _ in lines}


def _content(site: str, number: str, text: str, blob: bytes) -> bytes:
    parts = [b"polyfed message 1", site.encode(), number.encode()]
    return b"\0".join(parts) + hashlib.sha384(text.encode()).digest() + hashlib.sha384(blob).digest()
