"""Sites that come, go and change their keys: requests that are signed, keys that are revoked, added and renewed.

A site makes its own key and sends a request, which holds the public part and proves that the site has the other one.
The server signs it by taking the public key into its list and hands back `ca.crt`. So no private key ever travels. A
server that runs looks at the list: what is revoked is cut off at once, and a renewed key is let in.
"""

from __future__ import annotations

from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from polyfed.core.checkpoint import write_atomic, write_json
from polyfed.core.errors import InputError
from polyfed.flower.keys import check_names, make_site, make_site_key, public_pem, read_federation


def request_key(folder: Path, name: str) -> Path:
    """Make a key at the site and return the request to send to the server."""
    check_names([name])
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} already exists and is not empty: keys are never overwritten, choose another one.")
    key = make_site_key(folder, name)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA384())
    path = folder / f"{name}.request"
    write_atomic(path, request.public_bytes(serialization.Encoding.PEM))
    return path


def read_request(path: Path) -> tuple[str, bytes]:
    """Return name and public key of a request.

    Raises
    ------
    InputError
        When it is damaged, or not made by whoever has the private key.
    """
    try:
        request = x509.load_pem_x509_csr(path.read_bytes())
        name = str(request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
        key = request.public_key()
        if not request.is_signature_valid:
            raise ValueError("its signature is wrong")
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
            raise ValueError("its key is of another kind")
    except Exception as error:  # a damaged file can fail in many ways
        raise InputError(
            f"{path} is no request of a site ({error}): ask for one made by 'polyfed keys request'."
        ) from error
    check_names([name])
    return name, public_pem(key)


def sign_request(directory: Path, request: Path, renew: bool = False) -> str:
    """Take a site's public key into the server's list and return the site's name."""
    name, public = read_request(request)
    about = read_federation(directory)
    if name in about["sites"] and name not in about.get("revoked", []) and not renew:
        raise InputError(f"Site {name} has a key already: --renew replaces it, 'polyfed keys revoke' shuts it out.")
    write_atomic(directory / f"site-{name}.pub", public)
    _list(directory, name, revoked=False)
    return name


def add_site(directory: Path, name: str) -> Path:
    """Make a key pair for a further site and return the folder to hand out."""
    check_names([name])
    if name in read_federation(directory)["sites"]:
        raise InputError(f"Site {name} is there already: 'polyfed keys request' and 'sign --renew' replace its key.")
    folder = make_site(directory, name)
    _list(directory, name, revoked=False)
    return folder


def revoke_site(directory: Path, name: str) -> None:
    """Shut a site out, also of a federation that runs; its number stays its own."""
    about = read_federation(directory)
    if name not in about["sites"]:
        raise InputError(f"There is no site {name} in {directory}: it has {', '.join(about['sites'])}.")
    _list(directory, name, revoked=True)


def _list(directory: Path, name: str, revoked: bool) -> None:
    about = read_federation(directory)
    others = [site for site in about.get("revoked", []) if site != name]
    sites = about["sites"] if name in about["sites"] else [*about["sites"], name]
    write_json(
        directory / "federation.json", {**about, "sites": sites, "revoked": [*others, *([name] if revoked else [])]}
    )
