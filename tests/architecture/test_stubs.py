"""The generated stubs are what the protos give; the check is the one that `./run check` makes."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.architecture.documents import ROOT

# The script with the command `help` does nothing but define its functions.
_CHECK = 'source "$1/run" help >/dev/null && venv=$2 && python=$2/bin/python && stubs_are_fresh'


def test_the_stubs_are_fresh() -> None:
    """Generating paceline/v1 from protos/ again gives the files that are there."""
    done = _check(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_stale_stubs_are_caught(tmp_path: Path) -> None:
    """A proto that has changed since is noticed, and the message says what to do."""
    shutil.copy(ROOT / "run", tmp_path)
    for directory in ("protos", "paceline/v1"):
        shutil.copytree(ROOT / directory, tmp_path / directory)
    with (tmp_path / "protos" / "paceline" / "v1" / "prefill.proto").open("a", encoding="utf-8") as proto:
        proto.write("// Nobody generates from this.\nmessage Peloton {}\n")
    done = _check(tmp_path)
    assert done.returncode != 0
    assert "./run protos" in done.stderr


def _check(checkout: Path) -> "subprocess.CompletedProcess[str]":
    command = ["bash", "-c", _CHECK, "check", str(checkout), sys.prefix]
    return subprocess.run(command, capture_output=True, text=True, check=False)
