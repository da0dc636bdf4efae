"""How much memory processes take together, shared pages counted once."""

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path

import psutil

_LOOK_EVERY_S = 1.0


def resident_bytes(pids: Collection[int]) -> int:
    """Of processes and their children: proportional set size where the kernel tells it, else resident set size."""
    return sum(_of(process) for pid in pids for process in _family(pid))


async def watch_peak(pids: Callable[[], Collection[int]], note: Callable[[int], None]) -> None:
    """Tells `note` what they take, again and again; cancel it to end."""
    while True:
        note(await asyncio.to_thread(resident_bytes, pids()))
        await asyncio.sleep(_LOOK_EVERY_S)


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _of(process: psutil.Process) -> int:
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        pass
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0
