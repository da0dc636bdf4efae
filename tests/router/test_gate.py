"""Who is sent away at the router since the workers would not be in time, with what words, and at whose cost."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import pytest

from paceline.core.block_hash import BlockHash, chain_root, hash_full_blocks
from paceline.core.clock import ManualClock, monotonic
from paceline.core.errors import DeadlineError, QueueFullError, RateLimitedError, ScopeForbiddenError
from paceline.core.kv_layout import BlockId
from paceline.core.prefix import PrefixEntry, WorkerKey
from paceline.core.request import BootEpoch, Priority, RequestId, WorkerId
from paceline.prefix_index.memory_index import MemoryPrefixIndex
from paceline.v1 import generation_pb2, inference_pb2, worker_pb2
from router.admission import AdmissionController, Door
from router.cache_scopes import CacheScopes
from router.gate import Gate
from router.in_time import Bounds
from router.intake import Call, Intake, Reading
from router.job import Job, Placed
from router.prompt_lookup import PromptLookup
from router.rate_limit import Grant, LocalRateLimiter, Rate
from router.slots import LocalSlots
from router.tenants import Tenant
from router.tokenizer import Tokenizer
from tests.factories import BLOCK_SIZE, FINGERPRINT, make_spec
from tests.router.cluster import PREFILL, ScriptedCluster, scripted_cluster

# A token takes ten milliseconds, and a step of at most a hundred of them ten more.
PACE = worker_pb2.Pace(step_s=0.01, decode_s=0.001, prompt_token_s=0.01)
SPEC = make_spec("r", tuple(range(1, 81)), max_tokens=4)
ONCE_A_MINUTE = Tenant("acme", requests=Rate(1, 1), tokens=Rate(60, 84))
TOKENS_ONLY, TOO_FEW = Tenant("tokens", tokens=Rate(1, 84)), Tenant("few", tokens=Rate(1, 83))


class CountingIndex(MemoryPrefixIndex):
    """Counts the look-ups."""

    num_asked = 0

    async def lookup(self, hashes: Sequence[BlockHash]) -> dict[WorkerKey, int]:
        """See MemoryPrefixIndex."""
        self.num_asked += 1
        return await super().lookup(hashes)


class Scene:
    """A router whose one prefill worker has said what it has to do."""

    def __init__(self, cluster: ScriptedCluster, bounds: Bounds, index: CountingIndex) -> None:
        self.cluster = cluster
        self.index = index
        self.gate = Gate(
            bounds, cluster.config.placement_rules, cluster.registry, self.index, clock=cluster.clock
        )

    async def busy(self, standard: int, *, pace: worker_pb2.Pace | None = PACE) -> None:
        """So many tokens of STANDARD requests wait there."""
        pending = worker_pb2.PendingTokens(standard=standard)
        self.cluster.prefill[0].report(pace=pace, pending_normal=pending, max_seats=8, num_steps=standard)
        for _ in range(10_000):
            if self._is_told(standard, pace):
                return
            await asyncio.sleep(0)
        raise AssertionError("the report was not taken over")

    def _is_told(self, standard: int, pace: worker_pb2.Pace | None) -> bool:
        (view,) = self.cluster.registry.views(PREFILL)
        if pace is None or view.queue is None:
            return pace is None and view.queue is None
        return view.queue.pending.normal[1] == standard

    def job(self, *, time_left_s: float | None = None) -> Job:
        """A request of 80 tokens."""
        deadline_s = None if time_left_s is None else self.cluster.clock() + time_left_s
        return self.cluster.job(SPEC, deadline_s=deadline_s)


@asynccontextmanager
async def scene(
    bounds: Bounds = Bounds(),  # noqa: B008 - it is frozen
    index: CountingIndex | None = None,
) -> AsyncIterator[Scene]:
    """One of each tier; the prefill worker computes."""
    async with scripted_cluster() as cluster:
        yield Scene(cluster, bounds, index or CountingIndex())


async def test_a_request_that_would_come_too_late_hears_when_it_would_not() -> None:
    """QUEUE_FULL with the time, and how long it would have taken; with more time it is taken."""
    async with scene() as router:
        await router.busy(1000)
        with pytest.raises(QueueFullError, match="the caller waits for 5 s") as caught:
            await router.gate.require_time(router.job(time_left_s=5.0))
        assert 6.0 < caught.value.retry_after_s < 9.0
        assert router.gate.num_refused() == {"deadline": 1, "delay": 0, "realtime": 0}
        await router.gate.require_time(router.job(time_left_s=15.0))
        await router.gate.require_time(router.job())


async def test_a_request_that_never_fits_hears_that_its_deadline_is_too_short() -> None:
    """Also when nobody else is there."""
    async with scene() as router:
        await router.busy(0)
        with pytest.raises(DeadlineError, match="idle workers") as caught:
            await router.gate.require_time(router.job(time_left_s=0.5))
        assert caught.value.phase == "queued"


async def test_nobody_is_refused_where_nothing_is_known() -> None:
    """A worker that has measured nothing yet is not taken for slow; once it has, its word counts."""
    async with scene(Bounds(max_delay_s=1.0, realtime_ttft_s=1.0)) as router:
        await router.busy(1000, pace=None)
        await router.gate.require_time(router.job(time_left_s=0.01))
        await router.busy(1000)
        with pytest.raises(QueueFullError, match="nobody waits for more than 1 s"):
            await router.gate.require_time(router.job())


async def test_a_pace_that_is_not_reported_any_more_is_not_known() -> None:
    """After three seconds without a report nothing is predicted."""
    async with scene(Bounds(max_delay_s=1.0)) as router:
        clock = router.cluster.registry.clock = ManualClock(monotonic())
        await router.busy(1000)
        with pytest.raises(QueueFullError):
            await router.gate.require_time(router.job())
        clock.advance(3.1)
        await router.gate.require_time(router.job())


async def test_who_is_taken_counts_before_it_is_placed() -> None:
    """Of two that come at once only one fits; the other one would once the first has gone without a trace."""
    async with scene() as router:
        await router.busy(0)
        first = router.job(time_left_s=1.0)
        await router.gate.require_time(first)
        with pytest.raises(QueueFullError):
            await router.gate.require_time(router.job(time_left_s=1.0))
        first.unplaced.close()
        await router.gate.require_time(router.job(time_left_s=1.0))


async def test_who_is_placed_is_counted_once() -> None:
    """What was expected of it makes way for what it is."""
    async with scene() as router:
        await router.busy(0)
        job, seen = router.job(), list[int]()
        await router.gate.require_time(job)
        async with aclosing(router.cluster.dispatcher.run(job)) as running:
            async for event in running:
                if isinstance(event, Placed):
                    seen.append(router.cluster.registry.views(PREFILL)[0].num_assigned_tokens)
        assert seen == [80]
        assert router.cluster.registry.views(PREFILL)[0].num_assigned_tokens == 0


async def test_what_is_cached_need_not_be_computed_and_is_asked_only_where_it_decides() -> None:
    """76 of 80 tokens are cached: it is in time, as the table says."""
    async with scene() as router:
        await router.busy(0)
        await router.gate.require_time(router.job(time_left_s=2.0))
        assert router.index.num_asked == 0
        key = WorkerKey(WorkerId("prefill-0"), BootEpoch(1))
        hashes = hash_full_blocks(chain_root(FINGERPRINT.digest(), ""), SPEC.prompt_ids, BLOCK_SIZE, "")
        entries = [PrefixEntry(each, hashes[0], BlockId(number)) for number, each in enumerate(hashes[:19])]
        await router.index.publish(key, entries)
        await router.gate.require_time(router.job(time_left_s=0.5))
        assert router.index.num_asked == 1


async def test_a_realtime_request_may_keep_its_promise_with_what_is_cached() -> None:
    """Without the cache it would be too long for it, and judged like any other; so the table is asked."""
    async with scene(Bounds(realtime_ttft_s=0.3)) as router:
        await router.busy(0)
        job = router.cluster.job(make_spec("r", SPEC.prompt_ids, priority=Priority.REALTIME))
        await router.gate.require_time(job)
        assert router.index.num_asked == 1


class Together(CountingIndex):
    """Answers once tokens are asked for too."""

    def __init__(self, both: asyncio.Barrier) -> None:
        super().__init__()
        self._both = both

    async def lookup(self, hashes: Sequence[BlockHash]) -> dict[WorkerKey, int]:
        """See MemoryPrefixIndex."""
        await self._both.wait()
        return await super().lookup(hashes)


class TogetherLimiter(LocalRateLimiter):
    """Gives tokens once the table is asked too."""

    def __init__(self, both: asyncio.Barrier) -> None:
        super().__init__(ManualClock(1000.0))
        self._both = both

    async def take(self, name: str, rate: Rate, cost: int) -> Grant:
        """See RateLimiter."""
        if name.startswith("tokens"):
            await self._both.wait()
        return await super().take(name, rate, cost)


async def test_the_table_is_asked_while_tokens_are_reserved_and_not_again(byte_level: Tokenizer) -> None:
    """The two ways to Redis and back take the time of one, and the first attempt goes by that answer."""
    both = asyncio.Barrier(2)
    index = Together(both)
    async with scene(index=index) as router:
        intake = _intake(router, byte_level)
        admission = AdmissionController(Door(9), TogetherLimiter(both), LocalSlots())
        async with asyncio.timeout(10):
            call = await _read(intake, admission)
        assert call.job.held_blocks == {}
        await PromptLookup(index).facts(call.job, router.cluster.registry.views(PREFILL))
        assert index.num_asked == 1


class Broken(CountingIndex):
    """Fails with what no table is expected to fail with."""

    async def lookup(self, hashes: Sequence[BlockHash]) -> dict[WorkerKey, int]:
        """See MemoryPrefixIndex."""
        raise ZeroDivisionError


class Stuck(CountingIndex):
    """Never answers."""

    async def lookup(self, hashes: Sequence[BlockHash]) -> dict[WorkerKey, int]:
        """See MemoryPrefixIndex."""
        await asyncio.Event().wait()
        return {}


class SlowLimiter(LocalRateLimiter):
    """Takes a few turns of the loop to count tokens, as one in Redis does."""

    def __init__(self) -> None:
        super().__init__(ManualClock(1000.0))

    async def take(self, name: str, rate: Rate, cost: int) -> Grant:
        """See RateLimiter."""
        for _ in range(5):
            await asyncio.sleep(0)
        return await super().take(name, rate, cost)


async def test_tokens_come_back_when_the_question_to_the_table_fails(byte_level: Tokenizer) -> None:
    """Nothing is reserved for a request that has ended: its tenant may have all of its tokens the next time."""
    async with scene(index=Broken()) as broken, scene() as sound:
        limiter = SlowLimiter()
        admission = AdmissionController(Door(9), limiter, LocalSlots())
        with pytest.raises(ZeroDivisionError):
            await _read(_intake(broken, byte_level), admission, TOKENS_ONLY)
        for _ in range(9):
            await asyncio.sleep(0)
        await _read(_intake(sound, byte_level), admission, TOKENS_ONLY)


async def test_nobody_asks_the_table_for_one_who_is_refused(byte_level: Tokenizer) -> None:
    """Whoever is over its rate hears so at once, and leaves no question behind."""
    async with scene(index=Stuck()) as router:
        admission = AdmissionController(Door(9), LocalRateLimiter(ManualClock(1000.0)), LocalSlots())
        before = asyncio.all_tasks()
        with pytest.raises(ScopeForbiddenError):
            await _read(_intake(router, byte_level), admission, TOO_FEW)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() <= before


async def test_an_attempt_after_the_first_asks_the_table_anew() -> None:
    """What it said before the first one is of no use then: output has come, and others may hold more."""
    async with scene() as router:
        job = router.job()
        await router.gate.look_up(job)
        await router.cluster.run(job)
        assert job.held_blocks is None


async def test_whoever_is_refused_is_not_charged(byte_level: Tokenizer) -> None:
    """A tenant with one request a minute has it still, and all of its tokens."""
    async with scene(Bounds(max_delay_s=1.0)) as router:
        intake = _intake(router, byte_level)
        admission = AdmissionController(Door(9), LocalRateLimiter(ManualClock(1000.0)), LocalSlots())
        await router.busy(1000)
        for _ in range(3):
            with pytest.raises(QueueFullError):
                await _read(intake, admission)
        await router.busy(0)
        await _read(intake, admission)
        # It has gone without having been placed.
        assert router.cluster.registry.views(PREFILL)[0].num_assigned_tokens == 0
        with pytest.raises(RateLimitedError):
            await _read(intake, admission)


def _intake(router: Scene, tokenizer: Tokenizer) -> Intake:
    cluster = router.cluster
    return Intake(cluster.config, tokenizer, cluster.registry, CacheScopes(b""), router.gate)


async def _read(intake: Intake, admission: AdmissionController, tenant: Tenant = ONCE_A_MINUTE) -> Call:
    request = inference_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=SPEC.prompt_ids))
    request.stopping.max_tokens = 4
    raw = request.SerializeToString()
    async with admission.admit(tenant, len(raw)) as visit:
        call = await intake.take(Reading(raw), RequestId("r"), visit, None)
        visit.use(len(call.job.spec.prompt_ids) + 4)
        return call
