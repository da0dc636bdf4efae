"""One request through its workers, and whatever goes wrong with them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from paceline.core.block_hash import BlockHash, chain_root, hash_full_blocks
from paceline.core.errors import (
    DeadlineError,
    DrainingError,
    EngineFailedError,
    FingerprintMismatchError,
    InvariantError,
    KvLostError,
    NoEndpointError,
    PacelineError,
    PeerLostError,
    SlowConsumerError,
)
from paceline.core.kv_layout import BlockId
from paceline.core.prefix import PrefixEntry, WorkerKey
from paceline.core.request import BootEpoch, FinishReason, Priority, SequenceSpec, WorkerId
from paceline.prefix_index.memory_index import MemoryPrefixIndex
from paceline.v1 import generation_pb2
from paceline.v1.decode_pb2 import SequenceEvent, SequenceProgress
from paceline.v1.prefill_pb2 import PrefillResponse
from router.dispatcher import Dispatcher
from router.hash_ring import HashRing, prompt_key
from router.job import DispatchEvent, Job, Placed, PromptComputed, PromptProgress, Tokens
from tests.factories import BLOCK_SIZE, FINGERPRINT, make_spec
from tests.router.cluster import DECODE, PREFILL, ScriptedCluster, scripted_cluster, token_ids
from tests.router.scripted_workers import (
    BreakStreamError,
    DecodeScript,
    PrefillScript,
    ScriptedWorker,
    decode_started,
    decode_that,
    decode_until,
    failed,
    good_prefill,
    kv_received,
    oracle,
    prefill_that,
    progress,
    result,
    started,
    tokens,
)

SPEC = make_spec("r", tuple(range(1, 21)), max_tokens=6)
WHOLE = oracle(SPEC)


def _progress(worker: ScriptedWorker, spec: SequenceSpec) -> PrefillResponse:
    return progress(8)


def _result(worker: ScriptedWorker, spec: SequenceSpec) -> PrefillResponse:
    return result(spec)


def _placed(events: list[DispatchEvent]) -> list[tuple[int, str]]:
    """Attempts and why each came to be."""
    return [(event.attempt, event.reason) for event in events if isinstance(event, Placed)]


def _ends(events: list[DispatchEvent]) -> list[FinishReason]:
    return [e.finish_reason for e in events if isinstance(e, Tokens) and e.finish_reason is not None]


def _require_whole(events: list[DispatchEvent]) -> None:
    """Every token once, in order, and one end, which is the last event."""
    assert token_ids(events) == WHOLE
    assert _ends(events) == [FinishReason.LENGTH]
    assert isinstance(events[-1], Tokens)
    assert events[-1].finish_reason is FinishReason.LENGTH


# -- when all goes well


async def test_a_disaggregated_request_takes_both_tiers() -> None:
    """Placed, progress, computed, first token from prefill, the others from decode, which got the ticket."""
    async with scripted_cluster() as cluster:
        job = cluster.job(SPEC)
        events = await cluster.run(job)
    assert events[:3] == [
        Placed(0, is_local=False, reason=""),
        PromptProgress(20),
        PromptComputed(4, "prefill-0"),
    ]
    assert events[3] == Tokens(WHOLE[:1], None)
    _require_whole(events)
    assert [(s.sequence_id, has_ticket) for s, has_ticket in cluster.decode[0].submits] == [
        (SPEC.sequence_id, True)
    ]
    assert cluster.prefill[0].released == []
    timeline = job.timeline.to_proto()
    assert (timeline.kv_blocks, timeline.kv_bytes, timeline.transfer_s) == (3, 192, 0.25)
    assert (timeline.prefill_worker, timeline.decode_worker, timeline.attempts) == (
        "prefill-0",
        "decode-0",
        1,
    )


async def test_a_local_request_takes_the_decode_tier_only() -> None:
    """No prefill worker is asked, the submit has no ticket, and decode says what was cached."""
    async with scripted_cluster(disaggregate="never") as cluster:
        events = await cluster.run(cluster.job(SPEC))
    assert events[:2] == [Placed(0, is_local=True, reason=""), PromptComputed(8, "decode-0")]
    _require_whole(events)
    assert cluster.prefill[0].prefills == []
    assert [has_ticket for _, has_ticket in cluster.decode[0].submits] == [False]


@pytest.mark.parametrize("mode", ["always", "never"])
async def test_a_worker_is_asked_before_its_client_hears_of_it(mode: str) -> None:
    """It begins while the client's message is on its way."""
    async with scripted_cluster(disaggregate=mode) as cluster:
        prefill, decode = cluster.workers
        async with aclosing(cluster.dispatcher.run(cluster.job(make_spec()))) as events:
            assert isinstance(await anext(events), Placed)
            if mode == "always":
                await prefill.until(lambda: len(prefill.prefills) == 1)
            else:
                await decode.until(lambda: len(decode.submits) == 1)


