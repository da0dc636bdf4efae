"""A Decode stream's sequences on a whole decode worker, with a real prefill worker to hand over from."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import grpc
import pytest

from paceline.core.request import BootEpoch, SamplingParams, TokenLogprob
from paceline.engine.events import Event, PromptScored, Reserved
from paceline.engine.fake import fake_prompt_logprobs
from paceline.engine.sequence import SequenceRole
from paceline.runtime.wire_internal import (
    logprob_from_proto,
    spec_to_proto,
    ticket_from_proto,
)
from paceline.v1 import decode_pb2, prefill_pb2
from paceline.v1.decode_pb2_grpc import DecodeServiceStub
from paceline.v1.prefill_pb2_grpc import PrefillServiceStub
from tests.decode_service.pair import SPEC, Pair, is_end, kinds_of, submit_message, token_ids_of
from tests.factories import BLOCK_SIZE, make_fingerprint, make_spec
from tests.worker.bench import (
    NUM_BLOCKS,
    VOCAB_SIZE,
    output_of,
    require_empty,
    until,
)

# -- when all goes well


async def test_a_handed_over_sequence_goes_on_after_the_first_token(pair: Pair) -> None:
    """The blocks are pulled, the lease is given back, and the tokens after the first one follow."""
    pair.submit(SPEC, await pair.ticket())
    (events,) = (await pair.until_end(SPEC)).values()
    assert kinds_of(events) == ["kv_received", *["tokens"] * 7]
    assert token_ids_of(events) == output_of(SPEC)[1:]
    assert events[1].tokens.first_index == 1
    received = events[0].kv_received
    assert (received.num_blocks, received.num_bytes) == (5, 5 * BLOCK_SIZE * 8)
    assert pair.decode.num_blocks_pulled == 5
    await pair.require_empty()


async def test_blocks_that_are_here_do_not_travel_again(pair: Pair) -> None:
    """The second hand-over of a prefix pulls only what is not cached, and gives the same tokens."""
    for name, num_pulled in (("first", 5), ("second", 1)):
        spec = make_spec(name, SPEC.prompt_ids)
        pair.submit(spec, await pair.ticket(spec))
        (events,) = (await pair.until_end(spec)).values()
        assert events[0].kv_received.num_blocks == num_pulled
        assert token_ids_of(events) == output_of(SPEC)[1:]
    await pair.require_empty()


async def test_blocks_are_pulled_while_later_ones_are_computed(pair: Pair) -> None:
    """The submit comes with the start of the prefill; the hand-over ends with it."""
    pair.prefill_gate.close()
    context, sequence = spec_to_proto(SPEC)
    stub = PrefillServiceStub(pair.channels.get(pair.prefill.address))
    responses = aiter(stub.Prefill(prefill_pb2.PrefillRequest(context=context, sequence=sequence)))
    await pair.prefill_gate.until_arrived()
    pair.prefill_gate.let_one_pass()
    pair.submit(SPEC, ticket_from_proto((await anext(responses)).started.ticket))
    await pair.prefill_gate.until_arrived()
    pair.prefill_gate.open()
    (events,) = (await pair.until_end(SPEC)).values()
    assert token_ids_of(events) == output_of(SPEC)[1:]
    assert [r.WhichOneof("event") async for r in responses][-1] == "result"
    await pair.require_empty()


async def test_a_sequence_without_a_ticket_is_computed_here(pair: Pair) -> None:
    """It starts, how far it is after each chunk but the last one, and every token is said."""
    pair.submit(SPEC)
    (events,) = (await pair.until_end(SPEC)).values()
    assert kinds_of(events) == ["started", *["progress"] * 2, *["tokens"] * 8]
    assert [event.progress.computed_tokens for event in events[1:3]] == [8, 16]
    assert token_ids_of(events) == output_of(SPEC)
    await pair.require_empty()


async def test_a_prompt_computed_here_is_told_here_and_one_handed_over_is_not(pair: Pair) -> None:
    """Its log probabilities come between the start and the first token, one for each prompt token but the first."""
    here = make_spec("here", SPEC.prompt_ids, num_top_logprobs=1, prompt_logprobs=True)
    moved = make_spec("moved", SPEC.prompt_ids, num_top_logprobs=1, prompt_logprobs=True)
    pair.submit(here)
    pair.submit(moved, await pair.ticket(moved))
    events = await pair.until_end(here, moved)
    local = events[here.sequence_id]
    told = [event.prompt_scored for event in local if event.HasField("prompt_scored")]
    assert len(told) == 3
    assert kinds_of(local) == [
        "started",
        *["progress", "prompt_scored"] * 2,
        "prompt_scored",
        *["tokens"] * 8,
    ]
    entries = [logprob_from_proto(entry) for message in told for entry in message.logprobs]
    assert entries == list(fake_prompt_logprobs(SPEC.prompt_ids, 1, VOCAB_SIZE))
    assert kinds_of(events[moved.sequence_id]) == ["kv_received", *["tokens"] * 7]


async def test_a_message_stays_below_its_limit_however_slowly_the_router_reads(pair: Pair) -> None:
    """The log probabilities of many chunks wait: they come in several messages, none over 4 MiB, and in order."""
    top = tuple((rank, -1.0) for rank in range(20))
    events = [
        PromptScored(SPEC.sequence_id, place, (TokenLogprob(7, -1.0, top),) * 2000) for place in range(15)
    ]
    pair.session._take(events)
    pair.session._take([PromptScored(SPEC.sequence_id, 15, (TokenLogprob(7, -1.0, top),) * 15_000)])
    sizes: list[int] = []
    places: list[int] = []
    while len(places) < 16:
        taken = await pair.session.take_events()
        sizes.append(decode_pb2.DecodeResponse(events=taken).ByteSize())
        places += [event.prompt_scored.first_index for event in taken]
    assert places == list(range(16))
    assert max(sizes) < 4 << 20
    assert len(sizes) < 16, "small ones travel together"


async def test_a_first_token_that_ends_the_output_is_not_said_again(pair: Pair) -> None:
    """The KV arrives, nothing is emitted, and everything is free."""
    spec = make_spec(prompt_ids=SPEC.prompt_ids, max_tokens=1)
    pair.submit(spec, await pair.ticket(spec))
    assert kinds_of(await pair.session.take_events()) == ["kv_received"]
    await pair.require_empty()
    other = make_spec("other", (5, 6))
    pair.submit(other)
    assert set(await pair.until_end(other)) == {other.sequence_id}


async def test_many_sequences_of_both_kinds_do_not_mix(pair: Pair) -> None:
    """Handed over or computed here, each has its own tokens."""
    specs = [make_spec(f"r{n}", tuple(range(n, n + 9))) for n in range(8)]
    for n, spec in enumerate(specs):
        pair.submit(spec, await pair.ticket(spec) if n % 2 else None)
    events = await pair.until_end(*specs)
    for n, spec in enumerate(specs):
        assert token_ids_of(events[spec.sequence_id]) == output_of(spec)[n % 2 :]
    await pair.require_empty()


# -- refusals and failures


def _failure(events: Sequence[decode_pb2.SequenceEvent]) -> tuple[str, dict[str, str]]:
    (event,) = events
    return event.failed.reason, dict(event.failed.facts)


async def test_what_cannot_be_taken_fails_with_its_reason(pair: Pair) -> None:
    """Too long, or a worker that drains; the stream goes on."""
    too_long = make_spec("long", (1,) * (NUM_BLOCKS * BLOCK_SIZE))
    pair.submit(too_long)
    assert _failure((await pair.until_end(too_long))[too_long.sequence_id])[0] == "INVARIANT"
    pair.submit(SPEC)
    assert token_ids_of((await pair.until_end(SPEC))[SPEC.sequence_id]) == output_of(SPEC)
    pair.decode.draining.set()
    late = make_spec("late")
    pair.submit(late)
    assert _failure((await pair.until_end(late))[late.sequence_id])[0] == "DRAINING"
    await pair.require_empty()


async def test_a_lost_lease_fails_the_sequence_and_frees_it(pair: Pair) -> None:
    """The owner has released it, or has another life: KV_LOST, and the reserved blocks come back."""
    ticket = await pair.ticket()
    other_life = replace(ticket, boot_epoch=BootEpoch(ticket.boot_epoch ^ 1))
    pair.submit(SPEC, other_life)
    assert _failure((await pair.until_end(SPEC))[SPEC.sequence_id])[0] == "KV_LOST"
    await require_empty(pair.decode)
    pair.prefill.leases.release([ticket.lease_id])
    again = make_spec(attempt=1, prompt_ids=SPEC.prompt_ids)
    pair.submit(again, ticket)
    assert _failure((await pair.until_end(again))[again.sequence_id])[0] == "KV_LOST"
    await pair.require_empty()


async def test_an_owner_that_is_not_there_fails_the_sequence(pair: Pair) -> None:
    """Nobody listens at the ticket's address."""
    ticket = replace(await pair.ticket(), owner_address="127.0.0.1:1")
    pair.submit(SPEC, ticket)
    reason, _ = _failure((await pair.until_end(SPEC))[SPEC.sequence_id])
    assert reason in {"KV_LOST", "PEER_LOST"}
    pair.prefill.leases.release([ticket.lease_id])
    await pair.require_empty()


