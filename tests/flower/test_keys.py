"""Keys and certificates: who gets what, and what the commands refuse before anything starts."""

from __future__ import annotations

import stat
import subprocess

import problem
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_public_key, load_ssh_private_key
from processes import FLOWER

from polyfed.core.errors import InputError
from polyfed.flower.join import Joining, join
from polyfed.flower.keys import create_keys, read_server_keys, read_site_keys
from polyfed.flower.serve import Hosting, _check


def test_each_site_gets_its_own_key_and_nobody_elses(tmp_path):
    folders = create_keys(tmp_path / "keys", "fed.example.org", ["a", "b"])
    server = read_server_keys(tmp_path / "keys")
    assert list(server.sites) == ["a", "b"]
    for folder, name in zip(folders, server.sites, strict=True):
        site = read_site_keys(folder)
        private = load_ssh_private_key(site.private_key.read_bytes(), None)
        assert private.public_key() == load_pem_public_key(server.sites[name])
        assert {path.name for path in folder.iterdir()} == {"site.key", "ca.crt", "site.json"}
        assert site.authority.read_bytes() == server.authority.read_bytes()
    assert server.sites["a"] != server.sites["b"]


def test_the_certificate_names_the_server_and_the_authority_signed_it(tmp_path):
    create_keys(tmp_path / "keys", "fed.example.org", ["a"])
    keys = read_server_keys(tmp_path / "keys")
    certificate = x509.load_pem_x509_certificate(keys.certificate.read_bytes())
    authority = x509.load_pem_x509_certificate(keys.authority.read_bytes())
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "fed.example.org" in names.get_values_for_type(x509.DNSName)
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_private_keys_are_for_their_owner_only_and_never_overwritten(tmp_path):
    create_keys(tmp_path / "keys", "localhost", ["a"])
    for name in ("ca.key", "server.key", "site-a/site.key"):
        assert stat.S_IMODE((tmp_path / "keys" / name).stat().st_mode) == 0o600
    with pytest.raises(InputError, match="never overwritten"):
        create_keys(tmp_path / "keys", "localhost", ["a"])


@pytest.mark.parametrize("sites", [[], ["a", "a"], ["../a"], ["a b"], [""]])
def test_bad_site_names_are_refused(tmp_path, sites):
    with pytest.raises(InputError):
        create_keys(tmp_path / "keys", "localhost", sites)


def test_insecure_means_this_machine_only(tmp_path):
    with pytest.raises(InputError, match="stays on this machine"):
        _check(Hosting(host="0.0.0.0", keys=None, sites=("a",)))
    assert _check(Hosting(host="127.0.0.1", keys=None, sites=("a",))) == (None, ["a"])
    away = Joining("10.1.2.3:9092", None, "a", tmp_path)
    with pytest.raises(InputError, match="this machine only"):
        join(away, "mlp:1x16", problem.part(0))


def test_commands_say_what_is_wrong_and_exit_with_2(tmp_path):
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*FLOWER, *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=60)

    found = call("serve", "--out", "run")
    assert found.returncode == 2 and "--keys" in found.stderr
    found = call("serve", "--insecure", "--host", "0.0.0.0", "--sites", "a", "--out", "run")
    assert found.returncode == 2 and "this machine only" in found.stderr
    assert not (tmp_path / "run").exists()
