"""Lends the cores of a machine between its workers: who computes has its own ones, and those of workers that do not compute.

All workers have one file. It says of each core until when its owner needs it, and whoever computes on a core holds a lock on these
bytes. The locks are the kernel's: they end with their process, however it ends.
"""

import fcntl
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from mmap import mmap
from pathlib import Path

from paceline.core.clock import Clock, monotonic
from paceline.core.errors import ConfigError

_ENTRY_BYTES = 8
# Between two steps a worker is about to compute again.
_STAY_S = 0.01
# Whoever borrowed a core gives it back after its step. One that is frozen does not, and then two share the core.
_PATIENCE_S = 1.0
_LOOK_S = 0.0005


def create_cores_file(file: Path, num_cores: int) -> None:
    """Of a machine on which nobody computes yet."""
    file.write_bytes(bytes(_ENTRY_BYTES * num_cores))


def num_running_threads() -> int:
    """Threads that run on this machine or would if they could, the caller among them; 1 where nobody says."""
    try:
        return int(Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[0])
    except (OSError, IndexError, ValueError):
        return 1


class Cores:
    """One worker's view of them; `own` are its own. Used by one thread. The file's times are those of the machine's monotonic clock."""

    def __init__(
        self,
        file: Path,
        own: range,
        *,
        clock: Clock = monotonic,
        sleep: Callable[[float], None] = time.sleep,
        num_running: Callable[[], int] = num_running_threads,
    ) -> None:
        _require_cores(file, own.stop)
        self._file = file.open("r+b", buffering=0)
        self._map = mmap(self._file.fileno(), 0)
        self._needed_until = memoryview(self._map).cast("d")
        self._own = own
        self._others = [core for core in range(len(self._needed_until)) if core not in own]
        self._clock, self._sleep, self._num_running = clock, sleep, num_running
        # What an earlier life of this worker said.
        self._say(0.0)

    @contextmanager
    def taken(self) -> Iterator[int]:
        """How many cores this worker may compute on for one step, in which nobody else does."""
        held: list[int] = []
        try:
            # From here on nobody borrows ours; a step that has begun on them is waited for.
            self._say(math.inf)
            held += self._recovered()
            borrowed = list(islice(filter(self._borrows, self._others), self._num_spare()))
            held += borrowed
            yield len(self._own) + len(borrowed)
        finally:
            self._say(self._clock() + _STAY_S)
            self._unlock(held)

    def close(self) -> None:
        """Nobody has to wait for this worker's cores any more."""
        self._say(0.0)
        self._needed_until.release()
        self._map.close()
        self._file.close()

    def _say(self, until_s: float) -> None:
        for core in self._own:
            self._needed_until[core] = until_s

    def _recovered(self) -> Iterator[int]:
        """Our own ones, as they are given back."""
        end_s = self._clock() + _PATIENCE_S
        for core in self._own:
            while not (has_it := self._lock(core)) and self._clock() < end_s:
                self._sleep(_LOOK_S)
            if has_it:
                yield core

    def _num_spare(self) -> int:
        """Cores beyond our own on which nothing runs at this moment, workers or not: a step on one that others use waits for them everywhere."""
        num_others = self._num_running() - 1
        return max(0, len(self._others) - num_others)

    def _borrows(self, core: int) -> bool:
        if not self._is_idle(core) or not self._lock(core):
            return False
        if self._is_idle(core):
            return True
        # Its owner has begun meanwhile.
        self._unlock([core])
        return False

    def _is_idle(self, core: int) -> bool:
        return self._needed_until[core] <= self._clock()

    def _lock(self, core: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, _ENTRY_BYTES, _ENTRY_BYTES * core)
        except OSError:
            return False
        return True

    def _unlock(self, cores: Iterable[int]) -> None:
        for core in cores:
            fcntl.lockf(self._file, fcntl.LOCK_UN, _ENTRY_BYTES, _ENTRY_BYTES * core)


def _require_cores(file: Path, num_cores: int) -> None:
    """Raises ConfigError unless it is a file of so many cores or more."""
    try:
        num_bytes = file.stat().st_size
    except OSError as error:
        raise ConfigError(f"--cores-file {file} cannot be used: {error.strerror}") from error
    if num_bytes % _ENTRY_BYTES or num_bytes < num_cores * _ENTRY_BYTES:
        raise ConfigError(
            f"--cores-file {file} has {num_bytes} bytes, which are not {num_cores} cores or more"
        )
