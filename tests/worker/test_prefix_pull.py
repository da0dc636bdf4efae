"""Blocks that one worker has cached are pulled by another one that computes a prompt, in both directions between the tiers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvtransfer.borrower import PrefixBorrower
from kvtransfer.receiver import HandOverTimes, KVReceiver
from kvtransfer.transports.faulty import Fault, FaultKind, FaultyTransport
from kvtransfer.transports.grpc import GrpcTransport
from paceline.core.prefix import PrefixHint, PrefixOwner
from paceline.core.request import BootEpoch, SamplingParams
from paceline.runtime.wire_internal import ticket_from_proto
from paceline.worker.worker import Worker
from tests.decode_service.pair import Pair, kinds_of, open_pair, token_ids_of
from tests.factories import BLOCK_SIZE, make_spec
from tests.worker.bench import output_of, until

# Six full blocks of prompt and output are computed; the last token's KV is never made.
FIRST = make_spec("first", tuple(range(20, 37)), max_tokens=11, ignore_eos=True)
# What a chat sends next: all that was said so far, and something new.
SECOND = make_spec("second", (*FIRST.prompt_ids, *output_of(FIRST), 1, 2, 3), max_tokens=5, ignore_eos=True)


@pytest.fixture
async def pair(tiny_tokenizer_dir: Path) -> AsyncIterator[Pair]:
    """Both tiers."""
    async with open_pair(tiny_tokenizer_dir) as pair:
        yield pair


def hint_of(worker: Worker, num_tokens: int) -> PrefixHint:
    """What a router says of a worker."""
    return PrefixHint(PrefixOwner(worker.key.worker_id, worker.address, worker.key.boot_epoch), num_tokens)


async def first_turn(pair: Pair) -> None:
    """Both tiers have the prompt, and decode has what was generated too."""
    pair.submit(FIRST, await pair.ticket(FIRST))
    await pair.until_end(FIRST)
    await pair.require_empty()


async def test_the_prefill_worker_pulls_what_decode_has_generated(pair: Pair) -> None:
    """The next turn computes what is new and at most a block that was not full; decode gets only what it does not have."""
    await first_turn(pair)
    started = await pair.started(SECOND, hint_of(pair.decode, 24))
    assert (started.cached_tokens, started.num_pulled_blocks) == (24, 2)
    assert started.num_pulled_bytes == 2 * pair.prefill.loaded.layout.block_bytes
    num_before = pair.decode.num_blocks_pulled
    pair.submit(SECOND, ticket_from_proto(started.ticket))
    events = (await pair.until_end(SECOND))[SECOND.sequence_id]
    assert token_ids_of(events) == output_of(SECOND)[1:]
    assert pair.decode.num_blocks_pulled - num_before == -(-len(SECOND.prompt_ids) // BLOCK_SIZE) - 6
    await pair.require_empty()


async def test_a_decode_worker_that_computes_a_prompt_pulls_what_prefill_has(pair: Pair) -> None:
    """Without a ticket, with a hint: only the rest is computed, and the tokens are the oracle's."""
    ticket = await pair.ticket(FIRST)
    pair.prefill.leases.release([ticket.lease_id])
    pair.submit(FIRST, hint=hint_of(pair.prefill, 16))
    events = (await pair.until_end(FIRST))[FIRST.sequence_id]
    assert kinds_of(events)[0] == "started"
    assert (events[0].started.cached_tokens, events[0].started.num_pulled_blocks) == (16, 4)
    assert token_ids_of(events) == output_of(FIRST)
    await pair.require_empty()


async def test_a_hint_may_promise_too_much(pair: Pair) -> None:
    """The owner has two blocks of the six that it was said to have: two come, and the rest is computed."""
    short = make_spec("short", FIRST.prompt_ids[:9], max_tokens=1)
    pair.submit(short)
    await pair.until_end(short)
    started = await pair.started(SECOND, hint_of(pair.decode, 24))
    assert (started.cached_tokens, started.num_pulled_blocks) == (8, 2)
    pair.prefill.leases.release([ticket_from_proto(started.ticket).lease_id])
    await pair.require_empty()


@pytest.mark.parametrize("what", ["nobody", "another life", "another scope", "itself"])
async def test_a_hint_that_is_wrong_costs_no_token(pair: Pair, what: str) -> None:
    """An address where nobody is, an earlier boot epoch, blocks of another cache scope, the worker itself: all is computed."""
    await first_turn(pair)
    spec, hint = SECOND, hint_of(pair.decode, 24)
    if what == "nobody":
        hint = PrefixHint(hint.owner._replace(address="127.0.0.1:1"), 24)
    elif what == "another life":
        hint = PrefixHint(hint.owner._replace(boot_epoch=BootEpoch(hint.owner.boot_epoch ^ 1)), 24)
    elif what == "itself":
        hint = hint_of(pair.prefill, 24)
    else:
        spec = make_spec("second", SECOND.prompt_ids, max_tokens=5, ignore_eos=True, cache_scope="other")
    started = await pair.started(spec, hint)
    assert started.num_pulled_blocks == 0
    assert started.cached_tokens == (0 if what == "another scope" else 16)
    pair.submit(spec, ticket_from_proto(started.ticket))
    events = (await pair.until_end(spec))[spec.sequence_id]
    assert token_ids_of(events) == output_of(spec)[1:]
    await pair.require_empty()


