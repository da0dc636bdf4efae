"""Cores that are lent: each has one user at a time, its owner comes first, and no crash keeps one."""

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.core.clock import ManualClock
from paceline.core.errors import ConfigError
from paceline.runtime.cores import Cores, create_cores_file, machine_busy_s

# A worker in a process of its own, since locks are a process's. Each line says what time it is; steps begin and end by turns.
_WORKER = """
import sys
from pathlib import Path
from paceline.core.clock import ManualClock
from paceline.runtime.cores import Cores

clock = ManualClock()
cores = Cores(Path(sys.argv[1]), range(int(sys.argv[2]), int(sys.argv[3])), clock=clock, busy_s=lambda: 0.0, own_busy_s=lambda: 0.0)

def waits():
    line = sys.stdin.readline()
    clock.advance(float(line) - clock() if line else 0)
    return bool(line)

while waits():
    with cores.taken() as num_cores:
        print(num_cores, flush=True)
        waits()
    print("ended", flush=True)
"""


class Worker:
    """Another process with cores of its own, at the time of the desk's clock."""

    def __init__(self, file: Path, own: range, clock: ManualClock) -> None:
        argv = [sys.executable, "-c", _WORKER, str(file), str(own.start), str(own.stop)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._clock = clock

    def begin(self) -> int:
        """Begins a step; gives on how many cores."""
        return int(self._answer())

    def end(self) -> None:
        """Ends it."""
        assert self._answer() == "ended"

    def kill(self) -> None:
        """It is no more."""
        with self.process:
            self.process.kill()

    def _answer(self) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{self._clock()}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


class Desk:
    """This process's worker and others, at one time by hand."""

    def __init__(self, file: Path, stack: ExitStack) -> None:
        self.file, self._stack = file, stack
        self.clock = ManualClock(100.0)
        self.num_looks = 0
        # What the whole machine has computed, and our worker.
        self.busy_s = self.own_busy_s = 50.0
        self.on_look: Callable[[], None] = lambda: None

    def cores(self, own: range) -> Cores:
        """Ours."""
        cores = Cores(
            self.file,
            own,
            clock=self.clock,
            sleep=self._sleep,
            busy_s=lambda: self.busy_s,
            own_busy_s=lambda: self.own_busy_s,
        )
        self._stack.callback(cores.close)
        return cores

    def worker(self, own: range) -> Worker:
        """Somebody else's."""
        worker = Worker(self.file, own, self.clock)
        self._stack.callback(worker.kill)
        return worker

    def _sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.num_looks += 1
        self.on_look()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """Four cores."""
    create_cores_file(tmp_path / "cores", 4)
    with ExitStack() as stack:
        yield Desk(tmp_path / "cores", stack)


def test_who_computes_alone_has_all_cores(desk: Desk) -> None:
    """Also those that belong to nobody."""
    with desk.cores(range(2)).taken() as num_cores:
        assert num_cores == 4
    assert desk.num_looks == 0


@pytest.mark.parametrize(
    ("others_s", "ours_s", "expected"), [(0.2, 0, 4), (0.2, 3.0, 4), (0.5, 3.0, 3), (1.9, 0, 2), (4, 0, 2)]
)
def test_a_core_that_others_than_workers_use_is_not_borrowed(
    desk: Desk, others_s: float, ours_s: float, expected: int
) -> None:
    """In the last second they computed for so long, and we for so long; our own cores are ours."""
    cores = desk.cores(range(2))
    with cores.taken() as num_cores:
        assert num_cores == 4
        desk.own_busy_s += ours_s
    desk.busy_s += ours_s + others_s
    desk.clock.advance(1)
    with cores.taken() as num_cores:
        assert num_cores == expected
    # And when they have stopped they are lent again.
    desk.clock.advance(1)
    with cores.taken() as num_cores:
        assert num_cores == 4


def test_what_this_machine_has_computed_is_known() -> None:
    """This process has, at least."""
    assert machine_busy_s() >= time.process_time() - 0.1


def test_an_owner_waits_for_the_step_that_its_core_was_lent_for(desk: Desk) -> None:
    """And not again: from then on the borrower leaves it alone."""
    ours, other = desk.cores(range(2)), desk.worker(range(2, 4))
    assert other.begin() == 4
    desk.on_look = lambda: other.end() if desk.num_looks == 3 else None
    with ours.taken() as num_cores:
        assert desk.num_looks == 3
        # The other one has only just ended, and so is about to begin.
        assert num_cores == 2
        assert other.begin() == 2


def test_a_core_is_lent_once_its_owner_has_stopped(desk: Desk) -> None:
    """Not between two steps."""
    first, second = desk.cores(range(2)), desk.worker(range(2, 4))
    with first.taken():
        pass
    assert second.begin() == 2
    second.end()
    desk.clock.advance(0.02)
    assert second.begin() == 4


def test_what_a_lost_borrower_held_comes_back(desk: Desk) -> None:
    """It was killed in the midst of a step. Its own cores are lent again when it is back."""
    ours, other = desk.cores(range(2)), desk.worker(range(2, 4))
    assert other.begin() == 4
    other.kill()
    desk.clock.advance(1)
    with ours.taken() as num_cores:
        assert num_cores == 2
    desk.cores(range(2, 4))
    with ours.taken() as num_cores:
        assert num_cores == 4
    assert desk.num_looks == 0


def test_a_frozen_borrower_is_not_waited_for_for_ever(desk: Desk) -> None:
    """After a second two share a core: slow, and nobody hangs."""
    ours, other = desk.cores(range(2)), desk.worker(range(2, 4))
    assert other.begin() == 4
    with ours.taken() as num_cores:
        assert num_cores == 2
    assert desk.clock() == pytest.approx(101.0, abs=0.01)


def test_a_step_that_fails_gives_its_cores_back(desk: Desk) -> None:
    """So that others can have them."""
    ours, other = desk.cores(range(2)), desk.worker(range(2, 4))
    with pytest.raises(ZeroDivisionError), ours.taken():
        raise ZeroDivisionError
    desk.clock.advance(1)
    assert other.begin() == 4


@pytest.mark.parametrize("content", [b"", b"1234567", bytes(16)])
def test_a_file_that_is_none_of_cores_is_refused(tmp_path: Path, content: bytes) -> None:
    """Empty, cut off, or of fewer cores than ours."""
    (tmp_path / "cores").write_bytes(content)
    for name in ("cores", "none"):
        with pytest.raises(ConfigError, match="--cores-file"):
            Cores(tmp_path / name, range(1, 2))


def test_no_core_has_two_users(tmp_path: Path) -> None:
    """Whoever begins and ends, in whatever order: those that compute have no more than all cores together."""
    create_cores_file(tmp_path / "cores", 3)
    rng, clock = random.Random(0), ManualClock(100.0)
    workers = [Worker(tmp_path / "cores", range(n, n + 1), clock) for n in range(3)]
    computing: dict[int, int] = {}
    seen: set[int] = set()
    try:
        for _ in range(400):
            clock.advance(rng.choice([0.001, 0.02]))
            number = rng.randrange(3)
            if number in computing:
                workers[number].end()
                del computing[number]
            # Otherwise it would wait for whoever borrowed its core.
            elif set(computing.values()) <= {1}:
                computing[number] = workers[number].begin()
                seen.add(computing[number])
            assert sum(computing.values()) <= 3
    finally:
        for worker in workers:
            worker.kill()
    assert seen == {1, 2, 3}
