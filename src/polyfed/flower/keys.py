"""Certificates and keys of a federation: a CA, the server's certificate, one elliptic-curve key pair for each site.

`DIR` stays with the server; `DIR/site-NAME` goes to that site by a safe way and holds the only copy of its private
key that anybody needs. Nobody else's private key is in it.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from polyfed.core.checkpoint import read_json, write_json
from polyfed.core.errors import InputError

LIFETIME = datetime.timedelta(days=825)  # the longest that common TLS clients accept for a server certificate
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class ServerKeys:
    """What the server holds: where its certificate is, and each site's public key (PEM), in the order of the sites."""

    certificate: Path
    private_key: Path
    authority: Path
    sites: dict[str, bytes]  # empty: the key of that site was revoked


@dataclass(frozen=True)
class SiteKeys:
    """What one site holds."""

    name: str
    private_key: Path
    authority: Path


def create_keys(directory: Path, server: str, sites: Sequence[str]) -> list[Path]:
    """Write the keys of a new federation and return the folders to hand out, one for each site.

    Parameters
    ----------
    directory
        A new or empty folder.
    server
        The host name or address by which the sites reach the server; loopback names are always added.
    sites
        Names of the sites, in the order that numbers them.

    Raises
    ------
    InputError
        When the folder is in use or a name is not usable.
    """
    check_names(sites)
    if not _is_host(server):
        raise InputError(f"'{server}' is no host name or address: give the server's, without a port.")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(
            f"{directory} already exists and is not empty: keys are never overwritten, choose another one."
        )
    authority_key = ec.generate_private_key(ec.SECP384R1())
    authority = _certificate("polyfed federation", authority_key, None, None, [])
    server_key = ec.generate_private_key(ec.SECP384R1())
    certificate = _certificate(server, server_key, authority, authority_key, [server, *LOOPBACK])
    _write(directory / "ca.key", _private(authority_key), secret=True)
    _write(directory / "ca.crt", _pem(authority))
    _write(directory / "server.key", _private(server_key), secret=True)
    _write(directory / "server.crt", _pem(certificate))
    folders = [make_site(directory, name) for name in sites]
    write_json(directory / "federation.json", {"server": server, "sites": list(sites)})
    return folders


def make_site(directory: Path, name: str) -> Path:
    """Make a key pair for a site in the server's folder, and return the folder to hand out."""
    folder = directory / f"site-{name}"
    key = make_site_key(folder, name)
    _write(folder / "ca.crt", _found(directory / "ca.crt").read_bytes())
    _write(directory / f"site-{name}.pub", public_pem(key.public_key()))
    return folder


def make_site_key(folder: Path, name: str) -> ec.EllipticCurvePrivateKey:
    """Make the private key of a site in a folder of its own."""
    key = ec.generate_private_key(ec.SECP384R1())
    _write(folder / "site.key", _private(key, serialization.PrivateFormat.OpenSSH), secret=True)
    write_json(folder / "site.json", {"name": name})
    return key


def public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key as a file holds it."""
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def check_names(sites: Sequence[str]) -> None:
    """Refuse site names that are empty, used twice, or no plain words."""
    if not sites:
        raise InputError("There are no sites: name them, for instance --sites north,south.")
    for name in sites:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
            raise InputError(f"'{name}' cannot name a site: use letters, digits, '-' and '_'.")
    if len(set(sites)) < len(sites):
        raise InputError("A site is named twice: every site needs its own name.")


def read_server_keys(directory: Path) -> ServerKeys:
    """Read what `create_keys` wrote for the server."""
    if not (directory / "federation.json").is_file():
        raise InputError(
            f"{directory} holds no keys: make them with 'polyfed keys init {directory} --server HOST ...'."
        )
    about = read_federation(directory)
    sites, revoked = about["sites"], about.get("revoked", [])
    for name in ("ca.crt", "server.crt"):
        _check_certificate(_found(directory / name))
    load_server_key(_found(directory / "server.key"), directory / "server.crt")
    return ServerKeys(
        certificate=_found(directory / "server.crt"),
        private_key=_found(directory / "server.key"),
        authority=_found(directory / "ca.crt"),
        sites={name: b"" if name in revoked else _public(_found(directory / f"site-{name}.pub")) for name in sites},
    )


def load_server_key(path: Path, certificate: Path) -> ec.EllipticCurvePrivateKey:
    """Return the server's private key, once it is sure that it belongs to the certificate."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("it is of another kind")
        if x509.load_pem_x509_certificate(certificate.read_bytes()).public_key() != key.public_key():
            raise ValueError(f"it does not belong to {certificate.name}")
    except Exception as error:  # a damaged file can fail in many ways
        raise InputError(
            f"{path} is no private key of the server ({error}): restore it, or make the keys again with "
            "'polyfed keys init'."
        ) from error
    return key


