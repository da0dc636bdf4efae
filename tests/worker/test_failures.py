"""What a worker refuses, or gives up: counted by its reason, and one line of the log."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from decode_service.session import DecodeSession
from paceline.core.request import Priority, SequenceSpec
from paceline.engine.events import Event
from paceline.engine.sequence import SequenceRole
from paceline.runtime.channels import Channels
from paceline.runtime.wire_internal import spec_to_proto
from paceline.v1 import prefill_pb2
from paceline.v1.prefill_pb2_grpc import PrefillServiceStub
from paceline.worker.worker import Worker
from tests.decode_service.pair import submit_message
from tests.factories import BLOCK_SIZE, make_spec, make_ticket
from tests.worker.bench import DECODE, NUM_BLOCKS, PREFILL, serving_worker, until

TOO_LONG = make_spec("too long", (1,) * 200)


def num_failed(worker: Worker) -> dict[str, float]:
    """How many sequences have failed here so far, by reason; those that none has are left out."""
    (family,) = [
        each for each in worker.metrics.registry.collect() if each.name == "paceline_sequences_failed"
    ]
    counts = {s.labels["reason"]: s.value for s in family.samples if s.name.endswith("_total")}
    return {reason: count for reason, count in counts.items() if count}


def lines(logs: list[Any]) -> list[tuple[str, str, int, str]]:
    """Those of failures."""
    return [
        (line["log_level"], line["request_id"], line["attempt"], line["reason"])
        for line in logs
        if line["event"] == "sequence_failed"
    ]


@pytest.fixture
async def decode(tiny_tokenizer_dir: Path) -> AsyncIterator[Worker]:
    """A decode worker whose patience with BATCH requests is short."""
    async with serving_worker(tiny_tokenizer_dir, "decode-0", DECODE, overload_wait_s=0.001) as worker:
        yield worker


@pytest.fixture
async def session(decode: Worker) -> AsyncIterator[DecodeSession]:
    """A router's stream with it."""
    session = DecodeSession(decode)
    yield session
    await session.aclose()


async def _prefill(worker: Worker, spec: SequenceSpec) -> None:
    """A call that fails."""
    context, sequence = spec_to_proto(spec)
    channels = Channels()
    call = PrefillServiceStub(channels.get(worker.address)).Prefill(
        prefill_pb2.PrefillRequest(context=context, sequence=sequence)
    )
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    await channels.aclose()


async def test_a_prefill_worker_counts_what_it_refuses(tiny_tokenizer_dir: Path) -> None:
    """Each call that does not end well, by its own reason; one that does is no failure."""
    async with serving_worker(tiny_tokenizer_dir, "prefill-0", PREFILL) as worker:
        with capture_logs() as logs:
            await _prefill(worker, TOO_LONG)
            await _prefill(worker, make_spec("late", time_budget_s=0.0))
            worker.draining.set()
            await _prefill(worker, make_spec("one more", attempt=2))
            await _prefill(worker, make_spec("and another"))
        assert num_failed(worker) == {"INVARIANT": 1, "DEADLINE_EXCEEDED": 1, "DRAINING": 2}
    assert lines(logs) == [
        ("info", "too long", 0, "INVARIANT"),
        ("info", "late", 0, "DEADLINE_EXCEEDED"),
        ("info", "one more", 2, "DRAINING"),
        ("info", "and another", 0, "DRAINING"),
    ]


async def test_a_decode_worker_counts_what_it_refuses(decode: Worker, session: DecodeSession) -> None:
    """At the door, in the queue, or in a hand-over."""
    with capture_logs() as logs:
        session.submit(submit_message(TOO_LONG))
        other = make_spec("other model")
        session.submit(submit_message(other, make_ticket()))
        await until(lambda: other.sequence_id not in session._live)
        decode.draining.set()
        session.submit(submit_message(make_spec("one more", attempt=1)))
    assert lines(logs) == [
        ("info", "too long", 0, "INVARIANT"),
        ("info", "other model", 0, "FINGERPRINT_MISMATCH"),
        ("info", "one more", 1, "DRAINING"),
    ]
    assert num_failed(decode) == {"INVARIANT": 1, "FINGERPRINT_MISMATCH": 1, "DRAINING": 1}


async def test_a_full_queue_is_counted_and_told(decode: Worker, session: DecodeSession) -> None:
    """Urgent requests wait for room for too long: a BATCH request is refused, and nobody else is."""
    events: list[Event] = []
    holder = make_spec("holder", (9,) * (NUM_BLOCKS * BLOCK_SIZE - 8))
    decode.engine.submit(holder, SequenceRole.AWAIT_KV, events.extend)
    await until(lambda: bool(events))
    with capture_logs() as logs:
        session.submit(submit_message(make_spec("urgent", (1,) * 40)))
        session.submit(submit_message(make_spec("batch", priority=Priority.BATCH)))
        await until(lambda: bool(lines(logs)))
    assert lines(logs) == [("info", "batch", 0, "QUEUE_FULL")]
    assert num_failed(decode) == {"QUEUE_FULL": 1}
    decode.engine.release(holder.sequence_id)