async def test_a_long_local_prompt_says_how_far_it_is() -> None:
    """As one that is computed apart; its worker has the whole of it on its account until it is done."""
    progress_of = [SequenceEvent(progress=SequenceProgress(computed_tokens=number)) for number in (8, 16)]
    outputs = tokens(0, WHOLE[:1]), tokens(1, WHOLE[1:], ends=True)
    async with scripted_cluster(disaggregate="never") as cluster:
        cluster.decode[0].decode_scripts.append(decode_that(0, decode_started(), *progress_of, *outputs))
        events, assigned = list[DispatchEvent](), list[int]()
        async with aclosing(cluster.dispatcher.run(cluster.job(SPEC))) as running:
            async for event in running:
                events.append(event)
                assigned.append(cluster.registry.views(DECODE)[0].num_assigned_tokens)
    assert [event for event in events if isinstance(event, PromptProgress)] == [
        PromptProgress(8),
        PromptProgress(16),
    ]
    assert sum(isinstance(event, PromptComputed) for event in events) == 1
    untold = sum(isinstance(event, Placed | PromptProgress) for event in events)
    assert untold == 3 and len(set(assigned[:untold])) == 1 and assigned[untold] < assigned[0], assigned
    assert token_ids(events) == WHOLE


async def test_workers_get_the_whole_of_the_request() -> None:
    """Sampling, limits, scope, class, tenant and what is left of the deadline reach both tiers."""
    spec = make_spec(
        "r",
        (1, 2, 3),
        stop_token_ids=(7,),
        ignore_eos=True,
        cache_scope="tenant",
        max_tokens=3,
        priority=Priority.REALTIME,
        tenant="acme",
    )
    async with scripted_cluster() as cluster:
        await cluster.run(cluster.job(spec, deadline_s=cluster.clock() + 60))
    expected = replace(spec, time_budget_s=60.0)
    assert cluster.prefill[0].prefills == [expected]
    assert cluster.decode[0].submits == [(expected, True)]


async def test_class_and_tenant_survive_a_loss() -> None:
    """Whoever goes on after a prefill and a decode were lost treats the request like those before."""
    spec = make_spec("r", SPEC.prompt_ids, max_tokens=6, priority=Priority.BATCH, tenant="acme")
    async with scripted_cluster() as cluster:
        cluster.prefill[0].prefill_scripts.append(prefill_that(started, then=KvLostError("gone")))
        cluster.decode[0].decode_scripts += [decode_that(), decode_that(3, failed(KvLostError("gone")))]
        events = await cluster.run(cluster.job(spec))
    assert token_ids(events) == WHOLE
    sent = [*cluster.prefill[0].prefills, *(submitted for submitted, _ in cluster.decode[0].submits)]
    assert {each.sequence_id.attempt for each in sent} == {0, 1, 2}
    assert {(each.priority, each.tenant) for each in sent} == {(Priority.BATCH, "acme")}


async def test_a_first_token_that_ends_the_request_is_all() -> None:
    """Decode is told to stop, says nothing, and the lease goes back to its owner."""
    spec = make_spec("r", SPEC.prompt_ids, max_tokens=1)
    async with scripted_cluster() as cluster:
        cluster.decode[0].decode_scripts.append(decode_that())
        events = await cluster.run(cluster.job(spec))
        await cluster.decode[0].until(lambda: cluster.decode[0].cancels == [("r", 0)])
        await cluster.prefill[0].until(lambda: cluster.prefill[0].released == ["lease-r-0"])
    assert token_ids(events) == WHOLE[:1]
    assert _ends(events) == [FinishReason.LENGTH]


async def test_many_requests_share_one_stream() -> None:
    """Their events never mix."""
    specs = [make_spec(f"r{n}", (n, n + 1), max_tokens=5) for n in range(10)]
    async with scripted_cluster(2, 2) as cluster:
        outputs = await asyncio.gather(*(cluster.run(cluster.job(spec)) for spec in specs))
    assert [token_ids(events) for events in outputs] == [oracle(spec) for spec in specs]


async def test_the_index_decides_where_a_prefix_goes() -> None:
    """What the table says about the prompt's blocks reaches placement, unless the cache is bypassed: then the ring decides."""
    bypass = make_spec("bypass", SPEC.prompt_ids, max_tokens=6, bypass_cache=True)
    async with scripted_cluster(2, 1) as cluster:
        (first, *_) = HashRing.of(["prefill-0", "prefill-1"]).walk(prompt_key(SPEC.prompt_ids, ""))
        on_ring, other = cluster.prefill if first == "prefill-0" else cluster.prefill[::-1]
        other_id = WorkerId(other.info.worker_id)
        await cluster.index.publish(WorkerKey(other_id, BootEpoch(1)), _prefix_entries())
        await cluster.run(cluster.job(SPEC))
        await cluster.run(cluster.job(bypass))
    assert [spec.sequence_id for spec in other.prefills] == [SPEC.sequence_id]
    assert [spec.sequence_id for spec in on_ring.prefills] == [bypass.sequence_id]


