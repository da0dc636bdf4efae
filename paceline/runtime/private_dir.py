"""Temporary directories that are gone when their process is, however it ended."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def private_dir(base: Path, prefix: str) -> Iterator[Path]:
    """A directory in `base`, readable by this user alone and removed at the end.

    What a killed process left under the same prefix is removed first, so let the prefix be one that nobody else
    would use. The kernel drops a lock with the process that held it, and so tells remains from a directory at work.
    """
    with _locked(base):
        _sweep(base, prefix)
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        lock = _lock(directory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _sweep(base: Path, prefix: str) -> None:
    for remains in base.glob(f"{prefix}????????"):  # as mkdtemp makes names
        # Locked by its owner, another user's, or just gone: not ours to remove.
        with contextlib.suppress(OSError), _locked(remains, wait=False):
            shutil.rmtree(remains, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: Path, *, wait: bool = True) -> Iterator[None]:
    lock = _lock(directory, wait=wait)
    try:
        yield
    finally:
        os.close(lock)


def _lock(directory: Path, *, wait: bool = True) -> int:
    """The descriptor that holds the directory's lock; closing it lets go."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
