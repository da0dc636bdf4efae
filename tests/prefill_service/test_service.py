"""PrefillService on a whole worker, over gRPC."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from kvtransfer.chunks import LeaseState
from paceline.core.errors import PacelineError
from paceline.core.request import FinishReason, FirstToken, LeaseId, SamplingParams, SequenceSpec
from paceline.engine.fake import FakeModelRunner, fake_prompt_logprobs
from paceline.runtime.channels import Channels
from paceline.runtime.grpc_status import error_from_rpc
from paceline.runtime.wire_internal import (
    first_token_from_proto,
    logprob_from_proto,
    spec_to_proto,
    ticket_from_proto,
)
from paceline.v1 import prefill_pb2
from paceline.v1.prefill_pb2_grpc import PrefillServiceStub
from paceline.worker.worker import Worker
from tests.engine.runners import BrokenRunner, GatedRunner
from tests.factories import BLOCK_SIZE, make_spec
from tests.worker.bench import (
    NUM_BLOCKS,
    PREFILL,
    VOCAB_SIZE,
    output_of,
    require_empty,
    serving_worker,
    until,
)

SPEC = make_spec(prompt_ids=tuple(range(20, 38)))  # 4 full blocks and a half
Call = grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]


@pytest.fixture
def runner() -> GatedRunner:
    """The fake runner behind a gate, which is open."""
    return GatedRunner(FakeModelRunner(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE))


@pytest.fixture
async def worker(tiny_tokenizer_dir: Path, runner: GatedRunner) -> AsyncIterator[Worker]:
    """A prefill worker."""
    async with serving_worker(tiny_tokenizer_dir, "prefill-0", PREFILL, runner=runner) as worker:
        yield worker


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    """Channels, closed in the end."""
    channels = Channels()
    yield channels
    await channels.aclose()


def _prefill(channels: Channels, worker: Worker, spec: SequenceSpec) -> "Call":
    context, sequence = spec_to_proto(spec)
    stub = PrefillServiceStub(channels.get(worker.address))
    call: Call = stub.Prefill(prefill_pb2.PrefillRequest(context=context, sequence=sequence))
    return call


async def _all(call: "Call") -> list[prefill_pb2.PrefillResponse]:
    async with asyncio.timeout(20):
        return [response async for response in call]


def _release(worker: Worker, responses: list[prefill_pb2.PrefillResponse]) -> list[LeaseState]:
    """What a receiver does when it has the blocks."""
    return worker.leases.release([LeaseId(responses[0].started.ticket.lease_id)])


async def _refusal(channels: Channels, worker: Worker, spec: SequenceSpec) -> PacelineError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _all(_prefill(channels, worker, spec))

    return error_from_rpc(caught.value, "prefill-0")


async def test_a_prompt_gives_ticket_progress_and_first_token(worker: Worker, channels: Channels) -> None:
    """In this order; the ticket names every block, and each chunk is told but the last, whose news is the result."""
    responses = await _all(_prefill(channels, worker, SPEC))
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds == ["started", "progress", "progress", "result"]
    ticket = ticket_from_proto(responses[0].started.ticket)
    assert (ticket.num_blocks, len(ticket.block_hashes)) == (5, 4)
    assert (ticket.owner_id, ticket.boot_epoch) == worker.key
    assert (ticket.owner_address, ticket.fingerprint) == (worker.address, worker.loaded.fingerprint)
    assert [r.progress.computed_tokens for r in responses[1:3]] == [8, 16]
    first = first_token_from_proto(responses[-1].result.first_tokens[0])
    assert first == FirstToken(output_of(SPEC)[0])


async def test_log_probabilities_of_the_prompt_come_chunk_by_chunk(
    worker: Worker, channels: Channels
) -> None:
    """All before the result: one for each token but the first, although the whole prompt is in the cache."""
    _release(worker, await _all(_prefill(channels, worker, SPEC)))
    asking = make_spec("asking", SPEC.prompt_ids, num_top_logprobs=2, prompt_logprobs=True)
    responses = await _all(_prefill(channels, worker, asking))
    told = [response.prompt_scored for response in responses if response.HasField("prompt_scored")]
    entries = [logprob_from_proto(entry) for message in told for entry in message.logprobs]
    assert [message.first_index for message in told] == [1, 9, 17]
    assert entries == list(fake_prompt_logprobs(SPEC.prompt_ids, 2, VOCAB_SIZE))
    assert responses[0].started.cached_tokens == 0
    assert responses[-1].WhichOneof("event") == "result"


async def test_blocks_are_held_until_the_lease_is_released(worker: Worker, channels: Channels) -> None:
    """The call is over and the receiver has its time; with the release everything is free, but still cached."""
    responses = await _all(_prefill(channels, worker, SPEC))
    assert worker.leases.stats().num_active == 1
    assert _release(worker, responses) == [LeaseState.VALID]
    await require_empty(worker)
    again = await _all(_prefill(channels, worker, make_spec("again", SPEC.prompt_ids)))
    assert again[0].started.cached_tokens == 16
    assert again[-1].result == responses[-1].result
    _release(worker, again)
    await require_empty(worker)


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_a_first_token_that_ends_the_output_says_so(
    worker: Worker, channels: Channels, max_tokens: int
) -> None:
    """The limit counts from the first token."""
    responses = await _all(_prefill(channels, worker, make_spec(max_tokens=max_tokens)))
    first = first_token_from_proto(responses[-1].result.first_tokens[0])
    assert first.finish_reason is (FinishReason.LENGTH if max_tokens == 1 else None)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
async def test_a_router_that_leaves_early_gives_everything_back(
    worker: Worker, channels: Channels, runner: GatedRunner, num_steps: int
) -> None:
    """Before the first chunk, after it, in the middle: no lease and no block is left, and the next prompt is served."""
    runner.close()
    call = _prefill(channels, worker, SPEC)
    events = aiter(call)
    for _ in range(num_steps):
        await runner.until_arrived()
        runner.let_one_pass()
        while (await anext(events)).WhichOneof("event") != "progress":
            pass
    await runner.until_arrived()
    call.cancel()
    # Its last step stays at the gate until then: a result that comes first is kept for its reader, as it should be.
    await until(lambda: worker.is_idle)
    runner.open()
    await require_empty(worker)
    assert (await _all(_prefill(channels, worker, make_spec("next"))))[-1].result.first_tokens[0].token_id


async def test_a_repeated_call_does_not_harm_the_first(
    worker: Worker, channels: Channels, runner: GatedRunner
) -> None:
    """The same attempt twice: the second call is refused, and the first gets its token and keeps its blocks."""
    runner.close()
    first = asyncio.create_task(_all(_prefill(channels, worker, SPEC)))
    await runner.until_arrived()
    assert (await _refusal(channels, worker, SPEC)).reason == "INVARIANT"
    runner.open()
    responses = await first
    assert responses[-1].result.first_tokens[0].token_id == output_of(SPEC)[0]
    assert worker.leases.stats().num_active == 1
    assert (await _refusal(channels, worker, SPEC)).reason == "INVARIANT"
    assert _release(worker, responses) == [LeaseState.VALID]
    await require_empty(worker)


async def test_what_cannot_be_served_is_refused(worker: Worker, channels: Channels) -> None:
    """Too long, an unknown token, a worker that drains: each with its reason, and nothing is left."""
    too_long = make_spec(prompt_ids=(1,) * (NUM_BLOCKS * BLOCK_SIZE))
    assert (await _refusal(channels, worker, too_long)).reason == "INVARIANT"
    assert (await _refusal(channels, worker, make_spec(prompt_ids=(VOCAB_SIZE,)))).reason == "INVARIANT"
    await require_empty(worker)
    worker.draining.set()
    assert (await _refusal(channels, worker, SPEC)).reason == "DRAINING"


async def test_a_deadline_that_passes_names_the_phase(worker: Worker, channels: Channels) -> None:
    """A budget that is used up already is not computed on: DEADLINE_EXCEEDED, queued."""
    late = await _refusal(channels, worker, make_spec(time_budget_s=0.0))
    assert late.facts() == {"phase": "queued"}
    await require_empty(worker)


async def test_a_deadline_in_the_middle_gives_everything_back(
    worker: Worker, channels: Channels, runner: GatedRunner
) -> None:
    """Some chunks are computed, and the ticket is out: the call fails in phase prefill, lease and blocks are gone."""
    runner.close()
    spec = make_spec(prompt_ids=SPEC.prompt_ids, time_budget_s=0.3)
    failing = asyncio.create_task(_refusal(channels, worker, spec))
    await runner.until_arrived()
    await asyncio.sleep(0.3)  # the one wait that has no event: a worker's clock is the real one
    runner.open()
    assert (await failing).facts() == {"phase": "prefill"}
    await require_empty(worker)


async def test_a_failed_engine_fails_the_call_and_is_told(
    tiny_tokenizer_dir: Path, channels: Channels
) -> None:
    """ENGINE_FAILED for the caller, and the process hears that it cannot go on."""
    broken = BrokenRunner(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE)
    async with serving_worker(tiny_tokenizer_dir, "prefill-0", PREFILL, runner=broken) as worker:
        assert (await _refusal(channels, worker, make_spec(prompt_ids=(13,)))).reason == "ENGINE_FAILED"
        assert worker.failed.is_set()
        assert (await _refusal(channels, worker, make_spec("later"))).reason == "ENGINE_FAILED"


async def test_a_sequence_of_another_attempt_is_another_sequence(worker: Worker, channels: Channels) -> None:
    """Both get their own lease."""
    responses = [await _all(_prefill(channels, worker, make_spec(attempt=n))) for n in range(2)]
    leases = {r[0].started.ticket.lease_id for r in responses}
    assert len(leases) == 2
    assert responses[0][-1].result == responses[1][-1].result


async def test_a_family_has_one_ticket_and_a_first_token_for_each_candidate(
    worker: Worker, channels: Channels
) -> None:
    """The prompt is computed once and lies under one lease, whose reader gets the same tokens."""
    sampling = SamplingParams(seed=3)
    spec = make_spec("family", SPEC.prompt_ids, sampling=sampling, num_top_logprobs=0, candidates=(0, 1, 4))
    responses = await _all(_prefill(channels, worker, spec))
    assert [r.progress.computed_tokens for r in responses[1:-1]] == [8, 16]
    first_tokens = [first_token_from_proto(first) for first in responses[-1].result.first_tokens]
    assert [(first.candidate, first.token_id) for first in first_tokens] == [
        (candidate, output_of(spec, candidate)[0]) for candidate in (0, 1, 4)
    ]
    assert all(first.logprob is not None for first in first_tokens)
    assert worker.leases.stats().num_active == 1
    lease = worker.leases.get(LeaseId(responses[0].started.ticket.lease_id))
    assert lease.first_tokens == tuple(first_tokens)
    assert _release(worker, responses) == [LeaseState.VALID]
    await require_empty(worker)