async def test_a_session_stays_on_one_worker_without_a_table() -> None:
    """Prompts that have nothing in common go where the session's id is on the ring, and other sessions elsewhere."""
    async with scripted_cluster(4, 1) as cluster:
        for session in range(8):
            before = [len(worker.prefills) for worker in cluster.prefill]
            for number in range(3):
                job = cluster.job(make_spec(f"r{session}-{number}", (session, number), max_tokens=2))
                job.session_id = f"chat {session}"
                await cluster.run(job)
            after = [len(worker.prefills) for worker in cluster.prefill]
            assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0, 0, 0, 3]
        assert sum(bool(worker.prefills) for worker in cluster.prefill) > 1


class TogetherIndex(MemoryPrefixIndex):
    """Answers two look-ups at once, when both have come."""

    def __init__(self) -> None:
        super().__init__()
        self._both = asyncio.Barrier(2)

    async def lookup(self, hashes: Sequence[BlockHash]) -> dict[WorkerKey, int]:
        """Waits for the other one."""
        await self._both.wait()
        return await super().lookup(hashes)


async def test_prompts_that_are_looked_up_at_once_go_to_different_workers() -> None:
    """What one of them is given while the other one's look-up is under way counts for the other one."""
    async with scripted_cluster(2, 1) as cluster:
        cluster.dispatcher = Dispatcher(
            cluster.config, cluster.registry, TogetherIndex(), cluster.channels, clock=cluster.clock
        )
        specs = [make_spec(name, SPEC.prompt_ids, max_tokens=6) for name in ("one", "other")]
        await asyncio.gather(*(cluster.run(cluster.job(spec)) for spec in specs))
    assert [len(worker.prefills) for worker in cluster.prefill] == [1, 1]


async def test_what_is_under_way_counts_as_load_and_nothing_stays_behind() -> None:
    """What of the prompt is not computed yet is on the worker's account; afterwards nothing is."""
    async with scripted_cluster() as cluster:
        cluster.prefill[0].prefill_scripts.append(prefill_that(started, then=KvLostError("gone")))
        job, seen = cluster.job(SPEC), list[int]()
        async with aclosing(cluster.dispatcher.run(job)) as running:
            async for event in running:
                if isinstance(event, Placed | PromptProgress):
                    seen.append(cluster.registry.views(PREFILL)[0].num_assigned_tokens)
        assert seen == [20, 20, 0]
        assert cluster.registry.views(PREFILL)[0].num_assigned_tokens == 0
        assert cluster.registry.views(DECODE)[0].num_assigned_tokens == 0


# -- a prefill is lost


@pytest.mark.parametrize(
    "steps", [(), (started,), (started, _progress)], ids=["at-once", "started", "half-way"]
)
@pytest.mark.parametrize(
    "error", [BreakStreamError(), KvLostError("gone"), DrainingError("drains")], ids=repr
)
async def test_a_lost_prefill_is_tried_again(
    steps: tuple[Callable[[ScriptedWorker, SequenceSpec], PrefillResponse], ...], error: Exception
) -> None:
    """Whenever it breaks: a new attempt gives every token once, and what the old one held goes back."""
    reason = error.reason if isinstance(error, PacelineError) else "PEER_LOST"
    async with scripted_cluster(2, 1, placement="round-robin") as cluster:
        cluster.prefill[0].prefill_scripts.append(prefill_that(*steps, then=error))
        cluster.decode[0].decode_scripts += [decode_that()] * bool(steps)
        events = await cluster.run(cluster.job(SPEC))
        _require_whole(events)
        assert _placed(events) == [(0, ""), (1, reason)]
        if steps:
            await cluster.decode[0].until(lambda: ("r", 0) in cluster.decode[0].cancels)
            await cluster.prefill[0].until(lambda: "lease-r-0" in cluster.prefill[0].released)
        assert [s.sequence_id.attempt for s, _ in cluster.decode[0].submits] == [0, 1][not steps :]


async def test_a_prefill_that_ends_early_without_a_word_is_lost() -> None:
    """A stream that closes as if all were well, but with no result, is no result."""

    async def nothing(worker: ScriptedWorker, spec: SequenceSpec) -> AsyncGenerator[PrefillResponse, None]:
        """Ends at once."""
        for step in list[Callable[[], PrefillResponse]]():
            yield step()

    async with scripted_cluster() as cluster:
        cluster.prefill[0].prefill_scripts.append(nothing)
        events = await cluster.run(cluster.job(SPEC))
    _require_whole(events)
    assert _placed(events) == [(0, ""), (1, "PEER_LOST")]


