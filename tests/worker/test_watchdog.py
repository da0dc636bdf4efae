"""An engine that makes no progress is found out; one that is busy, idle, or waits for others is left alone."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.clock import ManualClock
from paceline.engine.engine import EngineStats
from paceline.engine.fake import FakeModelRunner
from paceline.engine.sequence import SequenceRole
from paceline.worker.events import EventQueue
from paceline.worker.watchdog import Watchdog
from paceline.worker.worker import Worker
from tests.engine.runners import GatedRunner
from tests.factories import BLOCK_SIZE, make_spec
from tests.worker.bench import DECODE, NUM_BLOCKS, VOCAB_SIZE, serving_worker, until

SPEC = make_spec("r", (1, 2, 3), max_tokens=4, ignore_eos=True)


@pytest.fixture
def runner() -> GatedRunner:
    """The fake runner behind a gate, which is open."""
    return GatedRunner(FakeModelRunner(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE))


@pytest.fixture
async def worker(tiny_tokenizer_dir: Path, runner: GatedRunner) -> AsyncIterator[Worker]:
    """A worker whose own watchdog has no reason to bark."""
    async with serving_worker(tiny_tokenizer_dir, "decode-0", DECODE, runner=runner) as worker:
        yield worker
        runner.open()


class Watch:
    """A watchdog on a clock that the test moves."""

    def __init__(self, worker: Worker) -> None:
        self.clock = ManualClock()
        self.engine = worker.engine
        self.dog = Watchdog(worker.engine, 10, clock=self.clock)

    async def look_when_answered(self) -> str | None:
        """After the engine's thread has had its turn."""
        found = self.dog.look()
        answered = asyncio.Event()
        self.engine.ping(answered.set)
        async with asyncio.timeout(20):
            await answered.wait()
        return found


async def test_a_step_that_does_not_end_is_found_out(worker: Worker, runner: GatedRunner) -> None:
    """Not before its time; and once the step has ended all is well again."""
    watch = Watch(worker)
    runner.close()
    worker.engine.submit(SPEC, SequenceRole.GENERATE, EventQueue().put)
    await runner.until_arrived()
    assert watch.dog.look() is None
    watch.clock.advance(9)
    assert watch.dog.look() is None
    watch.clock.advance(1)
    assert "a step has not ended" in (watch.dog.look() or "")
    runner.open()
    await until(lambda: watch.dog._asked_s is None)
    assert watch.dog.look() is None


async def test_an_idle_worker_and_a_busy_one_are_alive(worker: Worker) -> None:
    """However long nothing comes, and whatever is computed meanwhile."""
    watch = Watch(worker)
    for _ in range(5):
        assert await watch.look_when_answered() is None
        watch.clock.advance(100)
    events = EventQueue()
    worker.engine.submit(SPEC, SequenceRole.GENERATE, events.put)
    for _ in range(5):
        assert await watch.look_when_answered() is None
        watch.clock.advance(100)


async def test_steps_that_compute_nothing_though_every_block_is_free_are_found_out(worker: Worker) -> None:
    """Nobody holds anything, and yet those that wait do not come in: that is a bug, and waiting will not heal it."""
    watch = Watch(worker)
    stuck: EngineStats = replace(worker.engine.stats, is_stuck=True)
    worker.engine.stats = stuck
    assert await watch.look_when_answered() is None
    watch.clock.advance(9)
    worker.engine.stats = stuck
    assert await watch.look_when_answered() is None
    watch.clock.advance(1)
    worker.engine.stats = stuck
    assert "every block is free" in (watch.dog.look() or "")
    worker.engine.stats = replace(stuck, is_stuck=False)
    assert watch.dog.look() is None


async def test_a_worker_with_a_stalled_engine_fails(worker: Worker, runner: GatedRunner) -> None:
    """The process then ends as after any failure of its engine, and is started again."""
    failed = asyncio.Event()
    runner.close()
    worker.engine.submit(SPEC, SequenceRole.GENERATE, EventQueue().put)
    await runner.until_arrived()
    async with asyncio.timeout(20):
        await Watchdog(worker.engine, 0.01).watch(failed)
    assert failed.is_set()


async def test_every_worker_is_looked_after(tiny_tokenizer_dir: Path, runner: GatedRunner) -> None:
    """From its start on, by its own setting: a step that does not end makes it a worker that has failed."""
    async with serving_worker(tiny_tokenizer_dir, "decode-0", DECODE, runner=runner, stall_s=0.01) as worker:
        runner.close()
        worker.engine.submit(SPEC, SequenceRole.GENERATE, EventQueue().put)
        async with asyncio.timeout(20):
            await worker.failed.wait()
        runner.open()
