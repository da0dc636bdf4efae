"""Builds the C++ of this package with the machine's compiler: once for each source, compiler and processor."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
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
    """The library that `source` gives, built if it is not in the user's cache. Raises NoKernelError."""
    compiler = _compiler()
    name = f"{source.stem}-{_digest(source, compiler)}.so"
    try:
        return ctypes.CDLL(str(_built(source, compiler, _cache_dir() / name)))
    except OSError:
        # A cache that cannot be written to, or holds what does not load: once more, for this process alone.
        pass
    with tempfile.TemporaryDirectory(prefix="paceline-kernels-") as directory:
        try:
            # What is loaded stays, also when its file is gone.
            return ctypes.CDLL(str(_built(source, compiler, Path(directory) / name)))
        except OSError as error:
            raise NoKernelError(f"{source.name} was built and does not load: {error}") from error


def _built(source: Path, compiler: str, library: Path) -> Path:
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not library.exists():
        handle, fresh = tempfile.mkstemp(suffix=".so", dir=library.parent)
        os.close(handle)
        try:
            _compile(source, compiler, fresh)
            # At once, whoever else builds it too.
            Path(fresh).replace(library)
        finally:
            Path(fresh).unlink(missing_ok=True)
    return library


def _compile(source: Path, compiler: str, target: str) -> None:
    try:
        done = subprocess.run(
            [compiler, *_FLAGS, str(source), "-o", target],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoKernelError(f"{compiler} takes more than {_TIMEOUT_S} s for {source.name}") from None
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise NoKernelError(f"{compiler} cannot build {source.name}: {said.strip()}")


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else _COMPILERS:
        if found := shutil.which(name):
            return found
    raise NoKernelError(
        f"there is no C++ compiler ({wanted or ', '.join(_COMPILERS)}); Debian: apt install g++"
    )


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base) / "paceline" / "kernels"


def _digest(source: Path, compiler: str) -> str:
    """Of everything that decides what is built: -march=native takes this processor's instructions."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = (source.read_text(encoding="utf-8"), " ".join(_FLAGS), version, _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("vendor_id", "cpu family", "model\t", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(names)))