def _prefix_entries() -> list[PrefixEntry]:
    """What the table says of a worker that holds the whole prompt."""
    hashes = hash_full_blocks(chain_root(FINGERPRINT.digest(), ""), SPEC.prompt_ids, BLOCK_SIZE)
    return [PrefixEntry(h, hashes[0], BlockId(n)) for n, h in enumerate(hashes)]


async def test_a_draining_prefill_worker_is_asked_once() -> None:
    """It refuses before its load report says so: the next attempt goes elsewhere, however good its prefix."""
    async with scripted_cluster(2, 1) as cluster:
        draining = cluster.prefill[1]
        draining.prefill_scripts += [prefill_that(then=DrainingError("drains"))] * 3
        await cluster.index.publish(WorkerKey(WorkerId("prefill-1"), BootEpoch(1)), _prefix_entries())
        events = await cluster.run(cluster.job(SPEC))
        await cluster.run(cluster.job(SPEC))
    _require_whole(events)
    assert _placed(events) == [(0, ""), (1, "DRAINING")]
    assert len(draining.prefills) == 1


@pytest.mark.parametrize("disaggregate", ["always", "never"])
async def test_a_draining_decode_worker_is_asked_once(disaggregate: str) -> None:
    """The same for the other tier, whatever work it was given."""
    async with scripted_cluster(1, 2, disaggregate=disaggregate) as cluster:
        draining = cluster.decode[0]
        draining.decode_scripts += [decode_that(0, failed(DrainingError("drains")))] * 3
        events = await cluster.run(cluster.job(SPEC))
        await cluster.run(cluster.job(SPEC))
    _require_whole(events)
    assert _placed(events) == [(0, ""), (1, "DRAINING")]
    assert len(draining.submits) == 1


# -- a decode is lost


async def test_a_failed_hand_over_is_tried_again_with_the_token_that_was_seen() -> None:
    """The first token has gone to the client: it is input to the next attempt, as output, and is not said twice."""
    async with scripted_cluster() as cluster:
        cluster.decode[0].decode_scripts.append(decode_that(0, failed(KvLostError("gone"))))
        events = await cluster.run(cluster.job(SPEC))
        await cluster.prefill[0].until(lambda: cluster.prefill[0].released == ["lease-r-0"])
    _require_whole(events)
    assert _placed(events) == [(0, ""), (1, "KV_LOST")]
    again = cluster.prefill[0].prefills[1]
    assert (again.prompt_ids, again.output_ids, again.max_tokens) == (SPEC.prompt_ids, WHOLE[:1], 6)
    assert again.sequence_id.attempt == 1


@pytest.mark.parametrize("disaggregate", ["always", "never"])
@pytest.mark.parametrize("num_tokens", [2, 4, 5])
async def test_a_broken_decode_stream_moves_the_request(num_tokens: int, disaggregate: str) -> None:
    """Tokens that were seen go into the next attempt as output; the stream goes on with no token lost or repeated."""
    async with scripted_cluster(1, 2, disaggregate=disaggregate) as cluster:
        cluster.decode[0].decode_scripts.append(decode_that(num_tokens, then=BreakStreamError()))
        events = await cluster.run(cluster.job(SPEC))
        _require_whole(events)
        assert _placed(events) == [(0, ""), (1, "PEER_LOST")]
        # If only the last token is left then the prefill ends the request, and no decode worker may have heard of it.
        heard = [*cluster.prefill[0].prefills, *(s for w in cluster.decode for s, _ in w.submits)]
        resumed = next(s for s in heard if s.sequence_id.attempt == 1)
        assert resumed.prompt_ids == SPEC.prompt_ids
        assert resumed.output_ids == WHOLE[: len(resumed.output_ids)]
        assert len(resumed.output_ids) <= num_tokens


async def test_a_killed_decode_worker_loses_no_request() -> None:
    """With another decode worker the request moves there; the dead one is not asked again."""
    async with scripted_cluster(1, 2) as cluster:
        cluster.decode[0].decode_scripts.append(decode_that(3))
        running = asyncio.create_task(cluster.run(cluster.job(SPEC)))
        await cluster.decode[0].until(lambda: len(cluster.decode[0].submits) == 1)
        await cluster.decode[0].stop()
        _require_whole(await running)
        assert [s.sequence_id.attempt for s, _ in cluster.decode[1].submits] == [1]


async def test_the_only_decode_worker_is_waited_for() -> None:
    """Killed and started again, in another life: the request goes on there, and no attempt is wasted meanwhile."""
    async with scripted_cluster(1, 1) as cluster:
        cluster.decode[0].decode_scripts.append(decode_that(3))
        running = asyncio.create_task(cluster.run(cluster.job(SPEC)))
        await cluster.decode[0].until(lambda: len(cluster.decode[0].submits) == 1)
        await cluster.decode[0].stop()
        await cluster.until_seen(*cluster.prefill)
        await cluster.decode[0].restart()
        events = await running
    _require_whole(events)
    assert _placed(events) == [(0, ""), (1, "PEER_LOST")]


