"""`make_secrets`: what it makes is taken by our services, is for its owner's eyes, and stays."""

import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from paceline.runtime.membership import read_token
from paceline.runtime.tls import TlsFiles, read_certificates
from router.cache_scopes import read_salt
from router.tenants import read_tenants
from tests.compose.files import copy_of_compose
from tests.compose.test_local import secrets_of

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


def _make(compose: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([compose / "make_secrets", *arguments], capture_output=True, text=True, check=False)


def test_its_files_are_taken(tmp_path: Path) -> None:
    """The token, the salt and a tenant whose key is the one that was shown; nobody else enters the directory, and containers can read its files."""
    compose = copy_of_compose(tmp_path)
    key = secrets_of(compose)
    made = compose / "secrets"
    assert read_token(str(made / "cluster_token"))
    assert read_salt(str(made / "cache_salt"))
    tenants = read_tenants(str(made / "tenants.toml"))
    tenant = tenants.find(key)
    assert tenant is not None
    assert tenant.name == "acme"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in made.iterdir()} == {0o644}
    assert all(key not in file.read_text() for file in made.iterdir())


def test_certificates_are_taken(tmp_path: Path) -> None:
    """Those of the cluster as its own, those for clients with the names that were given; the CAs' keys are for no container."""
    compose = copy_of_compose(tmp_path)
    secrets_of(compose, "llm.example.org,IP:127.0.0.1")
    made = compose / "secrets"
    cert, key, ca = (str(made / f"cluster_{file}") for file in ("worker.pem", "worker.key", "ca.pem"))
    read_certificates(TlsFiles(cert, key, ca, "--cluster-tls", "--cluster-tls-ca", is_cluster=True))
    read_certificates(
        TlsFiles(
            str(made / "public_server.pem"), str(made / "public_server.key"), "", "--tls", "--tls-client-ca"
        )
    )
    text = subprocess.run(
        ["openssl", "x509", "-in", made / "public_server.pem", "-noout", "-ext", "subjectAltName"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "DNS:llm.example.org, IP Address:127.0.0.1" in text
    assert {stat.S_IMODE((made / f"{name}_ca.key").stat().st_mode) for name in ("cluster", "public")} == {
        0o600
    }


def test_what_is_there_stays(tmp_path: Path) -> None:
    """A second run changes no file, and says so."""
    compose = copy_of_compose(tmp_path)
    secrets_of(compose, "localhost")
    before = {file.name: file.read_bytes() for file in (compose / "secrets").iterdir()}
    again = _make(compose, "other")
    assert again.returncode == 0
    assert again.stderr.count("is there and stays") == 4
    assert _make(compose, "--tls", "other").returncode == 0
    assert {file.name: file.read_bytes() for file in (compose / "secrets").iterdir()} == before


@pytest.mark.parametrize("arguments", [("a name",), ("--help",), ("--tls", "IP:nowhere")])
def test_what_cannot_be_leaves_nothing_half_made(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """A name that no tenant may have, a wrong option, a name that no certificate takes: a status, a line, and no certificate or tenant."""
    compose = copy_of_compose(tmp_path)
    done = _make(compose, *arguments)
    assert done.returncode != 0
    assert done.stderr
    assert not [*(compose / "secrets").glob("tenants*"), *(compose / "secrets").glob("public_server*")]
