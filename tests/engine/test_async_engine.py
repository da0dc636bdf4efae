"""The engine on its thread, and what reaches the event loop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from paceline.core.errors import DeadlineError, EngineFailedError, KvLostError
from paceline.core.prefix import PrefixChanges
from paceline.core.request import FirstToken, SamplingParams, SequenceSpec
from paceline.engine.async_engine import AsyncEngine
from paceline.engine.block_pool import BlockPool
from paceline.engine.engine import Engine, EngineStats, Runner, StepResult
from paceline.engine.events import Event, Failed, NewTokens, Reserved, Started
from paceline.engine.fake import FakeModelRunner
from paceline.engine.scheduler import Scheduler
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.sequence import SequenceRole
from paceline.worker.events import EventQueue
from tests.engine.harness import VOCAB_SIZE, WHOLE, fill, oracle
from tests.engine.runners import BrokenRunner, GatedRunner
from tests.factories import BLOCK_SIZE, make_id, make_spec

NUM_BLOCKS = 16
PROMPT = tuple(range(20, 40))


class CountingEngine(Engine):
    """Counts all steps, those too that had nothing to compute."""

    num_looks = 0

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        super().__init__(scheduler, runner)
        self.is_asked_again = threading.Event()
        self._num_asked = 0

    def stats(self) -> EngineStats:
        """See Engine.stats."""
        self._num_asked += 1
        if self._num_asked > 1:
            self.is_asked_again.set()
        return super().stats()

    def step(self) -> StepResult:
        """See Engine.step."""
        self.num_looks += 1
        return super().step()


def _engine(runner: Runner, *, max_num_batched_tokens: int = 8) -> CountingEngine:
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    config = SchedulerConfig(max_num_batched_tokens, max_num_seqs=8, fingerprint=b"model")
    return CountingEngine(Scheduler(config, pool, runner.memory), runner)


@asynccontextmanager
async def _running(
    engine: Engine,
    *,
    on_changes: Callable[[PrefixChanges], None] = lambda _: None,
    on_failure: Callable[[BaseException], None] = lambda _: None,
) -> AsyncIterator[AsyncEngine]:
    running = AsyncEngine(engine, on_changes=on_changes, on_failure=on_failure)
    running.start()
    try:
        yield running
    finally:
        await running.stop()


def _fake_runner() -> FakeModelRunner:
    return FakeModelRunner(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE)


def _submit(
    engine: AsyncEngine, spec: SequenceSpec, role: SequenceRole = SequenceRole.GENERATE
) -> EventQueue:
    events = EventQueue()
    engine.submit(spec, role, events.put)
    return events


async def _until_end(events: EventQueue) -> list[Event]:
    """Everything up to the last event."""
    seen: list[Event] = []
    async for event in events:
        seen.append(event)
        if isinstance(event, Failed) or (isinstance(event, NewTokens) and event.finish_reason):
            break
    return seen


def _tokens(events: Sequence[Event]) -> list[int]:
    return [token_id for event in events if isinstance(event, NewTokens) for token_id in event.token_ids]


async def _one_step(engine: AsyncEngine) -> None:
    """Returns after at most two steps: the one under way, and one that computes a token of its own."""
    await _until_end(_submit(engine, make_spec("probe", (1,), max_tokens=1, bypass_cache=True)))


async def test_a_sequence_s_events_come_in_order() -> None:
    """Started, then each token once, numbered without a gap; the last one says why it ended."""
    async with _running(_engine(_fake_runner())) as engine:
        events = await _until_end(_submit(engine, make_spec()))
    assert isinstance(events[0], Started)
    assert _tokens(events) == oracle(make_spec())[0]
    new = [event for event in events[1:] if isinstance(event, NewTokens)]
    assert [event.first_index for event in new] == list(range(8)) == list(range(len(events) - 1))


async def test_many_sequences_each_hear_of_themselves_only() -> None:
    """Sequences that run in one batch have sinks of their own, and the oracle's tokens."""
    specs = [make_spec(f"r{n}", (n, n + 1)) for n in range(12)]
    async with _running(_engine(_fake_runner())) as engine:
        queues = [_submit(engine, spec) for spec in specs]
        events = [await _until_end(queue) for queue in queues]
    for spec, heard in zip(specs, events, strict=True):
        assert {event.sequence_id for event in heard} == {spec.sequence_id}
        assert _tokens(heard) == oracle(spec)[0]