async def test_a_prefill_worker_whose_call_broke_has_a_moment_to_be_lost() -> None:
    """Its load stream breaks a little later: meanwhile no attempt is wasted on it."""
    async with scripted_cluster(1, 1) as cluster:
        worker = cluster.prefill[0]
        worker.prefill_scripts += [prefill_that(then=BreakStreamError())] * 3
        running = asyncio.create_task(cluster.run(cluster.job(SPEC)))
        await worker.until(lambda: len(worker.ended_prefills) == 1)
        for _ in range(200):  # turns of the loop, in which attempts would follow each other
            await asyncio.sleep(0)
        worker.prefill_scripts.clear()
        worker.break_load_streams()
        events = await running
    _require_whole(events)
    assert _placed(events) == [(0, ""), (1, "PEER_LOST")]


async def test_the_only_prefill_worker_is_waited_for() -> None:
    """The same for the other tier."""
    async with scripted_cluster(1, 1) as cluster:
        cluster.prefill[0].prefill_scripts.append(prefill_that(started))
        running = asyncio.create_task(cluster.run(cluster.job(SPEC)))
        await cluster.prefill[0].until(lambda: len(cluster.prefill[0].prefills) == 1)
        await cluster.prefill[0].stop()
        await cluster.until_seen(*cluster.decode)
        await cluster.prefill[0].restart()
        events = await running
    _require_whole(events)
    assert _placed(events) == [(0, ""), (1, "PEER_LOST")]


@pytest.mark.parametrize("steps", [(), (started,), (started, _progress)], ids=len)
async def test_a_prefill_worker_that_is_lost_from_sight_is_not_waited_for(
    steps: tuple[Callable[[ScriptedWorker, SequenceSpec], PrefillResponse], ...],
) -> None:
    """Its own call goes on, but it reports no more, as a process that hangs: the request moves, and the call is given up."""
    async with scripted_cluster(2, 1, placement="round-robin") as cluster:
        stuck = cluster.prefill[0]
        stuck.prefill_scripts.append(prefill_that(*steps))
        cluster.decode[0].decode_scripts += [decode_that()] * bool(steps)
        running = asyncio.create_task(cluster.run(cluster.job(SPEC)))
        await stuck.until(lambda: len(stuck.prefills) == 1)
        stuck.break_load_streams()
        events = await running
        await stuck.until(lambda: len(stuck.ended_prefills) == 1)
    _require_whole(events)
    assert _placed(events) == [(0, ""), (1, "PEER_LOST")]


async def test_a_decode_worker_that_is_lost_during_the_prefill_is_noticed() -> None:
    """Its stream breaks before there is a ticket to send: the request does not wait for a stream that is gone."""
    async with scripted_cluster(1, 1) as cluster:
        gate = asyncio.Event()

        async def slow(worker: ScriptedWorker, spec: SequenceSpec) -> AsyncGenerator[PrefillResponse, None]:
            """Has no ticket before the gate opens."""
            await gate.wait()
            yield started(worker, spec)
            yield result(spec)

        cluster.prefill[0].prefill_scripts.append(slow)
        running = asyncio.create_task(cluster.run(cluster.job(SPEC)))
        await cluster.prefill[0].until(lambda: len(cluster.prefill[0].prefills) == 1)
        await cluster.decode[0].stop()
        await cluster.until_seen(*cluster.prefill)
        gate.set()
        await cluster.decode[0].restart()
        events = await running
    _require_whole(events)


# -- what workers say


async def test_repeated_tokens_are_dropped() -> None:
    """A message that comes twice, or overlaps, adds only what is new."""
    script = decode_that(
        0,
        kv_received(),
        tokens(1, WHOLE[1:3]),
        tokens(1, WHOLE[1:3]),
        tokens(0, WHOLE[0:4]),
        tokens(3, WHOLE[3:6], ends=True),
    )
    async with scripted_cluster() as cluster:
        cluster.decode[0].decode_scripts.append(script)
        events = await cluster.run(cluster.job(SPEC))
    _require_whole(events)
    assert _placed(events) == [(0, "")]


async def test_repeated_log_probabilities_are_dropped_with_their_tokens() -> None:
    """Of a message that overlaps, those of its new tokens are told, once."""
    first, again = tokens(1, WHOLE[1:3]), tokens(2, WHOLE[2:6], ends=True)
    for event in (first, again):
        event.tokens.logprobs.extend(
            generation_pb2.TokenLogprob(token_id=token_id, logprob=-1.0)
            for token_id in event.tokens.token_ids
        )
    async with scripted_cluster() as cluster:
        cluster.decode[0].decode_scripts.append(decode_that(0, kv_received(), first, again))
        events = await cluster.run(cluster.job(SPEC))
    told = [each.token_id for event in events if isinstance(event, Tokens) for each in event.logprobs]
    assert told == list(WHOLE[1:])
    _require_whole(events)


