"""The protocol's steps, in any order, on the real classes."""

import asyncio
import sys
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtransfer.transports.faulty import Fault, FaultKind
from tests.factories import make_spec
from tests.kvtransfer.small_cluster import TTL_S, SmallCluster, Trip
from tests.virtual_time import VirtualTimeLoop

# Some begin alike; block boundaries lie within, at, and behind their ends.
PROMPTS = (
    tuple(range(1, 10)),
    (1, 2, 3, 4, 9, 8, 7, 6),
    (1, 2, 3, 4, 5, 6, 7, 8, 1, 1, 1),
    (20, 21, 22),
)
DAMAGE = tuple(kind for kind in FaultKind if not kind.name.startswith("LOSE"))
LOST = (FaultKind.LOSE_RENEWALS, FaultKind.LOSE_RELEASE, FaultKind.LOSE_RELEASE_ANSWER)
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
MAX_KILLS = 2
two = st.integers(0, 1)


class ProtocolMachine(RuleBasedStateMachine):
    """A small cluster whose requests, faults, deaths and clocks are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.is_calm = self.has_faults = True
        self.num_kills = 0
        self.slept_s = 0.0

    def _do(self, act: Callable[[], object]) -> None:
        """Does something on the loop, and lets everybody do what takes no time."""

        async def do() -> None:
            act()
            await self.cluster.settle()

        self.runner.run(do())

    @property
    def alive(self) -> list[Trip]:
        """Requests that have not ended."""
        return [trip for trip in self.cluster.trips if not trip.is_over]

    @property
    def may_come(self) -> bool:
        """There are not too many."""
        return len(self.alive) < 4

    @property
    def may_try_again(self) -> bool:
        """One has lost its attempt."""
        return any(not trip.is_placed for trip in self.alive)

    @property
    def may_kill(self) -> bool:
        """Somebody may die yet."""
        return self.has_faults and self.num_kills < MAX_KILLS

    @initialize(
        has_odd_worker=st.sampled_from([False, False, False, True]),
        has_faults=st.sampled_from([True, True, True, False]),
    )
    def begin(self, *, has_odd_worker: bool, has_faults: bool) -> None:
        """Nobody has done anything."""
        self.has_faults = has_faults

        async def make() -> None:
            """On the loop."""
            self.cluster = SmallCluster(has_odd_worker=has_odd_worker and has_faults)

        self.runner.run(make())
        self.is_calm = not self.cluster.has_odd_worker

    @precondition(lambda self: self.may_come)
    @rule(
        prompt=st.sampled_from(PROMPTS),
        max_tokens=st.integers(1, 7),
        prefill=two,
        decode=two,
        hint=st.sampled_from([None, *WORKERS]),
    )
    def come(
        self, prompt: tuple[int, ...], max_tokens: int, prefill: int, decode: int, hint: str | None = None
    ) -> None:
        """A request comes and is placed."""
        cluster = self.cluster
        spec = make_spec(f"r{len(cluster.trips)}", prompt, max_tokens=max_tokens, ignore_eos=True)
        cluster.trips.append(Trip(cluster, spec))
        self._do(lambda: self._place(cluster.trips[-1], prefill, decode, hint))

    @property
    def may_come_again(self) -> bool:
        """Somebody may ask for the prompt that was last asked for."""
        return self.may_come and bool(self.cluster.trips)

    @precondition(lambda self: self.may_come_again)
    @rule(max_tokens=st.integers(1, 7), decode=two)
    def come_again(self, max_tokens: int, decode: int) -> None:
        """The last prompt once more, at the other prefill worker, which may borrow it."""
        last = self.cluster.trips[-1]
        prefill = 1 - int(last.prefill.name[-1])
        self.come(last.spec.prompt_ids, max_tokens, prefill, decode, last.prefill.name)

    @precondition(lambda self: self.may_try_again)
    @rule(prefill=two, decode=two)
    def try_again(self, prefill: int, decode: int) -> None:
        """A request whose attempt was lost is placed again."""
        trip = next(trip for trip in self.alive if not trip.is_placed)
        self._do(lambda: self._place(trip, prefill, decode))

    def _place(self, trip: Trip, prefill: int, decode: int, hint: str | None = None) -> None:
        cluster = self.cluster
        workers = cluster.of_tier("prefill")[prefill], cluster.of_tier("decode")[decode]
        other = None if hint in (None, workers[0].name) else cluster.lives[hint]
        trip.place(*workers, other)

    @rule(name=st.sampled_from(WORKERS))
    def step(self, name: str) -> None:
        """One engine steps."""
        self._do(self.cluster.lives[name].engine.step)

    @rule()
    def hear(self) -> None:
        """The router reads what was said to it."""
        self.runner.run(self.cluster.hear())
        self._do(lambda: None)

    @rule(num_rounds=st.integers(1, 6))
    def work(self, num_rounds: int) -> None:
        """Everybody goes on for a while."""
        for _ in range(num_rounds):
            self.runner.run(self.cluster.work())
            self.cluster.check()

    @rule(duration_s=st.sampled_from([0.4, 1.0, 6.0, 31.0]))
    def wait(self, duration_s: float) -> None:
        """Only time passes. Nobody computes or reads; for longer than a lease or a receiver bears, that is a fault."""
        self.slept_s += duration_s
        self.is_calm = self.is_calm and self.slept_s <= TTL_S / 2
        self.runner.run(asyncio.sleep(duration_s))

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 3))
    def leave(self, which: int) -> None:
        """A client goes away."""
        trip = self.alive[which % len(self.alive)]
        self._do(lambda: trip.end("left"))

    @precondition(lambda self: self.has_faults)
    @rule(kind=st.sampled_from(DAMAGE), at=st.integers(0, 6), delay_s=st.sampled_from([3.0, 8.0, 25.0]))
    def plan_damage(self, kind: FaultKind, at: int, delay_s: float) -> None:
        """Something will happen to a message of the next pull."""
        self.is_calm = False
        self.cluster.faults.append(Fault(kind, at, delay_s))

    @precondition(lambda self: self.has_faults and self.may_come)
    @rule(
        prompt=st.sampled_from(PROMPTS),
        max_tokens=st.integers(2, 7),
        delay_s=st.sampled_from([1.8, 2.5, 5.5]),
    )
    def live_through_a_slow_pull(self, prompt: tuple[int, ...], max_tokens: int, delay_s: float) -> None:
        """All messages of a pull come late, and no renewal arrives meanwhile."""
        self.is_calm = False
        self.cluster.faults = [Fault(FaultKind.DELAY, at, delay_s) for at in range(7)]
        self.come(prompt, max_tokens, prefill=0, decode=0)
        self.work(num_rounds=4)
        self.cluster.num_renewals_to_lose = 8
        self.wait(20.0)

    @rule(is_in_place=st.booleans())
    def choose_a_way(self, *, is_in_place: bool) -> None:
        """From now on pulls are written in place by an engine, or are not."""
        self.cluster.is_in_place = is_in_place

    @precondition(lambda self: self.has_faults)
    @rule(kind=st.sampled_from(LOST))
    def plan_loss(self, kind: FaultKind) -> None:
        """The next release will be lost, or its answer, or the next renewals."""
        self.is_calm = False
        if kind is FaultKind.LOSE_RENEWALS:
            self.cluster.num_renewals_to_lose = 8
        else:
            self.cluster.releases_to_lose.append(kind)

    @precondition(lambda self: self.may_kill)
    @rule(name=st.sampled_from(WORKERS), after_s=st.sampled_from([0.0, 0.3, 1.1]))
    def kill(self, name: str, after_s: float) -> None:
        """A worker dies and comes back, now or in the midst of what others do next."""
        self.is_calm = False
        self.num_kills += 1
        loop = self.runner.get_loop()
        self._do(lambda: loop.call_later(after_s, self.cluster.kill, name))

    @invariant()
    def all_is_well(self) -> None:
        """See SmallCluster.check. Where nothing has gone wrong no attempt fails."""
        if hasattr(self, "cluster"):
            self.cluster.check()
            self.is_calm = self.is_calm and not self.cluster.num_expired
            assert not self.is_calm or not self.cluster.reasons, (
                f"failed for no reason: {self.cluster.reasons}"
            )

    def teardown(self) -> None:
        """All comes to its end; without a fault no lease needs its clock for that."""
        try:
            # What has failed does not go on.
            if hasattr(self, "cluster") and sys.exc_info()[0] is None:
                self.runner.run(self.cluster.finish())
                if self.is_calm:
                    assert not self.cluster.num_expired, "a lease was left to its clock"
                    assert not self.cluster.reasons, f"failed for no reason: {self.cluster.reasons}"
                assert all(len(trip.ends) == 1 for trip in self.cluster.trips)
        finally:
            self.runner.close()


TestProtocol = ProtocolMachine.TestCase
TestProtocol.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_long_histories() -> None:
    """The same for thousands of histories that are longer, and others each time."""
    far = settings(max_examples=5000, stateful_step_count=80, deadline=None)
    run_state_machine_as_test(ProtocolMachine, settings=far)
