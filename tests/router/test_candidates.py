"""Several candidates of one request on scripted workers: one prompt, and each candidate's tokens once, whatever is lost."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from paceline.core.errors import InvariantError, KvLostError
from paceline.core.prefix import WorkerKey
from router.job import DispatchEvent, Job, Placed, PromptComputed, Tokens
from router.merge import merged
from tests.factories import make_spec
from tests.router.cluster import ScriptedCluster, scripted_cluster
from tests.router.scripted_workers import (
    BreakStreamError,
    decode_that,
    failed,
    oracle,
    prefill_that,
    progress,
    started,
)

SPEC = make_spec("request", tuple(range(20)), max_tokens=6, candidates=(0, 1, 2))
WHOLE = {candidate: oracle(SPEC, candidate) for candidate in SPEC.candidates}
MODES = ("always", "never")


def _outputs(events: list[DispatchEvent]) -> dict[int, tuple[int, ...]]:
    outputs: dict[int, tuple[int, ...]] = {}
    for event in events:
        if isinstance(event, Tokens):
            outputs[event.candidate] = outputs.get(event.candidate, ()) + event.token_ids
    return outputs


def _require_whole(events: list[DispatchEvent]) -> None:
    """Every token of every candidate once, in order, and one end each."""
    assert _outputs(events) == WHOLE
    ends = [event.candidate for event in events if isinstance(event, Tokens) and event.finish_reason]
    assert sorted(ends) == [0, 1, 2]


async def _run_until(
    cluster: ScriptedCluster, job: Job, stops: dict[int, int]
) -> tuple[list[DispatchEvent], dict[int, int]]:
    """Runs a job whose reader ends each candidate named after so many tokens; gives the events and how many came of each."""
    events: list[DispatchEvent] = []
    counts = dict.fromkeys(job.spec.candidates, 0)
    async with asyncio.timeout(20), aclosing(cluster.dispatcher.run(job)) as running:
        async for event in running:
            events.append(event)
            if isinstance(event, Tokens):
                counts[event.candidate] += len(event.token_ids)
                if counts[event.candidate] == stops.get(event.candidate):
                    job.end(event.candidate)
    return events, counts


@pytest.mark.parametrize("mode", MODES)
async def test_one_attempt_gives_every_candidate(mode: str) -> None:
    """The prompt is computed once, and one submit brings all tokens."""
    async with scripted_cluster(disaggregate=mode) as cluster:
        events = await cluster.run(cluster.job(SPEC))
    _require_whole(events)
    assert [event for event in events if isinstance(event, Placed)] == [Placed(0, mode == "never", "")]
    assert sum(isinstance(event, PromptComputed) for event in events) == 1
    assert [spec.candidates for spec, _ in cluster.decode[0].submits] == [(0, 1, 2)]
    assert [spec.candidates for spec in cluster.prefill[0].prefills] == ([(0, 1, 2)] * (mode == "always"))


async def test_first_tokens_that_end_all_candidates_end_the_request() -> None:
    """With max_tokens 1 the decode worker has nothing to say."""
    spec = make_spec("one", tuple(range(20)), max_tokens=1, candidates=(0, 1))
    async with scripted_cluster() as cluster:
        events = await cluster.run(cluster.job(spec))
    assert _outputs(events) == {candidate: oracle(spec, candidate) for candidate in (0, 1)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_tokens", [1, 3])
async def test_a_reader_may_end_one_candidate(mode: str, num_tokens: int) -> None:
    """The worker hears of it, what it still says is dropped, and the others go on to their end."""
    async with scripted_cluster(disaggregate=mode) as cluster:
        events, counts = await _run_until(cluster, cluster.job(SPEC), {1: num_tokens})
        await cluster.decode[0].until(lambda: bool(cluster.decode[0].cancelled_candidates))
    assert counts == {0: 6, 1: num_tokens, 2: 6}
    assert _outputs(events)[2] == WHOLE[2]
    assert cluster.decode[0].cancelled_candidates == [(0, 1)]


async def test_a_lost_prefill_is_done_again_for_the_whole_family() -> None:
    """Nobody has seen a token: the next attempt computes the prompt once, for all of them."""
    async with scripted_cluster() as cluster:
        script = prefill_that(started, lambda _, __: progress(8), then=KvLostError("gone"))
        cluster.prefill[0].prefill_scripts.append(script)
        events = await cluster.run(cluster.job(SPEC))
    _require_whole(events)
    assert [event.attempt for event in events if isinstance(event, Placed)] == [0, 1]
    assert [spec.candidates for spec in cluster.prefill[0].prefills] == [(0, 1, 2)] * 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_tokens", [1, 2, 5])
async def test_after_a_lost_decode_worker_each_candidate_goes_on_by_itself(
    mode: str, num_tokens: int
) -> None:
    """Every unfinished one is a new attempt with its own tokens as input; none is lost, repeated or changed."""
    async with scripted_cluster(disaggregate=mode) as cluster:
        cluster.decode[0].decode_scripts.append(
            decode_that(num_tokens, failed(KvLostError("the worker is lost")))
        )
        job = cluster.job(SPEC)
        events = await cluster.run(job)
        placed = [event for event in events if isinstance(event, Placed)]
        # One that its prefill has ended may reach the decode worker only now.
        await cluster.decode[0].until(lambda: len(cluster.decode[0].submits) >= len(placed))
    _require_whole(events)
    assert placed[0].attempt == 0
    later = [spec for spec, _ in cluster.decode[0].submits[1:]]
    if any(spec.output_ids for spec in later):
        assert sorted(spec.candidates for spec in later) == [(0,), (1,), (2,)]
        assert sorted(event.attempt for event in placed) == [0, 1, 2, 3]
        assert sorted(event.candidate for event in placed[1:]) == [0, 1, 2]
    for spec in later:
        assert spec.output_ids == WHOLE[spec.candidates[0]][: len(spec.output_ids)]


async def test_a_broken_stream_loses_no_token_of_any_candidate() -> None:
    """Also when what had arrived and was not read is dropped with it."""
    async with scripted_cluster(num_decode=2, disaggregate="never") as cluster:
        for worker in cluster.decode:
            worker.decode_scripts.append(decode_that(4, then=BreakStreamError()))
        events = await cluster.run(cluster.job(SPEC))
    _require_whole(events)


async def test_what_has_ended_is_not_tried_again() -> None:
    """Of three candidates one was ended by its reader before the loss: two go on."""
    async with scripted_cluster() as cluster:
        cluster.decode[0].decode_scripts.append(decode_that(5, failed(KvLostError("lost"))))
        events, counts = await _run_until(cluster, cluster.job(SPEC), {0: 1})
        # One that its prefill has ended may reach the decode worker only now.
        await cluster.decode[0].until(lambda: len(cluster.decode[0].submits) >= 3)
    assert counts == {0: 1, 1: 6, 2: 6}
    assert all(_outputs(events)[candidate] == WHOLE[candidate] for candidate in (1, 2))
    assert sorted(spec.candidates for spec, _ in cluster.decode[0].submits[1:]) == [(1,), (2,)]


async def test_attempts_in_a_row_are_counted_for_each_candidate() -> None:
    """After `max_attempts` failures of one candidate the request fails, and nothing is left running."""
    async with scripted_cluster(max_attempts=3) as cluster:
        lost = failed(KvLostError("lost again"))
        cluster.decode[0].decode_scripts += [decode_that(2, lost)] + [decode_that(0, lost)] * 20
        with pytest.raises(KvLostError, match="lost again"):
            await cluster.run(cluster.job(SPEC))
        assert cluster.registry.assignments.num_sequences(_decode_key(cluster)) == 0


async def test_an_error_that_no_attempt_heals_ends_all_candidates() -> None:
    """The others are cancelled at their worker."""
    async with scripted_cluster() as cluster:
        cluster.decode[0].decode_scripts += [
            decode_that(2, failed(KvLostError("lost"))),
            decode_that(0),
            decode_that(0, failed(InvariantError("a bug"))),
            decode_that(0),
        ]
        with pytest.raises(InvariantError):
            await cluster.run(cluster.job(SPEC))
        await cluster.decode[0].until(lambda: len(cluster.decode[0].cancels) >= 2)


@pytest.mark.parametrize("num_failures", [0, 1])
async def test_a_client_that_leaves_ends_every_candidate(num_failures: int) -> None:
    """Together or each by itself: the worker hears that nothing is wanted any more."""
    async with scripted_cluster() as cluster:
        lost = [decode_that(2, failed(KvLostError("lost")))] * num_failures
        cluster.decode[0].decode_scripts += [*lost, *[decode_that(3)] * 3]
        # What failed at the worker needs no cancel.
        wanted = 3 if num_failures else 1
        seen = 0
        async with asyncio.timeout(20), aclosing(cluster.dispatcher.run(cluster.job(SPEC))) as running:
            async for event in running:
                seen += isinstance(event, Tokens)
                if seen == 9:
                    break
        await cluster.decode[0].until(lambda: len(cluster.decode[0].cancels) >= wanted)
        assert cluster.registry.assignments.num_sequences(_decode_key(cluster)) == 0


def test_ends_are_of_candidates() -> None:
    """A job knows which of its candidates are wanted, and parts only where they differ."""
    job = Job(SPEC, None, timeline=None)  # type: ignore[arg-type] # nothing is noted here
    assert job.parts() == [job]
    job.accept(0, (5,), 1)
    job.end(0)
    parts = job.parts()
    assert [part.candidates for part in parts] == [(1,), (2,)]
    assert [part.output_ids for part in parts] == [(5,), ()]
    parts[0].end(1)
    assert job.candidates == (2,)


async def test_merged_streams_wait_for_their_reader_and_end_together() -> None:
    """No stream runs ahead of its reader; the first error closes all of them."""
    asked: list[str] = []

    async def stream(name: str, num_events: int) -> AsyncGenerator[str, None]:
        """Notes how far it has come, and that it was closed."""
        try:
            for number in range(num_events):
                asked.append(f"{name}{number}")
                yield f"{name}{number}"
            raise ValueError(name)
        finally:
            asked.append(f"{name} closed")

    taken: list[str] = []

    async def read() -> None:
        """Takes what comes; both streams together are never more than one event ahead."""
        async with aclosing(merged([stream("a", 2), stream("b", 9)])) as events:
            async for event in events:
                taken.append(event)
                assert len(asked) <= len(taken) + 1

    with pytest.raises(ValueError, match="a"):
        await read()
    assert {"a0", "a1", "b0"} <= set(taken)
    assert {"a closed", "b closed"} <= set(asked)


def _decode_key(cluster: ScriptedCluster) -> WorkerKey:
    return cluster.registry.views(cluster.decode[0].info.role)[0].key


@pytest.mark.parametrize("mode", MODES)
async def test_log_probabilities_of_the_prompt_are_told_once(mode: str) -> None:
    """However many candidates there are, and not again by those that go on by themselves."""
    spec = make_spec(
        "asking", tuple(range(20)), max_tokens=6, num_top_logprobs=0, prompt_logprobs=True, candidates=(0, 1)
    )
    async with scripted_cluster(disaggregate=mode) as cluster:
        cluster.decode[0].decode_scripts.append(decode_that(2, failed(KvLostError("lost"))))
        events = await cluster.run(cluster.job(spec))
    told = [event.prompt_logprobs for event in events if isinstance(event, PromptComputed)]
    assert [len(each) for each in told if each] == [19]
    later = [spec for spec, _ in cluster.decode[0].submits[1:]]
    assert all(spec.prompt_logprobs is not bool(spec.output_ids) for spec in later)
    assert {candidate: output[-1] for candidate, output in _outputs(events).items()} == {
        candidate: oracle(spec, candidate)[-1] for candidate in (0, 1)
    }