async def test_an_end_that_repeats_the_last_token_is_an_end() -> None:
    """All tokens were seen already; the request ends all the same."""
    script = decode_that(0, kv_received(), tokens(1, WHOLE[1:]), tokens(5, WHOLE[5:], ends=True))
    async with scripted_cluster() as cluster:
        cluster.decode[0].decode_scripts.append(script)
        events = await cluster.run(cluster.job(SPEC))
    assert token_ids(events) == WHOLE
    assert _ends(events) == [FinishReason.LENGTH]


async def test_a_missing_token_is_never_skipped() -> None:
    """A gap ends the attempt: the next one computes what is missing."""
    async with scripted_cluster() as cluster:
        script = decode_that(2, tokens(4, WHOLE[4:], ends=True))
        cluster.decode[0].decode_scripts.append(script)
        events = await cluster.run(cluster.job(SPEC))
    _require_whole(events)
    assert _placed(events) == [(0, ""), (1, "PEER_LOST")]
    assert cluster.prefill[0].prefills[1].output_ids == WHOLE[:2]


async def test_events_of_an_old_attempt_reach_nobody() -> None:
    """What the first attempt says after it was given up is not taken for the second one's."""
    late = tokens(1, (999,) * 5, ends=True)
    async with scripted_cluster() as cluster:
        cluster.decode[0].decode_scripts.append(decode_that(0, failed(KvLostError("gone")), late, late))
        events = await cluster.run(cluster.job(SPEC))
    _require_whole(events)


# -- when it does not get better


def _two_tokens_and_lost(job: Job) -> DecodeScript:
    """Brings two more tokens of a job, and once those are read the sequence is lost."""

    async def script(
        worker: ScriptedWorker, spec: SequenceSpec, has_ticket: bool
    ) -> AsyncGenerator[SequenceEvent, None]:
        """Prompt, token, and the end."""
        async for event in decode_until(spec, has_ticket, len(spec.output_ids) + 2):
            yield event
        while job.num_output_tokens < len(spec.output_ids) + 2:  # noqa: ASYNC110 - a job has no event
            await asyncio.sleep(0)
        yield failed(KvLostError("gone"))

    return script


async def test_a_request_that_gets_on_outlives_more_losses_than_attempts_in_a_row() -> None:
    """Each attempt brings tokens before it fails, as in a rolling restart: nothing is lost or repeated."""
    async with scripted_cluster(disaggregate="never", max_attempts=2) as cluster:
        job = cluster.job(SPEC)
        cluster.decode[0].decode_scripts += [_two_tokens_and_lost(job)] * 2
        events = await cluster.run(job)
    _require_whole(events)
    assert _placed(events) == [(0, ""), (1, "KV_LOST"), (2, "KV_LOST")]


async def test_losses_are_bounded_in_all_too() -> None:
    """A request that its workers die of is given up, though each of them brings tokens before."""
    async with scripted_cluster(disaggregate="never", max_attempts=2, max_attempts_in_all=2) as cluster:
        job = cluster.job(SPEC)
        cluster.decode[0].decode_scripts += [_two_tokens_and_lost(job)] * 2
        with pytest.raises(KvLostError):
            await cluster.run(job)
        assert [spec.sequence_id.attempt for spec, _ in cluster.decode[0].submits] == [0, 1]


@pytest.mark.parametrize("disaggregate", ["always", "never"])
async def test_a_worker_whose_engine_has_failed_is_asked_once(disaggregate: str) -> None:
    """Until its streams end nothing more is sent there; its requests go on elsewhere."""
    async with scripted_cluster(2, 2, disaggregate=disaggregate, placement="round-robin") as cluster:
        broken = (cluster.prefill if disaggregate == "always" else cluster.decode)[0]
        broken.prefill_scripts += [prefill_that(started, then=EngineFailedError("a bug"))] * 3
        broken.decode_scripts += [decode_that(1, failed(EngineFailedError("a bug")))] * 3
        events = await cluster.run(cluster.job(SPEC))
        for _ in range(3):
            _require_whole(await cluster.run(cluster.job(SPEC)))
    _require_whole(events)
    assert _placed(events) == [(0, ""), (1, "ENGINE_FAILED")]
    assert len(broken.prefills) + len(broken.submits) == 1


async def test_attempts_are_bounded() -> None:
    """After the last one the client hears what was wrong; every attempt asked once."""
    async with scripted_cluster(max_attempts=3) as cluster:
        cluster.prefill[0].prefill_scripts += [prefill_that(started, then=KvLostError("gone"))] * 3
        cluster.decode[0].decode_scripts += [decode_that()] * 3
        with pytest.raises(KvLostError):
            await cluster.run(cluster.job(SPEC))
        assert [spec.sequence_id.attempt for spec in cluster.prefill[0].prefills] == [0, 1, 2]
        await cluster.prefill[0].until(lambda: len(cluster.prefill[0].released) == 3)


