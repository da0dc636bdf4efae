"""What an engine says of its steps, for whoever looks from outside."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from paceline.core.clock import Clock, ManualClock
from paceline.core.request import FirstToken, Priority, SequenceSpec
from paceline.engine import admission
from paceline.engine.block_pool import BlockPool
from paceline.engine.engine import Engine
from paceline.engine.fake import FakeModelRunner
from paceline.engine.scheduler import Scheduler
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.sequence import SequenceRole
from paceline.engine.step import SchedulerOutput, StepOutput
from paceline.engine.step_report import Admission, StepReport
from tests.engine.harness import VOCAB_SIZE
from tests.factories import BLOCK_SIZE, make_id, make_spec

NUM_BLOCKS = 16
RUNNER_S = 3.0
GENERATE = SequenceRole.GENERATE


class _SlowRunner(FakeModelRunner):
    """Moves the clock while it computes."""

    clock: ManualClock

    def execute(self, output: SchedulerOutput) -> StepOutput:
        self.clock.advance(RUNNER_S)
        return super().execute(output)


@dataclass(frozen=True)
class Bench:
    """An engine on a clock that moves only when told to, or while the runner computes."""

    engine: Engine
    clock: ManualClock

    def add(self, spec: SequenceSpec, role: SequenceRole = GENERATE) -> None:
        """Queues a sequence."""
        self.engine.add(spec, role)

    def waiting(self) -> tuple[int, ...]:
        """Those whose turn has not come, the most urgent first."""
        return self.engine.stats().queues.num_waiting_by_priority


def make_bench(*, max_num_seqs: int = 8, look: Callable[[Clock], Clock] = lambda clock: clock) -> Bench:
    """`look` is what the engine sees of the clock."""
    clock = ManualClock()
    runner = _SlowRunner(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE)
    runner.clock = clock
    config = SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=max_num_seqs, fingerprint=b"model")
    scheduler = Scheduler(config, BlockPool(NUM_BLOCKS, BLOCK_SIZE), runner.memory, clock=clock)
    return Bench(Engine(scheduler, runner, clock=look(clock)), clock)


def test_a_step_is_reported_with_its_parts() -> None:
    """What was computed and sampled, and the time of scheduler and runner apart; a step without work has no report."""
    looked: list[float] = []

    def look(clock: Clock) -> Clock:
        """Each look at the clock costs a second, so that the scheduler's two parts take one each."""

        def ticking() -> float:
            looked.append(0.0)
            return clock() + len(looked)

        return ticking

    bench = make_bench(look=look)
    assert bench.engine.step().report is None
    bench.add(make_spec("a", (1, 2, 3), max_tokens=2))
    bench.add(make_spec("b", (1,) * 9, max_tokens=2))
    first, second = bench.engine.step().report, bench.engine.step().report
    expected = StepReport(
        num_sequences=2, num_tokens=8, num_sampled_tokens=1, scheduler_s=2.0, runner_s=RUNNER_S + 1
    )
    assert first == expected
    assert second == StepReport(2, 5, 2, 2.0, RUNNER_S + 1)


def test_admissions_are_told_with_wait_and_cache() -> None:
    """Each sequence once, when it has begun: its class, its wait, its tokens, and how many of them were cached."""
    bench = make_bench()
    prompt = tuple(range(10))
    bench.add(make_spec("a", prompt, max_tokens=1, priority=Priority.REALTIME))
    bench.clock.advance(5)
    admissions = [admission for _ in range(3) for admission in bench.engine.step().admissions]
    assert admissions == [Admission(Priority.REALTIME, 5.0, 10, 0)]
    bench.add(make_spec("b", prompt, max_tokens=1))
    assert bench.engine.step().admissions == (Admission(Priority.STANDARD, 0.0, 10, 8),)


def test_a_hand_over_waits_for_its_room_too() -> None:
    """Its wait is told when its blocks are reserved; it comes with nothing to compute."""
    bench = make_bench(max_num_seqs=1)
    bench.add(make_spec("first", (1, 2), max_tokens=2))
    bench.add(make_spec("second", (3, 4)), SequenceRole.AWAIT_KV)
    assert len(bench.engine.step().admissions) == 1
    assert bench.waiting() == (0, 1, 0)
    told = [admission for _ in range(2) for admission in bench.engine.step().admissions]
    assert told == [Admission(Priority.STANDARD, 2 * RUNNER_S, 0, 0)]
    bench.engine.commit(make_id("second"), [FirstToken(7)])
    assert bench.engine.step().admissions == ()


