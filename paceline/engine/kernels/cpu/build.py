"""Builds the C++ of this package with the machine's compiler: once for each source, compiler and processor."""

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_COMPILERS = ("g++", "c++", "clang++")
# Infinities are ours to use; the rest of what could be rearranged is not left to the compiler.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
)
_TIMEOUT_S = 300


class NoKernelError(Exception):
    """The kernel cannot be had on this machine; the message says why."""


def load(source: Path) -> ctypes.CDLL:
    """The library that `source` gives, out of the user's cache or built into it. Raises NoKernelError."""
    compiler = _compiler()
    name = f"{source.stem}-{_digest(source, compiler)}.so"
    try:
        return _kept(source, compiler, _cache_dir() / name)
    except OSError:
        # There is no cache, it cannot be written to, or others can.
        return _unkept(source, compiler, name)


def _kept(source: Path, compiler: Sequence[str], library: Path) -> ctypes.CDLL:
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _require_ours(library.parent)
    if library.exists():
        # One that does not load was cut off, or made for another C library: it is built again in its place.
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(library))
    _build(source, compiler, library)
    return ctypes.CDLL(str(library))


def _unkept(source: Path, compiler: Sequence[str], name: str) -> ctypes.CDLL:
    """For this process alone: what is loaded stays, also when its file is gone."""
    try:
        with tempfile.TemporaryDirectory(prefix="paceline-kernels-") as directory:
            library = Path(directory) / name
            _build(source, compiler, library)
            return ctypes.CDLL(str(library))
    except OSError as error:
        raise NoKernelError(f"{source.name} cannot be kept or does not load: {error}") from error


def _require_ours(directory: Path) -> None:
    """Raises PermissionError where others than this user and root could have put what is loaded from there."""
    found = directory.stat()
    if found.st_uid not in {0, os.geteuid()} or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others may write to {directory}")


def _build(source: Path, compiler: Sequence[str], library: Path) -> None:
    handle, fresh = tempfile.mkstemp(prefix="unfinished-", suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        _compile(source, compiler, fresh)
        # At once, whoever else builds it too.
        Path(fresh).replace(library)
    finally:
        Path(fresh).unlink(missing_ok=True)


def _compile(source: Path, compiler: Sequence[str], target: str) -> None:
    done = _run([*compiler, *_FLAGS, str(source), "-o", target])
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200]).strip()
        raise NoKernelError(
            f"{compiler[0]} cannot build {source.name}: {said or f'exit status {done.returncode}'}"
        )


def _compiler() -> list[str]:
    """Its path, and what $CXX has behind it."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    for name in wanted[:1] or _COMPILERS:
        if found := shutil.which(name):
            return [found, *wanted[1:]]
    raise NoKernelError(
        f"there is no C++ compiler ({' '.join(wanted) or ', '.join(_COMPILERS)}); Debian: apt install g++"
    )


def _run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NoKernelError(f"{argv[0]} takes more than {_TIMEOUT_S} s") from None
    except OSError as error:
        raise NoKernelError(f"{argv[0]} cannot be run: {error}") from error


def _cache_dir() -> Path:
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    except RuntimeError as error:
        # A user whom the system does not know, as in some containers.
        raise FileNotFoundError("there is no home directory") from error
    return Path(base) / "paceline" / "kernels"


def _digest(source: Path, compiler: Sequence[str]) -> str:
    """Of everything that decides what is built: -march=native takes this processor's instructions."""
    version = _run([*compiler, "--version"]).stdout
    headers = sorted(source.parent.glob("*.h"))
    texts = [file.read_text(encoding="utf-8") for file in (source, *headers)]
    parts = (*texts, " ".join([*compiler[1:], *_FLAGS]), version, _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("vendor_id", "cpu family", "model\t", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(names)))