@pytest.mark.parametrize(
    "error",
    [InvariantError("a bug"), FingerprintMismatchError("dtype", "a", "b"), DeadlineError("prefill")],
    ids=lambda error: error.reason,
)
async def test_what_another_attempt_cannot_heal_is_told_at_once(error: PacelineError) -> None:
    """A bug, a difference in settings or a deadline would only happen again; either tier may say so."""
    async with scripted_cluster() as cluster:
        cluster.prefill[0].prefill_scripts.append(prefill_that(then=error))
        with pytest.raises(type(error)) as caught:
            await cluster.run(cluster.job(SPEC))
        assert caught.value.facts() == error.facts()
        cluster.decode[0].decode_scripts.append(decode_that(0, failed(error)))
        with pytest.raises(type(error)) as caught:
            await cluster.run(cluster.job(SPEC))
        assert len(cluster.prefill[0].prefills) == 2


async def test_a_late_request_is_not_tried_again() -> None:
    """Past its deadline an error is the end, in time it is not."""
    for late_s, num_attempts in ((60.0, 1), (0.0, 2)):
        async with scripted_cluster() as cluster:
            job = cluster.job(SPEC, deadline_s=cluster.clock() + 30)
            cluster.prefill[0].prefill_scripts.append(prefill_that(started, then=KvLostError("gone")))
            cluster.decode[0].decode_scripts.append(decode_that())
            running = asyncio.create_task(cluster.run(job))
            await _until_asked(cluster.prefill[0])
            cluster.clock.advance(late_s)
            (outcome,) = await asyncio.gather(running, return_exceptions=True)
            assert isinstance(outcome, KvLostError) == (num_attempts == 1)
            assert len(cluster.prefill[0].prefills) == num_attempts


@pytest.mark.parametrize(
    ("disaggregate", "prefills", "decodes", "phase"),
    [
        ("always", prefill_that(started), decode_that(), "prefill"),
        ("always", good_prefill, decode_that(), "transfer"),
        ("always", good_prefill, decode_that(0, kv_received()), "decode"),
        ("never", good_prefill, decode_that(), "queued"),
        ("never", good_prefill, decode_that(0, decode_started()), "prefill"),
        ("never", good_prefill, decode_that(3), "decode"),
    ],
)
async def test_a_worker_that_says_nothing_holds_nobody_past_a_deadline(
    disaggregate: str, prefills: PrefillScript, decodes: DecodeScript, phase: str
) -> None:
    """The error names the phase, and the worker hears that nobody waits any more."""
    async with scripted_cluster(disaggregate=disaggregate) as cluster:
        cluster.prefill[0].prefill_scripts.append(prefills)
        cluster.decode[0].decode_scripts.append(decodes)
        with pytest.raises(DeadlineError) as caught:
            await cluster.run(cluster.job(SPEC, deadline_s=cluster.clock() + 0.2))
        await cluster.decode[0].until(lambda: cluster.decode[0].cancels == [("r", 0)])
    assert caught.value.phase == phase


async def test_what_the_prefill_took_is_not_there_for_the_decode() -> None:
    """Each worker is told what is left of the deadline when it is asked, and not what was left at first."""
    async with scripted_cluster() as cluster:

        async def slow(worker: ScriptedWorker, spec: SequenceSpec) -> AsyncGenerator[PrefillResponse, None]:
            """Takes ten seconds to begin."""
            cluster.clock.advance(10)
            yield started(worker, spec)
            yield result(spec)

        cluster.prefill[0].prefill_scripts.append(slow)
        _require_whole(await cluster.run(cluster.job(SPEC, deadline_s=cluster.clock() + 60)))
    (asked,), ((submitted, _),) = cluster.prefill[0].prefills, cluster.decode[0].submits
    assert (asked.time_budget_s, submitted.time_budget_s) == (60.0, 50.0)


async def test_a_first_attempt_does_not_wait_for_workers() -> None:
    """Without a decode worker a new request hears NO_ENDPOINT at once; with one it is served."""
    async with scripted_cluster() as cluster:
        await cluster.decode[0].stop()
        await cluster.until_seen(*cluster.prefill)
        with pytest.raises(NoEndpointError):
            await cluster.run(cluster.job(SPEC))
        await cluster.decode[0].restart()
        await cluster.until_seen(*cluster.workers)
        _require_whole(await cluster.run(cluster.job(SPEC)))


async def test_waiting_for_a_worker_is_bounded() -> None:
    """When nobody comes back, the request fails with NO_ENDPOINT after recovery_wait_s."""
    async with scripted_cluster(recovery_wait_s=0.2) as cluster:
        cluster.decode[0].decode_scripts.append(decode_that(2))
        running = asyncio.create_task(cluster.run(cluster.job(SPEC)))
        await cluster.decode[0].until(lambda: cluster.decode[0].submits != [])
        await cluster.decode[0].stop()
        with pytest.raises(NoEndpointError):
            await running