async def test_another_fingerprint_is_refused_by_name(pair: Pair) -> None:
    """The facts say which field differs."""
    ticket = replace(await pair.ticket(), fingerprint=make_fingerprint())
    pair.submit(SPEC, ticket)
    reason, facts = _failure((await pair.until_end(SPEC))[SPEC.sequence_id])
    assert (reason, facts["field"]) == ("FINGERPRINT_MISMATCH", "weights")
    await pair.require_empty()


async def test_a_deadline_before_the_reservation_names_the_transfer(pair: Pair) -> None:
    """Its budget is used up while it waits for blocks; the lease goes back to its owner too."""
    spec = make_spec(prompt_ids=SPEC.prompt_ids, time_budget_s=0.0)
    pair.submit(spec, await pair.ticket(SPEC))
    assert _failure((await pair.until_end(spec))[spec.sequence_id]) == (
        "DEADLINE_EXCEEDED",
        {"phase": "transfer"},
    )
    await pair.require_empty()


async def test_a_deadline_during_the_pull_ends_it(pair: Pair) -> None:
    """The blocks do not come in time: the failure names the transfer, and both sides have everything back."""
    pair.prefill_gate.close()
    context, sequence = spec_to_proto(SPEC)
    stub = PrefillServiceStub(pair.channels.get(pair.prefill.address))
    call = stub.Prefill(prefill_pb2.PrefillRequest(context=context, sequence=sequence))
    responses = aiter(call)
    await pair.prefill_gate.until_arrived()
    pair.prefill_gate.let_one_pass()
    late = replace(SPEC, time_budget_s=0.3)
    pair.submit(late, ticket_from_proto((await anext(responses)).started.ticket))
    assert _failure((await pair.until_end(late))[late.sequence_id]) == (
        "DEADLINE_EXCEEDED",
        {"phase": "transfer"},
    )
    call.cancel()
    # Its last step stays at the gate until then: a result that comes first is kept for its reader, as it should be.
    await until(lambda: pair.prefill.is_idle)
    pair.prefill_gate.open()
    await pair.require_empty()


