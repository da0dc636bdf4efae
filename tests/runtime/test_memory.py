"""Amounts of memory: read, shown, and found free."""

import ctypes
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from paceline.runtime.memory import MemorySize, free_memory_bytes, shown_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GiB", 4 << 30),
        ("512 MiB", 512 << 20),
        ("1.5KiB", 1536),
        (" 7B ", 7),
        ("2TiB", 2 << 40),
        ("40%", 400),
        ("12.5%", 125),
        ("100%", 1000),
    ],
)
def test_an_amount_is_bytes_or_a_share(text: str, expected: int) -> None:
    """Bytes do not depend on what is free; a share is of nothing else."""
    assert MemorySize.parse(text, "--size").of(free_bytes=1000) == expected


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (368_640, "360 KiB"), (3 << 29, "1.5 GiB")],
)
def test_bytes_are_shown_in_a_unit_that_fits(num_bytes: int, expected: str) -> None:
    """The largest unit of which there is at least one."""
    assert shown_bytes(num_bytes) == expected


def _group(directory: Path, limit: str, used: int, inactive_file: int) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n", encoding="utf-8")
    (directory / "memory.current").write_text(f"{used}\n", encoding="utf-8")
    (directory / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\n", encoding="utf-8")
    return directory


def test_every_limit_of_a_control_group_counts(tmp_path: Path) -> None:
    """What is free is the least that any group on the way up leaves; a group without a limit leaves all."""
    assert free_memory_bytes(_group(tmp_path / "a", "max", 10**15, 0)) > 10**6
    inner = _group(tmp_path / "a" / "b", "1000", 700, inactive_file=200)
    assert free_memory_bytes(inner) == 500
    _group(tmp_path / "a", "800", 600, inactive_file=0)
    assert free_memory_bytes(inner) == 200
    _group(tmp_path / "a", "800", 900, inactive_file=0)
    assert free_memory_bytes(inner) == 0


def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    """A place that is no group limits nothing."""
    assert 0 < free_memory_bytes(tmp_path / "none") <= psutil.virtual_memory().total


_ROUNDS = """
import resource, sys
from paceline.runtime.memory import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else True
def touch():
    pieces = [bytes([1]) * (500 << 10) for _ in range(16)]
for _ in range(5):
    touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    touch()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_memory_that_is_freed_is_used_again() -> None:
    """Pieces of half a megabyte, freed together: without it their pages are touched for the first time again and again."""
    faults = {}
    for how in ("keep", "leave"):
        command = [sys.executable, "-c", _ROUNDS, how]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        kept, num_faults = done.stdout.split()
        assert kept == "True"
        faults[how] = int(num_faults)
    assert faults["keep"] < 100
    assert faults["leave"] > 10_000


_CYCLES = """
import gc
from paceline.runtime.memory import keep_for_good
class Node: pass
kept = [Node() for _ in range(1000)]
keep_for_good()
print(any(type(each) is Node for each in gc.get_objects()))
for _ in range(100_000):
    node = Node()
    node.itself = node
print(sum(type(each) is Node for each in gc.get_objects()))
"""


def test_what_is_there_at_the_start_is_not_looked_at_again() -> None:
    """The collector has nothing to do with it; what comes later and refers to itself is still found."""
    done = subprocess.run([sys.executable, "-c", _CYCLES], capture_output=True, text=True, check=True)
    sees_kept, num_left = done.stdout.split()
    assert sees_kept == "False"
    assert int(num_left) < 20_000


_HOLES = """
import psutil
from paceline.runtime.memory import give_back_freed_memory, keep_freed_memory
keep_freed_memory()
# Every other one stays, so that no end of the heap is free.
pieces = [bytearray(200_000) for _ in range(400)]
del pieces[::2]
before = psutil.Process().memory_info().rss
print(give_back_freed_memory(), before - psutil.Process().memory_info().rss)
"""


def test_what_was_freed_between_what_is_used_goes_back() -> None:
    """As weights do that were laid out anew; where malloc can."""
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("this malloc has no such call")
    done = subprocess.run([sys.executable, "-c", _HOLES], capture_output=True, text=True, check=True)
    gave, num_bytes = done.stdout.split()
    assert gave == "True"
    assert int(num_bytes) > 20_000_000
