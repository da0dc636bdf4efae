"""A kernel's own tests once more, in a process whose kernels are built with the compiler's checks and end it at the first fault."""

import subprocess
import sys
from pathlib import Path

import pytest

_CHECKS = "-fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -O1"


def run_checked(file: str, directory: Path, monkeypatch: pytest.MonkeyPatch, *chosen: str) -> None:
    """The tests of `file` that pytest's options choose; `directory` has the compiler and what it builds."""
    compiler = directory / "checking"
    # In a script, since its flags are to follow ours.
    compiler.write_text(f'#!/bin/sh\nexec g++ "$@" {_CHECKS}\n')
    compiler.chmod(0o700)
    library = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
    monkeypatch.setenv("LD_PRELOAD", library)
    # Python itself leaves memory behind.
    monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=0")
    argv = [sys.executable, "-P", "-m", "pytest", "-sqx", "-p", "no:cacheprovider", file, *chosen]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
