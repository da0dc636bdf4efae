"""What a worker does not start with."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.certificates import Authority, Pair


def start(*args: str) -> tuple[int, str]:
    """Exit status and stderr of a worker that cannot start; its model is looked for later."""
    command = [sys.executable, "-m", "decode_service", "--model", "nowhere", "--metrics-port", "-1", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    (line,) = (line for line in done.stderr.splitlines() if "error: " in line)
    return done.returncode, line.partition("error: ")[2]


def test_a_worker_that_would_serve_strangers_is_refused() -> None:
    """On an interface that other machines reach; the line says what to set."""
    status, said = start("--listen", "0.0.0.0:0")
    assert status == 2
    assert said.startswith(
        "on 0.0.0.0:0 other machines reach this worker, and nothing keeps strangers out; set"
    )
    for setting in ("--cluster-tls-cert", "--cluster-tls-key", "--cluster-tls-ca", "--cluster-token-file"):
        assert setting in said


@pytest.mark.thorough
def test_files_that_would_not_work_end_the_worker_before_its_model_is_loaded(tmp_path: Path) -> None:
    """A certificate that has expired, a key of another one, a token that is none: one line, which names the setting."""
    authority, now = Authority(tmp_path), datetime.now(UTC)
    good, other = authority.issue("good"), authority.issue("other")
    old = authority.issue("old", begins=now - timedelta(days=2), ends=now - timedelta(days=1))
    short = tmp_path / "token"
    short.write_text("short")
    for flags, why in (
        (authority.cluster_flags(old), "certificate has expired"),
        (authority.cluster_flags(Pair(good.cert, other.key)), "does not belong to the certificate"),
        (authority.cluster_flags(Pair(tmp_path / "no.pem", good.key)), "--cluster-tls-cert: cannot read"),
        (("--cluster-token-file", str(short)), "--cluster-token-file: "),
    ):
        status, said = start(*flags)
        assert status == 1
        assert why in said