async def test_a_repeated_submit_is_ignored(pair: Pair) -> None:
    """One sequence, and its tokens once."""
    ticket = await pair.ticket()
    for _ in range(2):
        pair.submit(SPEC, ticket)
    (events,) = (await pair.until_end(SPEC)).values()
    assert kinds_of(events) == ["kv_received", *["tokens"] * 7]
    assert not [task for task in asyncio.all_tasks() if "_hand_over" in repr(task.get_coro())]
    await pair.require_empty()


# -- the client leaves


async def _fill_pool(pair: Pair) -> None:
    """Takes so many blocks of the decode worker that no prompt fits any more."""
    events: list[Event] = []
    spec = make_spec("holder", (9,) * (NUM_BLOCKS * BLOCK_SIZE - 8))
    pair.decode.engine.submit(spec, SequenceRole.AWAIT_KV, events.extend)
    await until(lambda: bool(events))
    assert isinstance(events[0], Reserved)


async def test_a_cancel_before_the_hand_over_begins_leaves_nothing(pair: Pair) -> None:
    """Submit and cancel in one breath: no task and no block is left, and the lease is given back by the router."""
    ticket = await pair.ticket()
    pair.submit(SPEC, ticket)
    pair.cancel(SPEC)
    pair.prefill.leases.release([ticket.lease_id])
    await pair.require_empty()
    assert pair.session._hand_overs == {}


async def test_a_cancel_while_waiting_for_blocks_gives_the_lease_back(pair: Pair) -> None:
    """It has no block yet; the owner hears that nobody will come."""
    await _fill_pool(pair)
    pair.submit(SPEC, await pair.ticket())
    await asyncio.sleep(0)
    pair.cancel(SPEC)
    await until(lambda: pair.prefill.is_idle)
    pair.decode.engine.release(make_spec("holder").sequence_id)
    await pair.require_empty()


async def test_a_cancel_in_the_moment_of_the_reservation_harms_no_neighbour(pair: Pair) -> None:
    """The reservation comes for a hand-over that is ending, in one step with another sequence's token: that arrives."""
    ticket, neighbour = await pair.ticket(), make_spec("neighbour", (3, 4))
    pair.decode_gate.close()
    pair.submit(neighbour)
    await pair.decode_gate.until_arrived()
    pair.submit(SPEC, ticket)
    # The hand-over asks for blocks while the step is under way; they are reserved in the next one.
    await until(lambda: SPEC.sequence_id in pair.session._reservations)
    pair.decode_gate.let_one_pass()
    await pair.decode_gate.until_arrived()
    pair.decode_gate.open()
    _cancel_as_the_news_arrives(pair)
    events = await pair.until_end(neighbour)
    assert token_ids_of(events[neighbour.sequence_id]) == output_of(neighbour)
    await pair.require_empty()


