"""Log probabilities of a prompt on their way through the dispatcher, and whatever goes wrong with the workers that give them."""

import pytest

from paceline.core.block_hash import chain_root, hash_full_blocks
from paceline.core.errors import KvLostError, PeerLostError
from paceline.core.kv_layout import BlockId
from paceline.core.prefix import PrefixEntry, WorkerKey
from paceline.core.request import BootEpoch, SequenceSpec, TokenLogprob, WorkerId
from paceline.runtime.wire_internal import logprob_from_proto
from paceline.v1 import decode_pb2, prefill_pb2
from router.job import DispatchEvent, PromptComputed, Tokens
from tests.factories import BLOCK_SIZE, FINGERPRINT, make_spec
from tests.router.cluster import scripted_cluster, token_ids
from tests.router.scripted_workers import (
    BreakStreamError,
    ScriptedWorker,
    decode_started,
    decode_that,
    entries,
    failed,
    oracle,
    prefill_that,
    result,
    scored,
    started,
    tokens,
)

SPEC = make_spec("r", tuple(range(1, 21)), max_tokens=6, num_top_logprobs=0, prompt_logprobs=True)
WHOLE = oracle(SPEC)


def _told(events: list[DispatchEvent]) -> list[tuple[TokenLogprob, ...]]:
    """The entries of each computed prompt, before which no token came."""
    kinds = [type(event) for event in events if isinstance(event, PromptComputed | Tokens)]
    assert kinds[0] is PromptComputed
    computed = [event for event in events if isinstance(event, PromptComputed)]
    return [tuple(map(logprob_from_proto, event.prompt_logprobs)) for event in computed]


def _some(worker: ScriptedWorker, spec: SequenceSpec) -> prefill_pb2.PrefillResponse:
    return prefill_pb2.PrefillResponse(prompt_scored=scored(spec, 1, 9))


def _behind_a_gap(worker: ScriptedWorker, spec: SequenceSpec) -> prefill_pb2.PrefillResponse:
    return prefill_pb2.PrefillResponse(prompt_scored=scored(spec, 10, 20))


def _result(worker: ScriptedWorker, spec: SequenceSpec) -> prefill_pb2.PrefillResponse:
    return result(spec)


@pytest.mark.parametrize("disaggregate", ["always", "never"])
async def test_all_entries_come_with_the_computed_prompt(disaggregate: str) -> None:
    """Whoever computes it: every prompt token but the first, in order, before the first output token."""
    async with scripted_cluster(disaggregate=disaggregate) as cluster:
        events = await cluster.run(cluster.job(SPEC))
    assert _told(events) == [entries(SPEC)]
    assert len(entries(SPEC)) == len(SPEC.prompt_ids) - 1
    assert token_ids(events) == WHOLE


@pytest.mark.parametrize("disaggregate", ["always", "never"])
async def test_a_prompt_of_one_token_is_computed_without_entries(disaggregate: str) -> None:
    """There is nothing to wait for."""
    spec = make_spec("r", (5,), max_tokens=3, prompt_logprobs=True)
    async with scripted_cluster(disaggregate=disaggregate) as cluster:
        events = await cluster.run(cluster.job(spec))
    assert _told(events) == [()]
    assert token_ids(events) == oracle(spec)


async def test_a_prefill_lost_midway_is_told_anew_by_the_next_one() -> None:
    """What the lost worker had told is dropped with it: nothing is doubled, and nothing is left out."""
    async with scripted_cluster(num_prefill=2, placement="round-robin") as cluster:
        cluster.prefill[0].prefill_scripts.append(prefill_that(started, _some, then=BreakStreamError()))
        events = await cluster.run(cluster.job(SPEC))
    assert _told(events) == [entries(SPEC)]
    assert token_ids(events) == WHOLE
    assert [spec.prompt_logprobs for spec in cluster.prefill[1].prefills] == [True]
    assert [spec.prompt_logprobs for spec in cluster.prefill[0].prefills] == [True]


@pytest.mark.parametrize("disaggregate", ["always", "never"])
async def test_an_attempt_after_the_prompt_was_told_is_not_asked_again(disaggregate: str) -> None:
    """So it may use the cache; the client gets the entries once, and every token."""
    async with scripted_cluster(num_decode=1, disaggregate=disaggregate) as cluster:
        cluster.decode[0].decode_scripts.append(decode_that(3, failed(KvLostError("gone"))))
        events = await cluster.run(cluster.job(SPEC))
        asked = [spec.prompt_logprobs for spec, _ in cluster.decode[0].submits]
    assert _told(events) == [entries(SPEC), ()]
    assert token_ids(events) == WHOLE
    assert asked == [True, False]


async def test_a_local_prompt_lost_midway_is_told_anew() -> None:
    """The decode worker breaks after some entries; the next attempt gives all of them, once."""
    async with scripted_cluster(disaggregate="never") as cluster:
        some = decode_pb2.SequenceEvent(prompt_scored=scored(SPEC, 1, 9))
        cluster.decode[0].decode_scripts.append(
            decode_that(0, decode_started(), some, failed(KvLostError("gone")))
        )
        events = await cluster.run(cluster.job(SPEC))
    assert _told(events) == [entries(SPEC)]
    assert token_ids(events) == WHOLE


@pytest.mark.parametrize(
    "script",
    [
        prefill_that(started, _result),
        prefill_that(started, _some, _result),
        prefill_that(started, _some, _behind_a_gap, _result),
        prefill_that(started, _some, _some, _result),
    ],
    ids=["none", "some", "gap", "twice"],
)
async def test_a_worker_that_leaves_entries_out_is_not_believed(script: object) -> None:
    """A prompt with missing or repeated entries never reaches the client; the attempt fails, and the next one is whole."""
    async with scripted_cluster() as cluster:
        cluster.prefill[0].prefill_scripts.append(script)  # type: ignore[arg-type] # a script
        cluster.decode[0].decode_scripts.append(decode_that())
        events = await cluster.run(cluster.job(SPEC))
    assert _told(events) == [entries(SPEC)]
    assert token_ids(events) == WHOLE


async def test_a_decode_worker_that_leaves_entries_out_is_not_believed() -> None:
    """The same on the local path, where the first token says that the prompt is done; and attempts are bounded."""
    bad = decode_that(0, decode_started(), tokens(0, WHOLE[:1]))
    async with scripted_cluster(disaggregate="never") as cluster:
        cluster.decode[0].decode_scripts.extend([bad] * cluster.config.max_attempts)
        with pytest.raises(PeerLostError, match="prompt token 1 on"):
            await cluster.run(cluster.job(SPEC))


async def test_cached_blocks_do_not_make_a_prompt_short() -> None:
    """It is computed whole, and so handed over, though decode holds nearly all of it; one that is not told stays there."""
    plain = make_spec("plain", SPEC.prompt_ids, max_tokens=6)
    async with scripted_cluster(disaggregate="auto", handover_tokens=0) as cluster:
        hashes = hash_full_blocks(chain_root(FINGERPRINT.digest(), ""), SPEC.prompt_ids, BLOCK_SIZE)
        key = WorkerKey(WorkerId("decode-0"), BootEpoch(1))
        await cluster.index.publish(
            key, [PrefixEntry(h, hashes[0], BlockId(n)) for n, h in enumerate(hashes)]
        )
        await cluster.run(cluster.job(plain))
        assert cluster.prefill[0].prefills == []
        events = await cluster.run(cluster.job(SPEC))
        assert len(cluster.prefill[0].prefills) == 1
    assert _told(events) == [entries(SPEC)]
