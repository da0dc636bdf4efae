"""Workers that say what cannot be: the request goes on elsewhere, and the worker is followed as before."""

import pytest

from paceline.core.request import SequenceSpec
from paceline.runtime.wire_internal import ticket_to_proto
from paceline.v1 import decode_pb2, prefill_pb2
from router.job import Placed
from tests.factories import make_spec
from tests.router.cluster import scripted_cluster, token_ids
from tests.router.scripted_workers import (
    DecodeScript,
    PrefillScript,
    ScriptedWorker,
    decode_that,
    oracle,
    prefill_that,
    result,
    started,
    ticket_of,
)

SPEC = make_spec("r", tuple(range(1, 21)), max_tokens=6)


def _foreign_first_token(worker: ScriptedWorker, spec: SequenceSpec) -> prefill_pb2.PrefillResponse:
    """Of a candidate that nobody asked for."""
    said = result(spec)
    said.result.first_tokens[0].candidate = 7
    return said


def _foreign_ticket(worker: ScriptedWorker, spec: SequenceSpec) -> prefill_pb2.PrefillResponse:
    """Of another model than the worker has said it serves."""
    ticket = ticket_to_proto(ticket_of(worker, spec))
    ticket.fingerprint.weights = "others"
    return prefill_pb2.PrefillResponse(started=prefill_pb2.PrefillStarted(ticket=ticket))


def _result(worker: ScriptedWorker, spec: SequenceSpec) -> prefill_pb2.PrefillResponse:
    said = result(spec)
    said.result.first_tokens[0].token_id = 999
    return said


@pytest.mark.parametrize(
    "lie",
    [prefill_that(started, _foreign_first_token), prefill_that(_foreign_ticket, _result)],
    ids=["candidate", "fingerprint"],
)
async def test_what_a_prefill_cannot_have_computed_is_shown_to_nobody(lie: PrefillScript) -> None:
    """The attempt is lost, and the next one gives every token."""
    async with scripted_cluster() as cluster:
        cluster.prefill[0].prefill_scripts.append(lie)
        events = await cluster.run(cluster.job(SPEC))
    assert token_ids(events) == oracle(SPEC)
    assert [(e.attempt, e.reason) for e in events if isinstance(e, Placed)] == [(0, ""), (1, "PEER_LOST")]


def _failure(reason: str, **facts: str) -> decode_pb2.SequenceEvent:
    return decode_pb2.SequenceEvent(
        failed=decode_pb2.SequenceFailed(reason=reason, message="broken", facts=facts)
    )


@pytest.mark.parametrize(
    "lie",
    [
        decode_that(0, _failure("KV_CHECKSUM", ordinal="none")),
        decode_that(0, _failure("QUEUE_FULL", retry_after_s="soon")),
        decode_that(0, _failure("")),
    ],
    ids=["ordinal", "delay", "nothing"],
)
async def test_a_failure_that_makes_no_sense_is_a_loss_and_its_worker_is_found_again(
    lie: DecodeScript,
) -> None:
    """Nobody stops looking where it is."""
    async with scripted_cluster() as cluster:
        cluster.decode[0].decode_scripts.append(lie)
        events = await cluster.run(cluster.job(SPEC))
        await cluster.until_seen(*cluster.workers)
    assert token_ids(events) == oracle(SPEC)