async def test_one_sink_for_many_hears_of_a_step_at_once() -> None:
    """The shared sink of a stream is called once a step, with the news of all its sequences."""
    runner, calls, done = GatedRunner(_fake_runner()), list[list[Event]](), asyncio.Event()

    def sink(events: Sequence[Event]) -> None:
        """Keeps each call."""
        calls.append(list(events))
        if all(isinstance(event, NewTokens) and event.finish_reason for event in events):
            done.set()

    async with _running(_engine(runner)) as engine:
        runner.close()
        blocker = _submit(engine, make_spec("blocker", max_tokens=1))
        await runner.until_arrived()
        for name in ("a", "b"):
            engine.submit(make_spec(name, max_tokens=3), SequenceRole.GENERATE, sink)
        runner.open()
        await _until_end(blocker)
        await done.wait()
    names = [{event.sequence_id.request_id for event in events} for events in calls]
    assert names[-1] == {"a", "b"}
    assert len(calls) < sum(len(events) for events in calls)


async def test_a_sink_that_raises_harms_no_other() -> None:
    """The others hear of the same step, and the engine goes on; the one that raised has lost its events only."""
    heard: list[Event] = []

    def broken(events: Sequence[Event]) -> None:
        """Cannot bear the news."""
        raise ValueError("a bug in a sink")

    async with _running(_engine(_fake_runner())) as engine:
        engine.submit(make_spec("broken"), SequenceRole.GENERATE, broken)
        heard += await _until_end(_submit(engine, make_spec("good")))
        await _one_step(engine)
        assert engine.stats.num_steps > 0
    assert _tokens(heard) == oracle(make_spec())[0]


async def test_changes_of_the_cache_are_told_in_order() -> None:
    """Whoever publishes prefixes hears of each full block once it is computed."""
    changes: list[PrefixChanges] = []
    async with _running(_engine(_fake_runner()), on_changes=changes.append) as engine:
        await _until_end(_submit(engine, make_spec(prompt_ids=PROMPT, max_tokens=1)))
    assert [len(change.published) for change in changes if change.published] == [2, 2, 1]


async def test_a_repeated_submit_is_ignored() -> None:
    """The first sink stays, the second hears nothing."""
    async with _running(_engine(_fake_runner())) as engine:
        first = _submit(engine, make_spec())
        second: list[Event] = []
        engine.submit(make_spec(prompt_ids=PROMPT), SequenceRole.GENERATE, second.extend)
        assert _tokens(await _until_end(first)) == oracle(make_spec())[0]
        await _one_step(engine)
    assert second == []


async def test_a_release_during_a_step_is_the_last_that_is_heard() -> None:
    """What the step under way computes for the released sequence reaches nobody, and its blocks come back."""
    runner, heard = GatedRunner(_fake_runner()), list[Event]()
    async with _running(_engine(runner)) as engine:
        runner.close()
        engine.submit(make_spec(max_tokens=50), SequenceRole.GENERATE, heard.extend)
        await runner.until_arrived()
        engine.release(make_id())
        num_heard = len(heard)
        runner.open()
        await _one_step(engine)
        assert len(heard) == num_heard
        assert engine.stats.num_free_blocks == NUM_BLOCKS


async def test_a_release_with_an_error_tells_it_at_once() -> None:
    """The sink hears of the error and of nothing after; without an error it hears nothing; twice is once."""
    async with _running(_engine(_fake_runner())) as engine:
        told, untold = list[Event](), list[Event]()
        engine.submit(make_spec("told"), SequenceRole.AWAIT_KV, told.extend)
        engine.submit(make_spec("untold"), SequenceRole.AWAIT_KV, untold.extend)
        for _ in range(2):
            engine.release(make_id("told"), KvLostError("gone"))
            engine.release(make_id("untold"))
        await _one_step(engine)
    assert [type(event.error) for event in told if isinstance(event, Failed)] == [KvLostError]
    assert untold == []


