"""What a router does not start with."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from router.config import RouterConfig
from tests.certificates import Authority


def start(*args: str) -> tuple[int, str]:
    """Exit status and stderr of a router that cannot start."""
    command = [sys.executable, "-m", "router", "--model", "nowhere", "--decode", "127.0.0.1:1", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


def test_a_door_to_the_network_without_keys_is_refused() -> None:
    """It has to be asked for by name."""
    status, said = start("--listen", "0.0.0.0:0")
    assert status == 2
    assert "--tenants" in said
    assert "--allow-anonymous" in said
    RouterConfig(model="m", decode="unix:d", listen="0.0.0.0:0", allow_anonymous=True)


def test_workers_on_other_machines_need_tls() -> None:
    """Or a word that the network is safe: prompts would go there in the clear."""
    status, said = start("--prefill", "10.0.0.1:50061")
    assert status == 2
    assert "10.0.0.1:50061 is on another machine" in said
    assert "--cluster-tls-cert" in said
    RouterConfig(model="m", decode="10.0.0.1:50061", allow_plaintext=True)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tls_cert": "c"}, "--tls-key is missing"),
        ({"tls_client_ca": "a"}, "--tls-client-ca means nothing without"),
        ({"plain_listen": "unix:/x"}, "--plain-listen means nothing without --tls-cert"),
        ({"tls_cert": "c", "tls_key": "k", "plain_listen": "0.0.0.0:1"}, "--plain-listen 0.0.0.0:1: others"),
        ({"listen": "0.0.0.0:0", "tls_cert": "c", "tls_key": "k"}, "--tls-client-ca"),
    ],
)
def test_a_door_that_cannot_be_is_refused(settings: dict[str, Any], problem: str) -> None:
    """What would be ignored or would let strangers in, by the setting's name; TLS alone asks nobody who he is."""
    with pytest.raises(ConfigError, match=re.escape(problem)):
        RouterConfig(model="m", decode="unix:d", **settings)


def test_certificates_of_clients_open_the_door() -> None:
    """Who has to show one is no stranger, and needs no key besides."""
    RouterConfig(model="m", decode="unix:d", listen="0.0.0.0:0", tls_cert="c", tls_key="k", tls_client_ca="a")


def test_a_broken_certificate_ends_the_router_with_one_line(tmp_path: Path) -> None:
    """Before it looks for its model."""
    pair = Authority(tmp_path).issue("router")
    status, said = start("--tls-cert", str(pair.cert), "--tls-key", str(pair.cert))
    assert status == 1
    assert "are not a certificate and its key" in said


def test_a_broken_file_of_tenants_ends_the_router_with_one_line(tmp_path: Path) -> None:
    """Before it listens, and without showing what stands in the place of a hash."""
    file = tmp_path / "tenants.toml"
    file.write_text('[tenants.acme]\nkey_hashes = ["paceline-SECRET"]\n')
    status, said = start("--tenants", str(file))
    assert status == 1
    (line,) = (line for line in said.splitlines() if line.startswith("error:"))
    assert "[tenants.acme]: key_hashes" in line
    assert "SECRET" not in said


@pytest.mark.parametrize("name", ["max_request_bytes", "limiter_routers", "limiter_budget_s"])
def test_numbers_without_sense_are_refused(name: str) -> None:
    """With the name of the flag."""
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be"):
        RouterConfig(model="m", decode="unix:d", **{name: 0})  # type: ignore[arg-type] # 0 is in no such field's range