async def test_nobody_waits_for_a_worker_past_a_deadline() -> None:
    """While nobody comes back a deadline may pass, which is told as one, with its phase."""
    async with scripted_cluster() as cluster:
        cluster.decode[0].decode_scripts.append(decode_that(2))
        running = asyncio.create_task(cluster.run(cluster.job(SPEC, deadline_s=cluster.clock() + 30)))
        await cluster.decode[0].until(lambda: cluster.decode[0].submits != [])
        cluster.clock.advance(29.9)
        await cluster.decode[0].stop()
        with pytest.raises(DeadlineError) as caught:
            await running
    assert caught.value.phase == "queued"


async def _until_asked(worker: ScriptedWorker) -> None:
    await worker.until(lambda: worker.prefills != [])


# -- the client leaves


async def _close_after(job: Job, cluster: ScriptedCluster, num_events: int) -> None:
    """Reads so many events, then gives the request up."""
    async with aclosing(cluster.dispatcher.run(job)) as running:
        for _ in range(num_events):
            await anext(running)


@pytest.mark.parametrize(
    ("script", "num_events"),
    [
        (prefill_that(started, _progress), 2),
        (prefill_that(started, _progress, _result), 4),
    ],
    ids=["during-the-prefill", "after-the-first-token"],
)
async def test_a_client_that_leaves_before_the_hand_over_frees_both_tiers(
    script: PrefillScript, num_events: int
) -> None:
    """The Prefill stream closes, decode hears a cancel, and the lease goes back."""
    async with scripted_cluster() as cluster:
        prefill, decode = cluster.prefill[0], cluster.decode[0]
        prefill.prefill_scripts.append(script)
        decode.decode_scripts.append(decode_that())
        await _close_after(cluster.job(SPEC), cluster, num_events)
        await prefill.until(lambda: len(prefill.ended_prefills) == 1)
        await decode.until(lambda: decode.cancels == [("r", 0)])
        await prefill.until(lambda: prefill.released == ["lease-r-0"])


async def test_a_client_that_leaves_before_the_start_frees_the_prefill() -> None:
    """No ticket has come, but all may be computed already: the lease is given back by the attempt's name."""
    async with scripted_cluster() as cluster:
        prefill = cluster.prefill[0]
        prefill.prefill_scripts.append(prefill_that())
        running = asyncio.create_task(cluster.run(cluster.job(SPEC)))
        await prefill.until(lambda: len(prefill.prefills) == 1)
        running.cancel()
        await prefill.until(lambda: len(prefill.ended_prefills) == 1)
        with pytest.raises(asyncio.CancelledError):
            await running
        assert cluster.decode[0].submits == []
        await prefill.until(lambda: prefill.released == ["lease-r-0"])


@pytest.mark.parametrize("disaggregate", ["always", "never"])
async def test_a_client_that_leaves_while_tokens_come_frees_decode(disaggregate: str) -> None:
    """Decode hears a cancel; a lease that decode has given back already is left alone."""
    async with scripted_cluster(disaggregate=disaggregate) as cluster:
        decode = cluster.decode[0]
        decode.decode_scripts.append(decode_that(3))
        async with aclosing(cluster.dispatcher.run(cluster.job(SPEC))) as running:
            async for event in running:
                if isinstance(event, Tokens) and event.token_ids == WHOLE[2:3]:
                    break
        await decode.until(lambda: decode.cancels == [("r", 0)])
        _require_whole(await cluster.run(cluster.job(SPEC)))
        assert cluster.prefill[0].released == []


async def test_a_client_that_reads_too_slowly_loses_its_request_only() -> None:
    """Past the bound the request ends with SLOW_CONSUMER and decode is told; a neighbour on the stream is unharmed."""
    flood = [tokens(1 + n, (WHOLE[min(1 + n, 5)],)) for n in range(60)]
    slow_spec = make_spec("slow", SPEC.prompt_ids, max_tokens=100)
    async with scripted_cluster(max_buffered_events=20) as cluster:
        decode = cluster.decode[0]
        decode.decode_scripts.append(decode_that(0, kv_received(), *flood))
        async with aclosing(cluster.dispatcher.run(cluster.job(slow_spec))) as running:
            for _ in range(4):
                await anext(running)
            await decode.until(lambda: ("slow", 0) in decode.cancels)
            _require_whole(await cluster.run(cluster.job(SPEC)))
            with pytest.raises(SlowConsumerError):
                await anext(running)


async def test_a_lost_peer_is_named() -> None:
    """The last error says which worker was lost."""
    async with scripted_cluster(max_attempts=1) as cluster:
        cluster.prefill[0].prefill_scripts.append(prefill_that(then=BreakStreamError()))
        with pytest.raises(PeerLostError, match="prefill-0"):
            await cluster.run(cluster.job(SPEC))