@pytest.mark.parametrize(
    "kind", [FaultKind.CORRUPT, FaultKind.STALL, FaultKind.CUT, FaultKind.LOSE_RELEASE_ANSWER]
)
async def test_a_pull_that_fails_is_a_miss(pair: Pair, kind: FaultKind) -> None:
    """Nothing of it is used: what the worker had itself is, and the rest is computed."""
    fingerprint = pair.prefill.loaded.fingerprint
    transport = FaultyTransport(GrpcTransport(pair.channels, fingerprint), [Fault(kind, 1)])
    times = HandOverTimes(stall_timeout_s=0.05, max_stalls=1)
    receiver = KVReceiver(transport, pair.prefill.loaded.runner.memory, fingerprint, times)
    pair.prefill.borrower = PrefixBorrower(pair.channels, receiver, fingerprint)
    await first_turn(pair)
    started = await pair.started(SECOND, hint_of(pair.decode, 24))
    assert (started.cached_tokens, started.num_pulled_blocks) == (16, 0)
    pair.submit(SECOND, ticket_from_proto(started.ticket))
    events = (await pair.until_end(SECOND))[SECOND.sequence_id]
    assert token_ids_of(events) == output_of(SECOND)[1:]
    await pair.require_empty()


@pytest.mark.parametrize("num_candidates", [1, 3])
async def test_a_router_that_leaves_while_its_prefill_pulls_leaves_nothing(
    pair: Pair, num_candidates: int
) -> None:
    """The owner is busy and has not answered: the prefill worker's blocks come back, and later the owner's."""
    await first_turn(pair)
    pair.prefill.borrower._ask_timeout_s = 600.0
    candidates = tuple(range(num_candidates))
    spec = make_spec(
        "second", SECOND.prompt_ids, max_tokens=5, sampling=SamplingParams(seed=1), candidates=candidates
    )
    async with busy_decode(pair):
        call = pair.call_prefill(spec, hint_of(pair.decode, 24))
        await until(lambda: pair.decode.engine.num_sequences == 2)
        call.cancel()
        await until(lambda: pair.prefill.engine.num_sequences == 0)
    await pair.require_empty()


async def test_an_owner_that_does_not_answer_in_time_is_a_miss(pair: Pair) -> None:
    """What this worker has not got itself is computed; no lease lasts that the owner grants too late."""
    await first_turn(pair)
    pair.prefill.borrower._ask_timeout_s = 0.05
    async with busy_decode(pair):
        started = await pair.started(SECOND, hint_of(pair.decode, 24))
        assert (started.cached_tokens, started.num_pulled_blocks) == (16, 0)
    pair.prefill.leases.release([ticket_from_proto(started.ticket).lease_id])
    await pair.require_empty()


@pytest.mark.parametrize("cancelled", [0, 1])
async def test_a_candidate_that_is_cancelled_while_its_prompt_is_pulled_takes_nothing_from_the_other(
    pair: Pair, cancelled: int
) -> None:
    """They are one sequence until their prompt is there: it goes on for the one that is left."""
    ticket = await pair.ticket(FIRST)
    pair.prefill.leases.release([ticket.lease_id])
    pair.decode.borrower._ask_timeout_s = 600.0
    spec = make_spec(
        "first",
        FIRST.prompt_ids,
        max_tokens=6,
        ignore_eos=True,
        sampling=SamplingParams(seed=1),
        candidates=(0, 1),
    )
    pair.prefill_gate.close()
    busy = asyncio.create_task(pair.ticket(make_spec("busy", (5, 6, 7))))
    await pair.prefill_gate.until_arrived()
    pair.submit(spec, hint=hint_of(pair.prefill, 16))
    await until(lambda: pair.prefill.engine.num_sequences == 2)
    pair.cancel(spec, cancelled)
    pair.prefill_gate.open()
    pair.prefill.leases.release([(await busy).lease_id])
    tokens = await pair.until_ends(spec, 1 - cancelled)
    assert tokens == {1 - cancelled: output_of(spec, 1 - cancelled)}
    assert pair.decode.num_blocks_pulled == 4
    await pair.require_empty()


@asynccontextmanager
async def busy_decode(pair: Pair) -> AsyncIterator[None]:
    """The decode worker is in the middle of a step, which ends in the end."""
    busy = make_spec("busy", (5, 6, 7), max_tokens=2, ignore_eos=True)
    pair.decode_gate.close()
    pair.submit(busy)
    await pair.decode_gate.until_arrived()
    yield
    pair.decode_gate.open()
    await pair.until_end(busy)
