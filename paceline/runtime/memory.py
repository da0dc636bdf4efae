"""Amounts of memory: as a setting names them, as a message shows them, and how much of it is free on this machine."""

import ctypes
import gc
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline.core.errors import ConfigError

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
# Digits enough for any machine, and few enough for a float.
_AMOUNT = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?(%|B|KiB|MiB|GiB|TiB)", re.ASCII)


# Objects that the collector has not looked at: a few megabytes.
_MAX_YOUNG_OBJECTS = 10_000
# Of glibc's mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True, slots=True)
class MemorySize:
    """So many bytes, or a share of the memory that is free when it is asked."""

    num_bytes: int = 0
    share: float = 0.0  # 0: the bytes are meant

    @classmethod
    def parse(cls, text: str, setting: str) -> "MemorySize":
        """What `text` says, such as 4GiB, 512MiB or 40%; raises ConfigError, which names the setting."""
        match = _AMOUNT.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"{setting} {text!r} is no amount of memory: write bytes with their unit "
                f"({', '.join(_UNITS)}), such as 4GiB, or a share of the free memory, such as 40%"
            )
        number = float(match[1])
        if match[2] == "%":
            if not 0 < number <= 100:
                raise ConfigError(f"{setting} {text}: a share is more than 0% and at most 100%")
            return cls(share=number / 100)
        if number * _UNITS[match[2]] < 1:
            raise ConfigError(f"{setting} {text}: it must be more than nothing")
        return cls(num_bytes=int(number * _UNITS[match[2]]))

    def of(self, free_bytes: int) -> int:
        """The bytes that are meant where `free_bytes` are free."""
        return int(self.share * free_bytes) if self.share else self.num_bytes


def shown_bytes(num_bytes: int) -> str:
    """For people: in the largest unit of which there is one, nearly."""
    unit = max(
        (unit for unit in _UNITS if _UNITS[unit] <= 1.0005 * num_bytes), key=_UNITS.__getitem__, default="B"
    )
    return f"{round(num_bytes / _UNITS[unit], 2):g} {unit}"


def keep_freed_memory(num_bytes: int = 64 << 20) -> bool:
    """Lets this process keep up to so much memory that it has freed, instead of giving it back and touching new pages.

    A message of a hand-over is a megabyte, and touching it for the first time takes longer than copying it. glibc comes to the same
    limits by itself where large pieces are freed, but only there. False where malloc is another one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, num_bytes // 2) and mallopt(_M_TRIM_THRESHOLD, num_bytes))


def give_back_freed_memory() -> bool:
    """Gives the system back what this process has freed up to now and malloc has kept; False where malloc is another one.

    Loading a model lays out its weights anew, once or twice, and leaves holes of the size of the weights.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


def keep_for_good() -> None:
    """What is there when a service has started stays to its end: the garbage collector never looks at it again.

    Libraries leave a hundred thousand objects and more. To go through them holds up every stream of the process for a tenth of a
    second, again and again, and finds nothing. What a request makes is nearly always freed without the collector, and so it looks
    seldom.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_MAX_YOUNG_OBJECTS)


def free_memory_bytes(cgroup: Path | None = None) -> int:
    """What could be taken now without swapping: of the machine, and of our control group, whichever is less."""
    return min([psutil.virtual_memory().available, *_left_in(cgroup or _own_cgroup())])


def _own_cgroup() -> Path:
    """Our place in the one hierarchy of cgroup v2; a path that does not exist where there is none."""
    root, own = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
    lines = own.read_text(encoding="utf-8").splitlines() if own.is_file() else []
    return root / next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")


def _left_in(cgroup: Path) -> list[int]:
    """What each limit on the way up leaves; pages of files that nobody uses are given back, and count as free."""
    left = []
    for group in (cgroup, *cgroup.parents):
        try:
            limit = (group / "memory.max").read_text(encoding="utf-8").strip()
            used = int((group / "memory.current").read_text(encoding="utf-8"))
            stat = (group / "memory.stat").read_text(encoding="utf-8")
        except OSError:  # not a group: the root, or above it
            continue
        if limit != "max":
            left.append(max(0, int(limit) - used + _inactive_file(stat)))
    return left


def _inactive_file(stat: str) -> int:
    lines = (line.split() for line in stat.splitlines())
    return next((int(number) for name, number in lines if name == "inactive_file"), 0)
