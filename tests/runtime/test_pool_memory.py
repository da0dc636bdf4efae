"""Memory that another process can map, and nothing else by mistake."""

import gc
import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.runtime.pool_memory import PoolMemory, map_offered

NUM_BYTES = 3 * mmap.PAGESIZE + 7


def _offered() -> PoolMemory:
    pool = PoolMemory(NUM_BYTES)
    assert pool.offer is not None
    return pool


def test_what_the_owner_writes_the_reader_sees() -> None:
    """Both look at the same bytes, which are zero at first; the reader cannot write."""
    pool = _offered()
    assert pool.offer is not None
    seen = map_offered(pool.offer)
    assert bytes(seen) == bytes(NUM_BYTES)
    pool.buffer[NUM_BYTES - 4 :] = b"last"
    assert bytes(seen[-4:]) == b"last"
    assert seen.readonly


def test_another_process_maps_it() -> None:
    """By what the offer says alone."""
    pool = _offered()
    pool.buffer[:5] = b"hello"
    code = (
        "from paceline.runtime.pool_memory import SharedMemoryOffer, map_offered\n"
        f"print(bytes(map_offered({pool.offer!r})[:5]).decode())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "hello"


def test_the_reader_keeps_what_the_owner_has_let_go() -> None:
    """A view stays good; a new reader finds nothing."""
    pool = _offered()
    offer = pool.offer
    assert offer is not None
    pool.buffer[:3] = b"abc"
    seen = map_offered(offer)
    del pool
    gc.collect()
    assert bytes(seen[:3]) == b"abc"
    with pytest.raises(OSError, match=r"."):
        map_offered(offer)


def test_it_leaves_nothing_open() -> None:
    """Neither the pool nor a view of it leaves a file behind."""
    # What other tests have left to the collector is closed before the count, not between the two.
    gc.collect()
    before = _open_files()
    pool = _offered()
    assert pool.offer is not None
    seen = map_offered(pool.offer)
    assert len(_open_files()) > len(before)
    del pool, seen
    gc.collect()
    assert _open_files() == before


def _open_files() -> list[str]:
    """What this process has open now, each as what it is."""
    files = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]
    return sorted(f"{path.name} {path.readlink()}" for path in files)


def test_a_child_does_not_inherit_it() -> None:
    """A process that we start has no open file of ours."""
    pool = _offered()
    assert pool.offer is not None
    assert not os.get_inheritable(pool.offer.fd)


def test_nobody_else_can_write_to_it() -> None:
    """Not even who opens the file for writing."""
    pool = _offered()
    assert pool.offer is not None
    fd = os.open(f"/proc/self/fd/{pool.offer.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, NUM_BYTES)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def test_another_file_is_refused() -> None:
    """One of another size, one that can shrink, one that is no file, one with another nonce, and none at all."""
    pool, other = _offered(), _offered()
    assert pool.offer is not None
    assert other.offer is not None
    soft = os.memfd_create("soft")
    os.ftruncate(soft, 5 * mmap.PAGESIZE)
    reading, writing = os.pipe()
    try:
        for wrong in (
            replace(pool.offer, num_bytes=2 * NUM_BYTES),
            replace(pool.offer, fd=soft),
            replace(pool.offer, fd=reading),
            replace(pool.offer, fd=other.offer.fd),
            replace(pool.offer, pid=2**22 + 1),
        ):
            with pytest.raises(OSError, match=r"offered|No such"):
                map_offered(wrong)
    finally:
        for fd in (soft, reading, writing):
            os.close(fd)


def test_who_joins_in_time_writes_to_the_same_bytes() -> None:
    """Until it is sealed a process of the same worker can map it to write, and afterwards nobody; who did goes on."""
    owned = PoolMemory(NUM_BYTES, is_sealed=False)
    assert owned.offer is not None
    joined = PoolMemory(NUM_BYTES, joins=owned.offer)
    owned.seal()
    joined.buffer[:3] = b"abc"
    assert bytes(owned.buffer[:3]) == b"abc"
    assert joined.offer is None
    with pytest.raises(PermissionError):
        PoolMemory(NUM_BYTES, joins=owned.offer)
    assert bytes(map_offered(owned.offer)[:3]) == b"abc"