@pytest.mark.parametrize("role", [role for role in SequenceRole if role is not SequenceRole.LEND])
@pytest.mark.parametrize("num_events", [0, 1, 3])
async def test_a_release_at_any_point_frees_all_blocks_within_two_steps(
    role: SequenceRole, num_events: int
) -> None:
    """Queued, parked, between chunks, decoding or held: two steps later the pool is at its baseline."""
    num_events = min(num_events, 1) if role is SequenceRole.AWAIT_KV else num_events
    async with _running(_engine(_fake_runner())) as engine:
        await _one_step(engine)
        baseline, events = engine.stats.num_free_blocks, _submit(engine, make_spec(prompt_ids=PROMPT), role)
        for _ in range(num_events):
            await anext(events)
        steps_before = engine.stats.num_steps
        engine.release(make_id())
        await _one_step(engine)
        assert engine.stats.num_free_blocks == baseline
        assert engine.stats.num_steps <= steps_before + 2 + (num_events == 0)


async def test_a_hand_over_through_the_engine_gives_the_oracle_s_tokens() -> None:
    """Reserved, filled from outside, committed: the tokens after the first one follow."""
    runner, spec = _fake_runner(), make_spec(prompt_ids=PROMPT)
    whole = oracle(spec)[0]
    async with _running(_engine(runner)) as engine:
        events = _submit(engine, spec, SequenceRole.AWAIT_KV)
        reserved = await anext(events)
        assert isinstance(reserved, Reserved)
        fill(runner, WHOLE, PROMPT, reserved)
        engine.commit(spec.sequence_id, [FirstToken(whole[0])])
        assert _tokens(await _until_end(events)) == whole[1:]


async def test_a_failure_of_the_engine_reaches_every_sink() -> None:
    """Running, waiting and parked sequences all fail, the process is told, and later submits fail at once."""
    failures: list[BaseException] = []
    runner = BrokenRunner(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE)
    async with _running(_engine(runner), on_failure=failures.append) as engine:
        parked = _submit(engine, make_spec("parked"), SequenceRole.AWAIT_KV)
        assert isinstance(await anext(parked), Reserved)
        queues = [
            parked,
            _submit(engine, make_spec("a", max_tokens=30)),
            _submit(engine, make_spec("b", (13,))),
        ]
        ends = [(await _until_end(queue))[-1] for queue in queues]
        late = (await _until_end(_submit(engine, make_spec("late"))))[-1]
    for end in (*ends, late):
        assert isinstance(end, Failed)
        assert isinstance(end.error, EngineFailedError)
    assert [type(error) for error in failures] == [MemoryError]


async def test_a_failure_reaches_the_rest_past_a_sink_that_raises() -> None:
    """Even when one sink cannot bear the news, the others and the process hear of it."""
    failed = asyncio.Event()

    def broken(events: Sequence[Event]) -> None:
        """Cannot bear the news."""
        raise ValueError("a bug in a sink")

    runner = BrokenRunner(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE)
    async with _running(_engine(runner), on_failure=lambda _: failed.set()) as engine:
        engine.submit(make_spec("broken"), SequenceRole.AWAIT_KV, broken)
        other = _submit(engine, make_spec("b", (13,)))
        assert isinstance((await _until_end(other))[-1], Failed)
        await failed.wait()


async def test_a_deadline_passes_while_nothing_can_run_and_the_thread_rests() -> None:
    """A sequence that waits for blocks fails on time though nothing else happens; the thread looks a few times only."""
    counting = _engine(_fake_runner(), max_num_batched_tokens=64)
    async with _running(counting) as engine:
        holder = make_spec("holder", tuple(range(48)))
        await anext(_submit(engine, holder, SequenceRole.PREFILL_ONLY))
        waits = _submit(engine, make_spec("waits", PROMPT, time_budget_s=0.25))
        (end,) = await _until_end(waits)
        assert isinstance(end, Failed)
        assert isinstance(end.error, DeadlineError)
        assert counting.num_looks < 20