def read_federation(directory: Path) -> dict[str, Any]:
    """Read which sites a federation has."""
    about = read_json(directory / "federation.json")
    if not isinstance(about, dict) or not isinstance(about.get("sites"), list):
        raise InputError(f"{directory / 'federation.json'} is damaged: make the keys again with 'polyfed keys init'.")
    check_names(list(map(str, about["sites"])))
    return about


def _public(path: Path) -> bytes:
    content = path.read_bytes()
    try:
        key = serialization.load_pem_public_key(content)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("it is of another kind")
    except Exception as error:  # a damaged file can fail in many ways
        raise InputError(f"{path} is no public key of a site ({error}): sign that site's request again.") from error
    return content


def read_site_keys(directory: Path) -> SiteKeys:
    """Read what `create_keys` wrote for one site."""
    if not (directory / "site.json").is_file():
        raise InputError(f"{directory} holds no site's keys: give the folder site-NAME that you got from the server.")
    about = read_json(directory / "site.json")
    name = about.get("name") if isinstance(about, dict) else None
    check_names([str(name)])
    if not (directory / "ca.crt").is_file():
        raise InputError(f"{directory} has no ca.crt: put the one there that you got when your request was signed.")
    keys = SiteKeys(str(name), _found(directory / "site.key"), _found(directory / "ca.crt"))
    _check_certificate(keys.authority)
    try:
        serialization.load_ssh_private_key(keys.private_key.read_bytes(), None)
    except Exception as error:  # a damaged file can fail in many ways
        raise InputError(
            f"{keys.private_key} is no private key ({error}): ask the server for this folder again."
        ) from error
    return keys


def _check_certificate(path: Path) -> None:
    """Refuse a certificate that is damaged or no longer valid."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        certificate.public_key()
    except Exception as error:  # a damaged file can fail in many ways
        raise InputError(
            f"{path} is no certificate ({error}): make the keys again with 'polyfed keys init'."
        ) from error
    end = certificate.not_valid_after_utc
    if end < datetime.datetime.now(datetime.UTC):
        raise InputError(
            f"{path} expired on {end:%Y-%m-%d}: make new keys with 'polyfed keys init', and hand them out."
        )


def _is_host(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?", name) is not None
    return True


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    issuer_key: ec.EllipticCurvePrivateKey | None,
    hosts: Sequence[str],
) -> x509.Certificate:
    """Return a certificate; without an issuer it is the authority itself."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    now = datetime.datetime.now(datetime.UTC)
    signing = issuer_key or key
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ a little
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=0 if issuer is None else None), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), False)
        .add_extension(_usage(authority=issuer is None), True)
    )
    if issuer is not None:
        names = x509.SubjectAlternativeName([_host(host) for host in dict.fromkeys(hosts)])
        builder = builder.add_extension(names, False).add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False
        )
    return builder.sign(signing, hashes.SHA384())


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(
    key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8
) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _write(path: Path, content: bytes, secret: bool = False) -> None:
    """Write a new file; a secret one is readable by its owner only from the first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as file:
        file.write(content)


def _found(path: Path) -> Path:
    if not path.is_file():
        raise InputError(f"{path} is missing: make the keys again with 'polyfed keys init'.")
    return path.resolve()