def _cancel_as_the_news_arrives(pair: Pair) -> None:
    """Waits, without letting the loop run, until the step's news are queued on it; then cancels before they are read."""
    thread = pair.decode.engine._thread
    while pair.decode_gate.num_steps < 2 and thread.is_alive():
        pass
    pair.cancel(SPEC)


async def test_a_cancel_during_the_pull_frees_both_sides(pair: Pair) -> None:
    """The prefill is still computing; decode stops writing before its blocks are free."""
    pair.prefill_gate.close()
    context, sequence = spec_to_proto(SPEC)
    stub = PrefillServiceStub(pair.channels.get(pair.prefill.address))
    call = stub.Prefill(prefill_pb2.PrefillRequest(context=context, sequence=sequence))
    responses = aiter(call)
    await pair.prefill_gate.until_arrived()
    pair.prefill_gate.let_one_pass()
    pair.submit(SPEC, ticket_from_proto((await anext(responses)).started.ticket))
    await until(lambda: pair.decode.engine.stats.num_free_blocks < NUM_BLOCKS)
    pair.cancel(SPEC)
    call.cancel()
    # Its last step stays at the gate until then: a result that comes first is kept for its reader, as it should be.
    await until(lambda: pair.prefill.is_idle)
    pair.prefill_gate.open()
    await pair.require_empty()


@pytest.mark.parametrize("has_ticket", [False, True])
async def test_a_cancel_while_decoding_frees_everything(pair: Pair, has_ticket: bool) -> None:
    """After some tokens; the others of the stream go on."""
    spec = make_spec(prompt_ids=SPEC.prompt_ids, max_tokens=60)
    pair.submit(spec, await pair.ticket(spec) if has_ticket else None)
    while "tokens" not in kinds_of(await pair.session.take_events()):
        pass
    pair.cancel(spec)
    other = make_spec("other", (5, 6))
    pair.submit(other)
    events: list[decode_pb2.SequenceEvent] = []
    while not events or not is_end(events[-1]):
        events += [e for e in await pair.session.take_events() if e.request_id == "other"]
    assert token_ids_of(events) == output_of(other)
    await pair.require_empty()


async def test_cancelling_the_unknown_is_harmless(pair: Pair) -> None:
    """An unknown id, one that has ended, another attempt: nothing happens to the others."""
    pair.submit(SPEC)
    pair.cancel(make_spec("unknown"))
    pair.cancel(make_spec(attempt=1))
    (events,) = (await pair.until_end(SPEC)).values()
    pair.cancel(SPEC)
    assert token_ids_of(events) == output_of(SPEC)
    await pair.require_empty()


async def test_a_session_that_closes_gives_everything_up(pair: Pair) -> None:
    """Parked, computing, decoding and waiting: after the close nothing is held anywhere."""
    specs = [make_spec(f"r{n}", tuple(range(n, n + 9)), max_tokens=40) for n in range(6)]
    for n, spec in enumerate(specs):
        pair.submit(spec, await pair.ticket(spec) if n % 2 else None)
    await pair.session.take_events()
    await asyncio.sleep(0)  # the last hand-over begins, and so holds its lease
    await pair.session.aclose()
    await pair.require_empty()
    assert not (pair.session._hand_overs or pair.session._reservations or pair.session._live)


# -- the stream


@pytest.mark.parametrize("how", ["half-close", "cancel"])
async def test_a_stream_that_ends_gives_up_what_it_brought(pair: Pair, how: str) -> None:
    """Whether the router closes it in order or is gone."""
    stub = DecodeServiceStub(pair.channels.get(pair.decode.address))
    call = stub.Decode()
    # Only the first step passes: the sequence cannot come to its own end.
    pair.decode_gate.close()
    await call.write(decode_pb2.DecodeRequest(submit=submit_message(SPEC)))
    await pair.decode_gate.until_arrived()
    pair.decode_gate.let_one_pass()
    response = await call.read()
    assert isinstance(response, decode_pb2.DecodeResponse)
    assert response.events
    if how == "cancel":
        call.cancel()
    else:
        await call.done_writing()
        async with asyncio.timeout(20):
            while await call.read() is not grpc.aio.EOF:
                pass
    await until(lambda: pair.decode.engine.num_sequences == 0)
    pair.decode_gate.open()
    await pair.require_empty()


