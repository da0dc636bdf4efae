"""Lends the cores of a machine between its workers: who computes has its own ones, and those of workers that do not compute.

All workers have one file. It says of each core until when its owner needs it, and, at an owner's first one, how long that has computed
in all. Whoever computes on a core holds a lock on its bytes. The locks are the kernel's: they end with their process, however it ends.
"""

import fcntl
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from mmap import mmap
from pathlib import Path

from paceline.core.clock import Clock, monotonic
from paceline.core.errors import ConfigError

_NUMBERS_PER_CORE = 2  # the time, and seconds of computing
_ENTRY_BYTES = 8 * _NUMBERS_PER_CORE
# Between two steps a worker is about to compute again.
_STAY_S = 0.01
# Whoever borrowed a core gives it back after its step. One that is frozen does not, and then two share the core.
_PATIENCE_S = 1.0
_LOOK_S = 0.0005
# So often it is looked at what others than workers take of this machine, and so much of a core they may.
_WINDOW_S = 0.5
_SMALL_LOAD = 0.3


def create_cores_file(file: Path, num_cores: int) -> None:
    """Of a machine on which nobody computes yet."""
    file.write_bytes(bytes(_ENTRY_BYTES * num_cores))


def machine_busy_s() -> float:
    """For how long all cores of this machine together have computed since it started; 0 where nobody says."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
        user, nice, system, _idle, _waiting, interrupts, soft_interrupts = map(int, line.split()[1:8])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + interrupts + soft_interrupts) / os.sysconf("SC_CLK_TCK")


class Cores:
    """One worker's view of them; `own` are its own. Used by one thread. The file's times are those of the machine's monotonic clock."""

    def __init__(
        self,
        file: Path,
        own: range,
        *,
        clock: Clock = monotonic,
        sleep: Callable[[float], None] = time.sleep,
        busy_s: Callable[[], float] = machine_busy_s,
        own_busy_s: Callable[[], float] = time.process_time,
    ) -> None:
        _require_cores(file, own.stop)
        self._file = file.open("r+b", buffering=0)
        self._map = mmap(self._file.fileno(), 0)
        self._numbers = memoryview(self._map).cast("d")
        self._own = own
        num_cores = len(self._numbers) // _NUMBERS_PER_CORE
        self._others = [core for core in range(num_cores) if core not in own]
        self._clock, self._sleep = clock, sleep
        self._busy_s, self._own_busy_s = busy_s, own_busy_s
        self._tell_busy()
        # When it was looked, and what others than workers had computed by then; how many cores they take.
        self._looked_s, self._foreign_s, self._num_foreign = clock(), self._foreign(), 0.0
        # What an earlier life of this worker said.
        self._say(0.0)
        self._require_locks(file)

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
            self._tell_busy()
            self._unlock(held)

    def close(self) -> None:
        """Nobody has to wait for this worker's cores any more."""
        self._say(0.0)
        self._numbers.release()
        self._map.close()
        self._file.close()

    def _say(self, until_s: float) -> None:
        for core in self._own:
            self._numbers[_NUMBERS_PER_CORE * core] = until_s

    def _tell_busy(self) -> None:
        self._numbers[_NUMBERS_PER_CORE * self._own.start + 1] = self._own_busy_s()

    def _recovered(self) -> Iterator[int]:
        """Our own ones, as they are given back."""
        end_s = self._clock() + _PATIENCE_S
        for core in self._own:
            while not (has_it := self._lock(core)) and self._clock() < end_s:
                self._sleep(_LOOK_S)
            if has_it:
                yield core

    def _num_spare(self) -> int:
        """Cores beyond our own that nobody but workers needs: a step on one that others use waits for them in each of its pieces."""
        passed_s = self._clock() - self._looked_s
        if passed_s >= _WINDOW_S:
            foreign_s = self._foreign()
            self._num_foreign = (foreign_s - self._foreign_s) / passed_s
            self._looked_s, self._foreign_s = self._clock(), foreign_s
        return max(0, len(self._others) - math.ceil(max(0.0, self._num_foreign - _SMALL_LOAD)))

    def _foreign(self) -> float:
        return self._busy_s() - sum(self._numbers[1::_NUMBERS_PER_CORE])

    def _borrows(self, core: int) -> bool:
        if not self._is_idle(core) or not self._lock(core):
            return False
        if self._is_idle(core):
            return True
        # Its owner has begun meanwhile.
        self._unlock([core])
        return False

    def _is_idle(self, core: int) -> bool:
        return self._numbers[_NUMBERS_PER_CORE * core] <= self._clock()

    def _lock(self, core: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, _ENTRY_BYTES, _ENTRY_BYTES * core)
        except (
            BlockingIOError,
            PermissionError,
        ):  # the two ways in which a system says that another one has it
            return False
        return True

    def _require_locks(self, file: Path) -> None:
        """Some file systems of a network have none."""
        try:
            if self._lock(self._own.start):
                self._unlock([self._own.start])
        except OSError as error:
            raise ConfigError(f"--cores-file {file} cannot be locked: {error.strerror}") from error

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
