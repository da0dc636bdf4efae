"""Starts the tests of `interpreted` in a process of their own, where kernels are run by Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = Path(__file__).with_name("interpreted")


def run_interpreted(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Gives these tests to pytest; see interpreted/conftest.py."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    argv = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(INTERPRETED),
        *arguments,
    ]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)


# Half a minute of a core that is its own; beside other work it is one test's time for many tests.
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_kernels_equal_their_plain_forms_in_the_interpreter() -> None:
    """A small grid of each."""
    done = run_interpreted("-m", "not slow")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_kernels_equal_their_plain_forms_over_the_whole_grid() -> None:
    """Every size of heads, groups and blocks, every type and rule, long contexts and large vocabularies."""
    # A vocabulary as large as real ones takes the interpreter a minute of a core that is its own.
    done = run_interpreted("-m", "slow", "--timeout", "600")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_elsewhere_they_are_left_out() -> None:
    """A process without the interpreter collects none of them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    argv = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--co", str(INTERPRETED)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