async def test_a_stream_carries_submits_and_cancels(pair: Pair) -> None:
    """A sequence that is cancelled says nothing more; another one comes to its end."""
    stub = DecodeServiceStub(pair.channels.get(pair.decode.address))
    call = stub.Decode()
    given_up = make_spec("given up", SPEC.prompt_ids, max_tokens=60)
    await call.write(decode_pb2.DecodeRequest(submit=submit_message(given_up)))
    await call.write(decode_pb2.DecodeRequest(cancel=decode_pb2.Cancel(request_id="given up")))
    await call.write(decode_pb2.DecodeRequest(submit=submit_message(SPEC)))
    events: list[decode_pb2.SequenceEvent] = []
    async with asyncio.timeout(20):
        while not events or not is_end(events[-1]):
            response = await call.read()
            assert isinstance(response, decode_pb2.DecodeResponse)
            events += [event for event in response.events if event.request_id == "request"]
    assert token_ids_of(events) == output_of(SPEC)
    call.cancel()
    await pair.require_empty()


# -- several candidates

FAMILY = make_spec(
    "family", SPEC.prompt_ids, sampling=SamplingParams(seed=3), max_tokens=20, candidates=(0, 1, 2)
)
OUTPUTS = {candidate: output_of(FAMILY, candidate) for candidate in FAMILY.candidates}


@pytest.mark.parametrize("with_ticket", [True, False])
async def test_one_submit_brings_the_tokens_of_every_candidate(pair: Pair, *, with_ticket: bool) -> None:
    """By one hand-over of the prompt's blocks, or computed here: each candidate's output is its own."""
    pair.submit(FAMILY, await pair.ticket(FAMILY) if with_ticket else None)
    tokens = await pair.until_ends(FAMILY, 0, 1, 2)
    assert tokens == {candidate: output[with_ticket:] for candidate, output in OUTPUTS.items()}
    assert pair.decode.num_blocks_pulled == (5 if with_ticket else 0)
    await pair.require_empty()


async def test_a_cancelled_candidate_leaves_the_others(pair: Pair) -> None:
    """In the middle of its output: its blocks are freed, it says nothing more, and the others end as they would have."""
    pair.decode_gate.close()
    pair.submit(FAMILY, await pair.ticket(FAMILY))
    await pair.decode_gate.until_arrived()
    pair.cancel(FAMILY, 1)
    pair.cancel(FAMILY, 9)
    pair.decode_gate.open()
    tokens = await pair.until_ends(FAMILY, 0, 2)
    assert tokens == {candidate: OUTPUTS[candidate][1:] for candidate in (0, 2)}
    await pair.require_empty()


async def test_a_candidate_cancelled_during_the_hand_over_never_begins(pair: Pair) -> None:
    """The blocks go on arriving for the others; with the last one the hand-over itself is given up."""
    for name, cancelled in (("some", (0, 2)), ("all", (0, 1, 2))):
        spec = make_spec(
            name, (9, *SPEC.prompt_ids), sampling=FAMILY.sampling, max_tokens=20, candidates=(0, 1, 2)
        )
        pair.prefill_gate.close()
        context, sequence = spec_to_proto(spec)
        stub = PrefillServiceStub(pair.channels.get(pair.prefill.address))
        call = stub.Prefill(prefill_pb2.PrefillRequest(context=context, sequence=sequence))
        await pair.prefill_gate.until_arrived()
        pair.prefill_gate.let_one_pass()
        response = await call.read()
        assert isinstance(response, prefill_pb2.PrefillResponse)
        pair.submit(spec, ticket_from_proto(response.started.ticket))
        await until(lambda: pair.decode.engine.num_sequences == 1)
        for candidate in cancelled:
            pair.cancel(spec, candidate)
        pair.prefill_gate.open()
        if name == "some":
            tokens = await pair.until_ends(spec, 1)
            assert tokens == {1: output_of(spec, 1)[1:]}
        else:
            await until(lambda: pair.decode.engine.num_sequences == 0)
        call.cancel()
        await pair.require_empty()


async def test_first_tokens_that_end_their_candidates_are_the_last_word_on_them(pair: Pair) -> None:
    """With max_tokens 1 the hand-over is all there is, and nothing is held after it."""
    spec = make_spec("short", SPEC.prompt_ids, max_tokens=1, candidates=(0, 1))
    pair.submit(spec, await pair.ticket(spec))
    events = await pair.session.take_events()
    assert kinds_of(events) == ["kv_received"]
    await pair.require_empty()
