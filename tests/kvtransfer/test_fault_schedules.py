"""Bad days by the thousand: each request has exactly its tokens or has cleanly failed, and nothing stays held.

A schedule is one integer. It draws the steps of the protocol's machine, and so what happens to the real classes: requests,
deaths, clocks, and faults of whatever passes between workers.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import pytest
import structlog

from kvtransfer.transports.faulty import FaultKind
from paceline.core.errors import (
    FingerprintMismatchError,
    KvChecksumError,
    KvLostError,
    LeaseExpiredError,
    PacelineError,
    PeerLostError,
)
from tests.kvtransfer.mutants import MUTANTS, Mutant
from tests.kvtransfer.test_protocol_stateful import DAMAGE, LOST, PROMPTS, WORKERS, ProtocolMachine

NUM_SCHEDULES = 200
# A mutant has to be found within so many.
MAX_SCHEDULES = 2000
# How an attempt may be lost. A bug of ours has another reason.
CLEAN: set[type[PacelineError]] = {
    FingerprintMismatchError,
    KvChecksumError,
    KvLostError,
    LeaseExpiredError,
    PeerLostError,
}
Step = Callable[[], None]


@dataclass
class Tally:
    """What has happened over some schedules."""

    ends: Counter[str] = field(default_factory=Counter)
    struck: Counter[FaultKind] = field(default_factory=Counter)
    deaths: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    num_blocks_lent: int = 0

    def add(self, machine: ProtocolMachine) -> None:
        """A schedule is over."""
        cluster = machine.cluster
        self.ends.update(end for trip in cluster.trips for end in trip.ends)
        self.struck.update(cluster.struck)
        self.deaths.update(cluster.deaths)
        self.reasons.update(cluster.reasons)
        # A prefill worker pulls nothing but loans.
        self.num_blocks_lent += sum(life.worker.num_blocks_pulled for life in cluster.of_tier("prefill"))


class Schedule:
    """What one integer makes of a machine's life."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.machine = ProtocolMachine()

    def run(self) -> None:
        """From the first request to the moment in which everything must be quiet again; all is checked after every step."""
        try:
            self.machine.begin(has_odd_worker=self._rng.random() < 0.1, has_faults=self._rng.random() < 0.9)
            for _ in range(self._rng.randint(8, 24)):
                weights, steps = zip(*self._steps(), strict=True)
                self._rng.choices(steps, weights)[0]()
                self.machine.all_is_well()
        finally:
            self.machine.teardown()

    def _steps(self) -> Iterator[tuple[int, Step]]:
        """What may happen next, and how often it does."""
        machine, rng = self.machine, self._rng
        yield 6, lambda: machine.work(rng.randint(1, 6))
        yield 4, lambda: machine.step(rng.choice(WORKERS))
        yield 2, machine.hear
        yield 2, lambda: machine.wait(rng.choice([0.3, 1.0, 6.0, 31.0]) * rng.random())
        yield 1, lambda: machine.choose_a_way(is_in_place=rng.random() < 0.5)
        if machine.may_come:
            yield 6, self._come
        if machine.may_come_again:
            yield 4, self._come_again
        if machine.may_try_again:
            yield 20, self._try_again
        if machine.alive:
            yield 1, lambda: machine.leave(rng.randrange(4))
        if machine.has_faults:
            yield 2, lambda: machine.plan_loss(rng.choice(LOST))
        if machine.has_faults and machine.may_come:
            yield (
                1,
                lambda: machine.live_through_a_slow_pull(
                    rng.choice(PROMPTS), rng.randint(2, 7), rng.uniform(1, 6)
                ),
            )
        if machine.may_kill:
            yield 2, lambda: machine.kill(rng.choice(WORKERS), rng.uniform(0, 2))

    def _come(self) -> None:
        rng = self._rng
        self._damage()
        prefill, decode, hint = rng.randrange(2), rng.randrange(2), rng.choice([None, *WORKERS])
        self.machine.come(rng.choice(PROMPTS), rng.randint(1, 7), prefill, decode, hint)

    def _come_again(self) -> None:
        self._damage()
        self.machine.come_again(self._rng.randint(1, 7), self._rng.randrange(2))

    def _try_again(self) -> None:
        self._damage()
        self.machine.try_again(self._rng.randrange(2), self._rng.randrange(2))

    def _damage(self) -> None:
        """The first messages of a pull are hit more often, since some pulls have no others."""
        rng = self._rng
        for _ in range(rng.randint(0, 3) if self.machine.has_faults else 0):
            at = rng.choice((0, 0, 1, 1, 2, 3, 6))
            self.machine.plan_damage(rng.choice(DAMAGE), at, rng.uniform(0, 25))


def _live_through(seeds: Iterable[int]) -> Tally:
    """Raises what went wrong, with the seed that shows it."""
    tally = Tally()
    for seed in seeds:
        schedule = Schedule(seed)
        try:
            schedule.run()
        except BaseException as error:
            error.add_note(f"seed {seed}; Schedule({seed}).run() shows it again")
            raise
        tally.add(schedule.machine)
    return tally


def _assert_everything_happened(tally: Tally) -> None:
    """The schedules are neither harmless nor hopeless."""
    assert {kind for kind, count in tally.struck.items() if count} == set(FaultKind)
    assert set(tally.deaths) == set(WORKERS)
    assert set(tally.reasons) == {error.reason for error in CLEAN}
    assert tally.num_blocks_lent
    assert set(tally.ends) == {"served", "failed", "left"}
    assert tally.ends["served"] > 2 * (tally.ends["failed"] + tally.ends["left"])


@pytest.mark.thorough
def test_a_request_under_faults_is_right_or_cleanly_failed() -> None:
    """Exactly the tokens of a single process, or an error of ours; every pool whole after it, and no lease left."""
    _assert_everything_happened(_live_through(range(NUM_SCHEDULES)))


def test_an_integer_is_a_schedule() -> None:
    """The same one makes the same things happen."""
    assert _live_through(range(10)) == _live_through(range(10))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, 10_000, 1000))
def test_ten_thousand_schedules(first: int) -> None:
    """The same for ten thousand, a thousand at a time."""
    tally = _live_through(range(first, first + 1000))
    print(tally)  # noqa: T201 - numbers to keep
    _assert_everything_happened(tally)


@pytest.mark.thorough
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS.keys())
def test_a_rule_left_out_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same schedules that pass with the real classes fail, and by the check that the rule is there for."""
    monkeypatch.setattr(mutant.owner, mutant.name, mutant.function)

    # What the mutant breaks is logged at length otherwise.
    with structlog.testing.capture_logs(), pytest.raises(AssertionError, match=mutant.found) as found:
        _live_through(range(MAX_SCHEDULES))
    print(*found.value.__notes__)  # noqa: T201 - a number to keep


def test_each_kind_of_fault_has_its_mutant() -> None:
    """No kind of fault is left without one."""
    assert {mutant.kind for mutant in MUTANTS.values()} == set(range(1, 11))
