"""What the router counts of its requests, on scripted workers and a clock of the test's own."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from paceline.core.block_hash import BlockHash
from paceline.core.clock import ManualClock
from paceline.core.errors import KvLostError
from paceline.core.prefix import WorkerKey
from paceline.core.request import FinishReason, Priority
from paceline.prefix_index.memory_index import MemoryPrefixIndex
from router.forecast import Forecast
from router.job import DispatchEvent, Job, Placed, PromptComputed, PromptProgress, Tokens
from router.metrics import InstrumentedDispatcher, InstrumentedIndex, RequestMetrics
from router.timeline import RequestTimeline
from tests.factories import make_spec
from tests.prefix_index.blocks import ANNE, chain, entries
from tests.router.cluster import scripted_cluster
from tests.router.scripted_workers import decode_that, failed, prefill_that, started

SPEC = make_spec("r", tuple(range(20)), max_tokens=6, priority=Priority.REALTIME)
REALTIME = {"priority": "realtime"}
# Seconds that pass before an event, and the event.
Script = list[tuple[float, DispatchEvent]]


class _ScriptedRunner:
    """Gives the events of a script, each after its time."""

    def __init__(self, script: Script, clock: ManualClock) -> None:
        self._script = script
        self._clock = clock
        self.closed = False

    async def run(self, job: Job) -> AsyncGenerator[DispatchEvent, None]:
        """See RequestRunner.run."""
        try:
            for wait_s, event in self._script:
                self._clock.advance(wait_s)
                if isinstance(event, Tokens) and event.finish_reason:
                    job.end(event.candidate)
                yield event
        finally:
            self.closed = True


async def observe(
    script: Script,
    *,
    candidates: tuple[int, ...] = (0,),
    leaves_after: int = 99,
    ends: int | None = None,
    predicted: Sequence[Forecast] = (),
) -> RequestMetrics:
    """What is observed of one request; its reader leaves after so many events, having ended one candidate by then."""
    clock, observed = ManualClock(100.0), RequestMetrics()
    runner = _ScriptedRunner(script, clock)
    job = Job(replace(SPEC, candidates=candidates), None, RequestTimeline(clock))
    for each in predicted:
        job.timeline.note_dispatch(each)
    num_events = 0
    async with aclosing(InstrumentedDispatcher(runner, observed).run(job)) as events:
        async for event in events:
            assert event is script[num_events][1]
            num_events += 1
            if num_events == leaves_after:
                if ends is not None:
                    job.end(ends)
                break
    assert runner.closed
    return observed


def value(observed: RequestMetrics, name: str, **labels: str) -> float:
    """A sample's value; 0 where there is none."""
    return observed.registry.get_sample_value(f"paceline_{name}", labels) or 0.0


def tokens(*token_ids: int, ends: bool = False, candidate: int = 0) -> Tokens:
    """New tokens of a candidate."""
    return Tokens(token_ids, FinishReason.LENGTH if ends else None, candidate=candidate)


PLACED = Placed(0, is_local=False, reason="")


async def test_times_of_a_request() -> None:
    """To the first token, between tokens, and their mean: each under the request's class alone."""
    observed = await observe(
        [(1, PLACED), (1, PromptProgress(8)), (1, tokens(1)), (2, tokens(2)), (4, tokens(3, ends=True))]
    )
    assert value(observed, "ttft_seconds_sum", **REALTIME) == 3
    assert value(observed, "itl_seconds_sum", **REALTIME) == 6
    assert value(observed, "itl_seconds_count", **REALTIME) == 2
    assert value(observed, "tpot_seconds_sum", **REALTIME) == 3
    assert value(observed, "output_tokens_total") == 3
    assert value(observed, "ttft_seconds_count", priority="standard") == 0


async def test_a_first_token_is_compared_with_what_was_predicted() -> None:
    """Of a request that lost its first worker, or of which nothing was known, there is nothing to compare."""
    script: Script = [(1, PLACED), (2, tokens(1, ends=True))]
    told = Forecast(2.0, 2.0, 1.0, 1.0, 0.1)
    once, twice, unknown = [await observe(script, predicted=each) for each in ([told], [told, told], [])]
    assert value(once, "ttft_over_predicted_ratio_sum") == 1.5
    assert value(twice, "ttft_over_predicted_ratio_count") == 0
    assert value(unknown, "ttft_over_predicted_ratio_count") == 0


