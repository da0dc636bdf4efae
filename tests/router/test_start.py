"""What a router does not start with."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from router.config import RouterConfig


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