def test_who_waits_is_counted_by_class() -> None:
    """From the moment of being added to the first blocks, however that wait ends: begun, released, too late."""
    bench = make_bench(max_num_seqs=1)
    for name, priority in (("r", Priority.REALTIME), ("s", Priority.STANDARD), ("b", Priority.BATCH)):
        bench.add(make_spec(name, (1, 2), max_tokens=1, priority=priority))
        bench.add(make_spec(name, (1, 2), max_tokens=1, priority=priority))
    assert bench.waiting() == (1, 1, 1)
    bench.engine.release(make_id("b"), asked_at_step=0)
    assert bench.waiting() == (1, 1, 0)
    bench.engine.step()
    assert sum(bench.waiting()) == 1
    bench.engine.step()
    assert bench.waiting() == (0, 0, 0)
    bench.engine.step()
    bench.add(make_spec("busy", (1, 2), max_tokens=5))
    bench.add(make_spec("late", (1, 2), priority=Priority.BATCH, time_budget_s=1.0))
    bench.engine.step()
    assert bench.waiting() == (0, 0, 1)
    bench.engine.step()
    assert bench.waiting() == (0, 0, 0)


def test_a_family_waits_until_its_last_candidate_is_released() -> None:
    """Candidates that are given up one by one leave nothing behind."""
    bench = make_bench()
    bench.add(make_spec("f", (1, 2), candidates=(0, 1)))
    for candidate, waiting in ((1, 1), (1, 1), (0, 0)):
        bench.engine.release(make_id("f"), 0, candidate)
        assert bench.waiting() == (0, waiting, 0)
    bench.engine.release(make_id("f"), 0)


def test_empty_slots_are_a_share_of_those_held() -> None:
    """A prompt's last block that is half full, and room for what is not computed yet; nothing when nothing is held."""
    bench = make_bench()
    assert bench.engine.stats().fragmentation == 0
    # 12 tokens take 3 blocks of 4, and a step computes 8.
    bench.add(make_spec("a", tuple(range(12)), max_tokens=2))
    bench.engine.step()
    assert bench.engine.stats().fragmentation == 4 / 12
    bench.engine.release(make_id("a"), 0)
    assert bench.engine.stats().fragmentation == 0
    full = make_bench()
    full.add(make_spec("a", tuple(range(8)), max_tokens=2))
    full.engine.step()
    assert full.engine.stats().fragmentation == 0


def test_the_pool_is_part_of_the_picture() -> None:
    """What is cached, hit and evicted is told as the pool counts it."""
    bench = make_bench()
    for name in ("a", "b"):
        bench.add(make_spec(name, tuple(range(8)), max_tokens=1))
        bench.engine.step()
    pool = bench.engine.stats().pool
    assert (pool.num_blocks, pool.num_free, pool.num_cached, pool.num_hits) == (NUM_BLOCKS, NUM_BLOCKS, 2, 1)


def test_an_engine_is_stuck_when_nobody_comes_in_though_every_block_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That is a bug of its own; an engine without work is not stuck, nor one in which somebody computes."""
    bench = make_bench()
    bench.engine.step()
    assert not bench.engine.stats().is_stuck
    bench.add(make_spec("r", (1, 2, 3), max_tokens=3))
    with monkeypatch.context() as patched:
        patched.setattr(admission.Admission, "admitted", lambda *_: iter(()))
        bench.engine.step()
        assert bench.engine.stats().is_stuck
    for _ in range(3):
        bench.engine.step()
        assert not bench.engine.stats().is_stuck


def test_where_nobody_is_left_nobody_is_blocked() -> None:
    """Those that had no seat are cancelled, and all others with them: no step says so, and the idle hour is no wait for a turn."""
    bench = make_bench(max_num_seqs=1)
    for number, name in enumerate(("first", "running", "waiting")):
        bench.add(make_spec(name, (number,) * 40))
    for _ in range(5 + 7 + 5 + 2):
        bench.engine.step()
    assert bench.engine.stats().is_blocked
    for name in ("running", "waiting"):
        bench.engine.release(make_id(name), 0)
    assert not bench.engine.has_work()
    assert not bench.engine.stats().is_blocked
    bench.clock.advance(3600.0)
    bench.add(make_spec("later", (3,) * 40))
    bench.engine.step()
    pace = bench.engine.stats().pace
    assert pace is not None
    assert 0 < pace.turn_s < 100


def test_what_came_in_is_forgotten_while_nothing_is_computed() -> None:
    """After an idle hour no token of an urgent class has come in of late, though no step has been taken since."""
    bench = make_bench()
    for number in range(2):
        bench.add(make_spec(f"{number}", (number,) * 40, priority=Priority.REALTIME))
    while bench.engine.has_work():
        bench.engine.step()
    then = bench.engine.stats().pace
    bench.clock.advance(3600.0)
    now = bench.engine.stats().pace
    assert then is not None
    assert now is not None
    assert then.tokens_per_s[0] > 0.1
    assert now.tokens_per_s[0] == pytest.approx(0.0, abs=1e-6)