async def test_candidates_have_times_of_their_own() -> None:
    """One first token a request; times between tokens are those of one candidate."""
    observed = await observe(
        [
            (1, tokens(1)),
            (1, tokens(1, candidate=1)),
            (1, tokens(2, ends=True)),
            (1, tokens(2, ends=True, candidate=1)),
        ],
        candidates=(0, 1),
    )
    assert value(observed, "ttft_seconds_count", **REALTIME) == 1
    assert value(observed, "itl_seconds_sum", **REALTIME) == 4
    assert (value(observed, "tpot_seconds_count", **REALTIME)) == 2


async def test_several_tokens_at_once_share_their_time() -> None:
    """The mean counts tokens, not messages, and a message without a token is none."""
    observed = await observe([(1, tokens(1)), (6, tokens(2, 3, 4)), (9, tokens(ends=True))])
    assert value(observed, "itl_seconds_count", **REALTIME) == 1
    assert value(observed, "tpot_seconds_sum", **REALTIME) == 2


async def test_what_is_cut_off_has_no_mean() -> None:
    """A reader who leaves early leaves no time a token; one who has found its stop string does."""
    script: Script = [(1, tokens(1)), (2, tokens(2)), (2, tokens(3))]
    left = await observe(script, leaves_after=2)
    stopped = await observe(script, leaves_after=2, ends=0)
    assert value(left, "tpot_seconds_count", **REALTIME) == 0
    assert value(stopped, "tpot_seconds_sum", **REALTIME) == 2
    assert (
        value(left, "itl_seconds_count", **REALTIME) == value(stopped, "itl_seconds_count", **REALTIME) == 1
    )


async def test_prompts_and_hits_count_once() -> None:
    """A prompt that a later attempt computes again is no second prompt."""
    observed = await observe([(0, PromptComputed(16, "p0")), (0, PromptComputed(4, "p0"))])
    assert value(observed, "prompt_tokens_total") == len(SPEC.prompt_ids)
    assert value(observed, "cached_prompt_tokens_total") == 16


async def test_attempts_and_migrations_on_real_streams() -> None:
    """Every attempt is counted by its mode, and each after the first by why the one before was lost."""
    observed = RequestMetrics()
    async with scripted_cluster() as cluster:
        cluster.prefill[0].prefill_scripts.append(prefill_that(started, then=KvLostError("gone")))
        cluster.decode[0].decode_scripts += [decode_that(), decode_that(3, failed(KvLostError("gone")))]
        dispatcher = InstrumentedDispatcher(cluster.dispatcher, observed)
        job = cluster.job(SPEC)
        async with aclosing(dispatcher.run(job)) as events:
            got = [
                token
                for event in [event async for event in events]
                if isinstance(event, Tokens)
                for token in event.token_ids
            ]
    assert len(got) == SPEC.max_tokens
    assert value(observed, "attempts_total", mode="disaggregated") == 3
    assert value(observed, "attempts_total", mode="local") == 0
    assert value(observed, "migrations_total", reason="KV_LOST") == 2
    assert value(observed, "output_tokens_total") == SPEC.max_tokens


async def test_every_look_up_is_timed() -> None:
    """The time of a look-up is observed, whatever it finds, and its answer is passed on."""
    clock, observed = ManualClock(), RequestMetrics()
    hashes = chain(1, 3)

    class SlowIndex(MemoryPrefixIndex):
        """Takes three milliseconds."""

        async def lookup(self, hashes: Sequence[BlockHash]) -> dict[WorkerKey, int]:
            """What is there, late."""
            clock.advance(0.003)
            return await super().lookup(hashes)

    index = SlowIndex()
    await index.publish(ANNE, entries(hashes))
    timed = InstrumentedIndex(index, observed, clock)
    assert await timed.lookup(hashes) == {ANNE: 3}
    assert await timed.lookup(chain(2, 3)) == {}
    value = observed.registry.get_sample_value
    assert value("paceline_index_lookup_seconds_count") == 2
    assert value("paceline_index_lookup_seconds_sum") == pytest.approx(0.006)
    assert value("paceline_index_lookup_seconds_bucket", {"le": "0.002"}) == 0
    assert value("paceline_index_lookup_seconds_bucket", {"le": "0.004"}) == 2
