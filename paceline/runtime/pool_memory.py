"""Memory that other processes of this host can map: a file without a name, which goes with its last user.

It knows no blocks and no leases: who may read what, and when, is the business of those who use it.
"""

import ctypes
import fcntl
import mmap
import os
import secrets
import stat
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path

_NONCE_BYTES = 16
# Nobody can shorten the file, so that no reader dies of memory that is not there any more; and nobody but its owner, who has
# mapped it before, can write to it (Linux 5.1; Python has no name for it).
_F_SEAL_FUTURE_WRITE = 0x0010


@dataclass(frozen=True, slots=True)
class SharedMemoryOffer:
    """Where a process finds another one's memory: open file `fd` of process `pid`, `num_bytes` long, and a page more.

    That page begins with the nonce: who finds it has found this memory, and no other process that has the same number by now, or
    in another container.
    """

    pid: int
    fd: int
    num_bytes: int
    nonce: bytes


class PoolMemory:
    """`num_bytes` zero bytes that begin on a page. They are taken from the machine page by page, as they are first touched.

    `offer` says how others map them; None where the system has no such files. Nobody can write to them but their owner, and those who
    have mapped them before `seal`: who `joins` the memory of another process has that one's, and offers it to nobody. Raises OSError
    where that cannot be reached.
    """

    def __init__(
        self, num_bytes: int, *, is_sealed: bool = True, joins: SharedMemoryOffer | None = None
    ) -> None:
        self.offer: SharedMemoryOffer | None = None
        size = _file_bytes(num_bytes)
        if joins is not None:
            self._map = _map_found(joins, mmap.PROT_READ | mmap.PROT_WRITE)
        elif sys.platform == "linux":
            self._map = self._map_file(num_bytes, size)
        else:
            self._map = mmap.mmap(-1, size)
        self.buffer = memoryview(self._map)[:num_bytes]
        if is_sealed:
            self.seal()

    def seal(self) -> None:
        """From now on nobody who has not mapped it before can write to it."""
        if self.offer is not None:
            fcntl.fcntl(self.offer.fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)

    @property
    def address(self) -> int:
        """Where it begins in this process, for engines that want a number."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def _map_file(self, num_bytes: int, size: int) -> mmap.mmap:
        # Not inherited: children of ours have no business with it, and would keep it alive.
        fd = os.memfd_create("paceline-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, size)
        mapped = mmap.mmap(fd, size)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        mapped[size - mmap.PAGESIZE : size - mmap.PAGESIZE + _NONCE_BYTES] = nonce
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.offer = SharedMemoryOffer(os.getpid(), fd, num_bytes, nonce)
        return mapped


def map_offered(offer: SharedMemoryOffer) -> memoryview:
    """The memory that another process offers, to read. It stays mapped as long as a view of it is there.

    Raises OSError, which says why, when it cannot be reached or is not what was offered.
    """
    return memoryview(_map_found(offer, mmap.PROT_READ))[: offer.num_bytes]


def _map_found(offer: SharedMemoryOffer, protection: int) -> mmap.mmap:
    path, size = f"/proc/{offer.pid}/fd/{offer.fd}", _file_bytes(offer.num_bytes)
    # Looked at before it is opened: under this number there may be anything, and a pipe would keep us waiting.
    _require_file(Path(path).stat(), size)
    access = os.O_RDWR if protection & mmap.PROT_WRITE else os.O_RDONLY
    fd = os.open(path, access | os.O_CLOEXEC)
    try:
        _require_file(os.fstat(fd), size)
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError("the offered file could be shortened while it is read")
        mapped = mmap.mmap(fd, size, prot=protection)
    finally:
        os.close(fd)
    found = mapped[size - mmap.PAGESIZE : size - mmap.PAGESIZE + _NONCE_BYTES]
    if found != offer.nonce:
        raise OSError("the offered file is another one: does its process run in another container?")
    return mapped


def _require_file(found: os.stat_result, size: int) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_size != size:
        raise OSError("there is another file than was offered: does its process run in another container?")


def _file_bytes(num_bytes: int) -> int:
    """Whole pages, and one more for the nonce."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE
