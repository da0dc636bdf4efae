"""The script `run`, without installing anything."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launcher.conftest import ROOT


def _run(script: Path, *arguments: str, cwd: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [script, *arguments], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in a directory with a space, and a Python whose venv and pip only note that they were called."""
    directory = tmp_path / "my checkout"
    directory.mkdir()
    for file in ("run", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / file, directory)
    python = tmp_path / "python3"
    python.write_text(
        f"""#!/bin/sh
        echo "$@" >>"{tmp_path}/calls"
        case "$1 $2 $3" in
            *"-m venv"*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
            *"-m pip install"*) exit "${{PIP_STATUS:-0}}" ;;
            *"-P -m "*) pwd; for word; do echo "[$word]"; done ;;
        esac
        """,
        encoding="utf-8",
    )
    python.chmod(0o755)
    return directory


def _calls(checkout: Path, what: str) -> int:
    calls = checkout.parent / "calls"
    return calls.read_text(encoding="utf-8").count(what) if calls.exists() else 0


def _in(checkout: Path, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    env = {"PYTHON": str(checkout.parent / "python3"), **env}
    return _run(checkout / "run", *arguments, cwd=checkout.parent, **env)


@pytest.mark.parametrize("arguments", [(), ("help",), ("--help",)])
def test_help_teaches(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Without a command, the script explains itself from any directory."""
    result = _run(ROOT / "run", *arguments, cwd=tmp_path)
    assert result.returncode == 0
    for command in (
        "up",
        "generate",
        "chat",
        "setup",
        "check",
        "test",
        "protos",
        "bench",
        "simulate",
        "tune",
    ):
        assert f"./run {command}" in result.stdout


def test_an_unknown_command_is_one_line(tmp_path: Path) -> None:
    """A command that does not exist is refused in one line."""
    result = _run(ROOT / "run", "upp", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "run: error: there is no command 'upp'; ./run help lists them\n"


def test_a_benchmark_that_is_not_there_is_one_line(checkout: Path) -> None:
    """Without benchmarks, `bench` says so and installs nothing."""
    result = _in(checkout, "bench", "anything")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert _calls(checkout, "pip install") == 0


def test_setup_installs_once(checkout: Path) -> None:
    """The second setup does nothing, until what is to be installed changes."""
    assert _in(checkout, "setup").returncode == 0
    assert _in(checkout, "setup").returncode == 0
    assert _calls(checkout, "pip install") == 1
    assert _calls(checkout, "-c constraints.txt -e .[router,worker,launcher]") == 1
    with (checkout / "constraints.txt").open("a", encoding="utf-8") as constraints:
        constraints.write("# changed\n")
    assert _in(checkout, "setup").returncode == 0
    assert _calls(checkout, "pip install") == 2


def test_a_failed_setup_is_done_again(checkout: Path) -> None:
    """An installation that failed leaves no stamp: nothing runs on it, and the next call installs."""
    failed = _in(checkout, "up", PIP_STATUS="1")
    assert failed.returncode != 0
    assert "installation failed" in failed.stderr
    assert _calls(checkout, "paceline.launcher") == 0
    assert _in(checkout, "up").returncode == 0
    assert _calls(checkout, "pip install") == 2


def test_a_python_that_is_too_old_is_refused(checkout: Path, tmp_path: Path) -> None:
    """Without a Python that fits, setup says which is needed."""
    (tmp_path / "none").mkdir()
    for tool in ("bash", "cat", "cksum", "dirname", "env", "flock", "mkdir", "rm"):
        (tmp_path / "none" / tool).symlink_to(shutil.which(tool) or "/bin/false")
    result = _run(checkout / "run", "setup", cwd=tmp_path, PATH=str(tmp_path / "none"), PYTHON="/bin/false")
    assert result.returncode == 2
    assert "Python 3.11, 3.12 or 3.13 is needed" in result.stderr


def test_arguments_arrive_as_they_were_given(checkout: Path) -> None:
    """Spaces, quotes and dollars in a prompt reach the program, which runs where the user is."""
    prompt = """it's "$HOME" * and\tmore"""
    result = _in(checkout, "generate", prompt, "")
    assert result.stdout.splitlines()[0] == str(checkout.parent)
    assert result.stdout.endswith(f"[paceline.cli]\n[generate]\n[{prompt}]\n[]\n")