async def test_an_idle_engine_takes_no_step() -> None:
    """With nothing to do the thread waits for a command; a command alone makes it look, not step."""
    counting = _engine(_fake_runner())
    async with _running(counting) as engine:
        for _ in range(3):
            engine.release(make_id("unknown"))
        await _one_step(engine)
        assert counting.num_looks == 1


async def test_stop_ends_the_thread_and_the_events() -> None:
    """After stop no thread is left and nothing more is heard, whatever was under way."""
    heard: list[Event] = []
    async with _running(_engine(_fake_runner())) as engine:
        engine.submit(make_spec("long", max_tokens=40), SequenceRole.GENERATE, heard.extend)
        await _until_end(_submit(engine, make_spec(max_tokens=1)))
        await engine.stop()
        await asyncio.sleep(0)
        num_heard = len(heard)
        engine.submit(make_spec("late"), SequenceRole.GENERATE, heard.extend)
        await asyncio.sleep(0)
    assert len(heard) == num_heard
    assert not [thread for thread in threading.enumerate() if thread.name == "engine"]


async def test_an_engine_that_has_nothing_to_do_is_asked_again_how_it_is() -> None:
    """What it says of late would never become old otherwise: nobody sends it anything, and it takes no step."""
    engine = _engine(_fake_runner())
    async with _running(engine):
        assert await asyncio.to_thread(engine.is_asked_again.wait, 10)
    assert engine.num_looks == 0


async def test_a_sink_hears_until_the_last_candidate_has_ended() -> None:
    """Three candidates of one sequence, one of which ends before the others: one sink, and the id is in use until the end."""
    sampling = SamplingParams(seed=3)
    spec = make_spec("family", sampling=sampling, max_tokens=12, candidates=(0, 1, 2))
    stop = oracle(spec, candidate=1)[0][4]
    spec = replace(spec, stop_token_ids=(stop,))
    heard: list[NewTokens] = []
    counts: list[tuple[int, int]] = []
    over = asyncio.Event()
    async with _running(_engine(_fake_runner())) as engine:

        def sink(events: Sequence[Event]) -> None:
            """Keeps the tokens, and how many candidates have ended while how many sequences are known."""
            heard.extend(event for event in events if isinstance(event, NewTokens))
            num_ended = sum(event.finish_reason is not None for event in heard)
            counts.append((num_ended, engine.num_sequences))
            if num_ended == 3:
                over.set()

        engine.submit(spec, SequenceRole.GENERATE, sink)
        assert not engine.submit(spec, SequenceRole.GENERATE, sink)
        await asyncio.wait_for(over.wait(), 10)
    assert all(num_known == (num_ended < 3) for num_ended, num_known in counts)
    assert any(0 < num_ended < 3 for num_ended, _ in counts)
    for candidate in range(3):
        own = [event for event in heard if event.candidate == candidate]
        assert _tokens(own) == oracle(spec, candidate=candidate)[0]


async def test_a_released_candidate_says_nothing_more() -> None:
    """From the moment of the call, although a step is under way; with the last candidate the sequence is over."""
    runner = GatedRunner(_fake_runner())
    spec = make_spec("family", max_tokens=30, candidates=(0, 1))
    async with _running(_engine(runner)) as engine:
        heard: list[Event] = []
        runner.close()
        engine.submit(spec, SequenceRole.GENERATE, heard.extend)
        await runner.until_arrived()
        runner.let_one_pass()
        await runner.until_arrived()
        engine.release_candidate(spec.sequence_id, 0)
        num_told = len(heard)
        runner.open()
        await _one_step(engine)
        new = [event for event in heard[num_told:] if isinstance(event, NewTokens)]
        assert {event.candidate for event in new} == {1}
        engine.release_candidate(spec.sequence_id, 1)
        assert engine.num_sequences == 0
        await _one_step(engine)
        assert engine.stats.num_free_blocks == NUM_BLOCKS
