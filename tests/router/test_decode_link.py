"""The one stream between a router and a decode worker."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from paceline.core.errors import (
    DeadlineError,
    FingerprintMismatchError,
    InvariantError,
    KvChecksumError,
    KvLostError,
    PacelineError,
    PeerLostError,
    SlowConsumerError,
)
from paceline.core.request import SequenceSpec
from paceline.runtime.channels import Channels
from paceline.v1 import decode_pb2, generation_pb2
from router.decode_handle import DecodeHandle
from router.decode_link import DecodeLink
from router.pace import Pace
from tests.factories import make_id, make_spec, make_ticket
from tests.router.cluster import DECODE
from tests.router.scripted_workers import (
    BreakStreamError,
    ScriptedWorker,
    decode_started,
    decode_that,
    failed,
    kv_received,
    oracle,
    tokens,
)

SPEC = make_spec(max_tokens=5)
WHOLE = oracle(SPEC)


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    """A decode worker."""
    worker = ScriptedWorker("decode-0", DECODE)
    await worker.start()
    yield worker
    await worker.stop()


@pytest.fixture
async def link(worker: ScriptedWorker) -> AsyncIterator[DecodeLink]:
    """A running link to it, with room for 8 unread events."""
    channels = Channels()
    link = DecodeLink(channels.get(worker.address), "decode-0", max_buffered=8)
    running = asyncio.create_task(link.run())
    yield link
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await channels.aclose()


async def _read(handle: DecodeHandle) -> list[decode_pb2.SequenceEvent]:
    """Every event up to the end."""
    events: list[decode_pb2.SequenceEvent] = []
    async with asyncio.timeout(10):
        async for event in handle:
            events.append(event)
            if event.tokens.finish_reason:
                break
    return events


def _token_ids(events: list[decode_pb2.SequenceEvent]) -> tuple[int, ...]:
    return tuple(token_id for event in events for token_id in event.tokens.token_ids)


async def test_a_sequence_without_a_ticket_is_computed_there(
    worker: ScriptedWorker, link: DecodeLink
) -> None:
    """The events come in order; there was no hand-over, and nothing is left when it ends."""
    handle = link.submit(SPEC, None)
    events = await _read(handle)
    assert [event.WhichOneof("event") for event in events] == ["started", *["tokens"] * 5]
    assert _token_ids(events) == WHOLE
    assert not handle.has_kv
    assert link.num_sequences == 0
    assert worker.submits == [(SPEC, False)]


async def test_a_sequence_with_a_ticket_says_when_the_kv_is_there(
    worker: ScriptedWorker, link: DecodeLink
) -> None:
    """From then on the lease is not the router's any more."""
    handle = link.submit(SPEC, make_ticket())
    had_kv = handle.has_kv
    assert _token_ids(await _read(handle)) == WHOLE[1:]
    assert (had_kv, handle.has_kv) == (False, True)
    assert worker.submits == [(SPEC, True)]


async def test_sequences_on_one_stream_do_not_mix(link: DecodeLink) -> None:
    """Each handle has its own sequence's events, and attempts are told apart."""
    specs = [make_spec(f"r{n}", (n,), max_tokens=5) for n in range(5)]
    specs.append(make_spec("r0", (9,), attempt=1, max_tokens=5))
    handles = [link.submit(spec, None) for spec in specs]
    assert link.num_sequences == 6
    outputs = await asyncio.gather(*map(_read, handles))
    assert [_token_ids(events) for events in outputs] == [oracle(spec) for spec in specs]


async def test_closing_a_handle_cancels_once_and_an_ended_one_never(
    worker: ScriptedWorker, link: DecodeLink
) -> None:
    """One cancel for the attempt that was given up, however often; none for the one that had ended by itself."""
    ended = link.submit(make_spec("ended", max_tokens=2), None)
    await _read(ended)
    worker.decode_scripts.append(decode_that())
    given_up = link.submit(make_spec("given up"), None)
    for _ in range(2):
        ended.close()
        given_up.close()
    await worker.until(lambda: worker.cancels != [])
    after = link.submit(make_spec("after", max_tokens=2), None)
    await _read(after)
    assert worker.cancels == [("given up", 0)]
    assert link.num_sequences == 0


@pytest.mark.parametrize(
    "error",
    [
        KvLostError("gone"),
        KvChecksumError(3),
        DeadlineError("transfer"),
        FingerprintMismatchError("dtype", "float32", "bfloat16"),
        InvariantError("a bug"),
        PeerLostError("gone"),
    ],
    ids=lambda error: error.reason,
)
async def test_a_failure_arrives_as_itself(
    worker: ScriptedWorker, link: DecodeLink, error: PacelineError
) -> None:
    """With its facts; nothing is left of the sequence, and the others go on."""
    worker.decode_scripts.append(decode_that(0, failed(error)))
    handle = link.submit(SPEC, make_ticket())
    with pytest.raises(type(error)) as caught:
        await _read(handle)
    assert caught.value.facts() == error.facts()
    assert link.num_sequences == 0
    assert _token_ids(await _read(link.submit(make_spec("other", max_tokens=5), None))) == WHOLE


async def test_a_broken_stream_fails_every_sequence_on_it(worker: ScriptedWorker, link: DecodeLink) -> None:
    """All of them are lost at once, read or not, and the peer is named."""
    worker.decode_scripts += [decode_that(2)] * 3
    handles = [link.submit(make_spec(f"r{n}"), None) for n in range(3)]
    await worker.until(lambda: len(worker.submits) == 3)
    await anext(handles[0])
    worker.break_decode_streams()
    for handle in handles:
        with pytest.raises(PeerLostError, match="decode-0"):
            await _read(handle)
    assert link.num_sequences == 0


async def test_a_stream_that_has_ended_takes_nothing(worker: ScriptedWorker, link: DecodeLink) -> None:
    """A sequence that comes too late hears so at once: nobody would ever answer it."""
    was_open = link.is_open
    worker.decode_scripts.append(decode_that(1))
    handle = link.submit(SPEC, None)
    await anext(handle)
    await worker.stop()
    with pytest.raises(PeerLostError):
        await _read(handle)
    assert (was_open, link.is_open) == (True, False)
    with pytest.raises(PeerLostError):
        link.submit(make_spec("late"), None)
    handle.close()


async def test_a_link_that_is_given_up_fails_its_sequences(worker: ScriptedWorker) -> None:
    """When the router stops following a worker, those who wait for it hear of it."""
    channels = Channels()
    link = DecodeLink(channels.get(worker.address), "decode-0", max_buffered=8)
    running = asyncio.create_task(link.run())
    worker.decode_scripts.append(decode_that())
    handle = link.submit(SPEC, None)
    await worker.until(lambda: worker.submits != [])
    running.cancel()
    with pytest.raises(PeerLostError):
        await _read(handle)
    assert not link.is_open
    await channels.aclose()


async def test_a_reader_who_is_too_far_behind_loses_the_sequence(
    worker: ScriptedWorker, link: DecodeLink
) -> None:
    """At the bound it is still served, past it it is not; the worker hears a cancel, and memory is given back."""
    fits = [tokens(n, (WHOLE[n],), ends=n == 4) for n in range(5)]
    worker.decode_scripts.append(decode_that(0, decode_started(), decode_started(), kv_received(), *fits))
    at_bound = link.submit(make_spec("at bound", max_tokens=5), None)
    flood = [tokens(n, (n,)) for n in range(100)]
    worker.decode_scripts.append(decode_that(0, *flood))
    too_slow = link.submit(make_spec("too slow", max_tokens=200), None)
    await worker.until(lambda: worker.cancels == [("too slow", 0)])
    with pytest.raises(SlowConsumerError):
        await _read(too_slow)
    assert _token_ids(await _read(at_bound)) == WHOLE
    assert link.num_sequences == 0


async def test_what_arrived_before_a_failure_is_not_read_after_it(
    worker: ScriptedWorker, link: DecodeLink
) -> None:
    """The next attempt computes it again, so reading it could say it twice."""
    worker.decode_scripts.append(decode_that(3, failed(KvLostError("gone"))))
    handle = link.submit(SPEC, None)
    await worker.until(lambda: worker.submits != [])
    other = link.submit(make_spec("other", max_tokens=2), None)
    await _read(other)  # on the same stream, and so behind the failure
    with pytest.raises(KvLostError):
        await anext(handle)


async def test_events_of_the_unknown_are_dropped(worker: ScriptedWorker, link: DecodeLink) -> None:
    """What comes for a sequence that was given up reaches nobody, a later sequence of the same request neither."""
    worker.decode_scripts.append(decode_that(0, *[tokens(0, (7,))] * 3))
    link.submit(SPEC, None).close()
    again: SequenceSpec = make_spec(attempt=1, max_tokens=5)
    assert _token_ids(await _read(link.submit(again, None))) == WHOLE
    assert SPEC.sequence_id == make_id()


async def test_one_candidate_is_cancelled_once_and_the_others_go_on(
    worker: ScriptedWorker, link: DecodeLink
) -> None:
    """What is not kept is given up at the worker; what has ended by itself is not, and the last end is the handle's."""
    spec = make_spec("family", max_tokens=3, candidates=(0, 1, 2))
    handle = link.submit(spec, None)
    ends = 0
    async with asyncio.timeout(10):
        async for event in handle:
            ends += bool(event.tokens.finish_reason)
            if event.tokens.first_index == 1:
                handle.keep({0, 2})
                handle.keep({0, 2})
            if ends == 3:
                break
    await worker.until(lambda: bool(worker.cancelled_candidates))
    handle.keep(set())
    assert link.num_sequences == 0
    handle.close()
    await _read(link.submit(SPEC, None))
    assert (worker.cancelled_candidates, worker.cancels) == ([(0, 1)], [])


async def test_a_family_has_room_for_the_unread_events_of_each_candidate(link: DecodeLink) -> None:
    """Eight unread events a candidate are no reason to lose them, though together they are many more."""
    spec = make_spec("family", max_tokens=6, candidates=(0, 1, 2))
    handle = link.submit(spec, None)
    while link.num_sequences:  # noqa: ASYNC110 - the link has no event for it
        await asyncio.sleep(0)
    # All tokens of one candidate have waited together, and come together.
    _, *events = [await anext(handle) for _ in range(1 + 3)]
    for event in events:
        assert tuple(event.tokens.token_ids) == oracle(spec, event.tokens.candidate)
        assert event.tokens.finish_reason


async def test_tokens_that_wait_together_come_as_one_event(worker: ScriptedWorker, link: DecodeLink) -> None:
    """With the log probability of each, and what was said last: preemptions, and the end."""
    logprobs = [generation_pb2.TokenLogprob(token_id=token_id, logprob=-1.0) for token_id in WHOLE]
    said = [
        decode_pb2.SequenceEvent(
            tokens=decode_pb2.SequenceTokens(
                first_index=index,
                token_ids=[token_id],
                logprobs=[logprobs[index]],
                num_preemptions=index,
                finish_reason=generation_pb2.FINISH_REASON_LENGTH if index == 4 else None,
            )
        )
        for index, token_id in enumerate(WHOLE)
    ]
    worker.decode_scripts.append(decode_that(0, decode_started(), *said))
    handle = link.submit(SPEC, None)
    while link.num_sequences:  # noqa: ASYNC110 - the link has no event for it
        await asyncio.sleep(0)
    _, event = [await anext(handle) for _ in range(2)]
    assert event.tokens == decode_pb2.SequenceTokens(
        token_ids=WHOLE,
        logprobs=logprobs,
        num_preemptions=4,
        finish_reason=generation_pb2.FINISH_REASON_LENGTH,
    )


async def test_what_does_not_follow_is_not_joined(worker: ScriptedWorker, link: DecodeLink) -> None:
    """A repeated token, and one after a gap, stay as they are: whoever counts them sees it."""
    worker.decode_scripts.append(
        decode_that(0, tokens(0, (7,)), tokens(0, (7,)), tokens(3, (9,)), tokens(4, (8,), ends=True))
    )
    handle = link.submit(SPEC, None)
    while link.num_sequences:  # noqa: ASYNC110 - the link has no event for it
        await asyncio.sleep(0)
    events = [await anext(handle) for _ in range(3)]
    assert [(event.tokens.first_index, list(event.tokens.token_ids)) for event in events] == [
        (0, [7]),
        (0, [7]),
        (3, [9, 8]),
    ]


async def test_under_pressure_tokens_wait_for_each_other_but_not_the_first_nor_the_last(
    worker: ScriptedWorker,
) -> None:
    """However long the pace is: the first token comes at once, and with the end come all that waited."""
    channels = Channels()
    pace = Pace(3600.0, lambda: 1)
    link = DecodeLink(channels.get(worker.address), "decode-0", max_buffered=100, pace=pace)
    running = asyncio.create_task(link.run())
    try:
        handle = link.submit(make_spec("paced", max_tokens=50), None)
        events = await _read(handle)
        assert _token_ids(events) == oracle(make_spec("paced", max_tokens=50))
        # What had come with the first token is with it, and what comes after waits for the end.
        assert [event.WhichOneof("event") for event in events] == ["started", "tokens", "tokens"]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await channels.aclose()


async def test_a_loss_is_not_waited_for(worker: ScriptedWorker) -> None:
    """Whoever waits for more tokens hears at once that none will come."""
    channels = Channels()
    link = DecodeLink(
        channels.get(worker.address), "decode-0", max_buffered=100, pace=Pace(3600.0, lambda: 1)
    )
    running = asyncio.create_task(link.run())
    try:
        worker.decode_scripts.append(decode_that(2, then=BreakStreamError()))
        handle = link.submit(make_spec("paced", max_tokens=50), None)
        with pytest.raises(PeerLostError):
            await _read(handle)
    finally:
        await asyncio.gather(running, return_exceptions=True)
        await channels.aclose()


async def test_a_first_token_goes_before_those_that_only_go_on() -> None:
    """Of one step's tokens: to send all the others takes a while, and who waits for a first one has waited longest."""
    channels = Channels()
    link = DecodeLink(channels.get("127.0.0.1:1"), "decode-0", max_buffered=8)
    specs = [make_spec(f"r{number}", max_tokens=9) for number in range(4)]
    # The third one had its first token from where its prompt was computed.
    handles = [link.submit(spec, make_ticket() if number == 2 else None) for number, spec in enumerate(specs)]
    order = list[int]()

    async def read(number: int) -> None:
        """Notes when tokens come."""
        async for event in handles[number]:
            order.extend(number for _ in event.tokens.token_ids)

    reading = [asyncio.create_task(read(number)) for number in range(4)]
    # Of the fourth one a step has begun the prompt; that is no token.
    begun = decode_pb2.SequenceEvent(request_id="r3", started=decode_pb2.SequenceStarted())
    link._take(decode_pb2.DecodeResponse(events=[begun]))
    for step in ([0, 1], [0, 1, 2, 3]):
        link._take(
            decode_pb2.DecodeResponse(
                events=[
                    decode_pb2.SequenceEvent(
                        request_id=f"r{number}", tokens=decode_pb2.SequenceTokens(token_ids=[7])
                    )
                    for number in step
                ]
            )
        )
        for _ in range(9):
            await asyncio.sleep(0)
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    await channels.aclose()
    assert order == [0, 1, 3, 0, 1, 2]


async def test_nothing_of_a_step_comes_behind_a_sequence_s_end() -> None:
    """Neither of one that goes on nor of a new one, whatever its worker says."""
    channels = Channels()
    link = DecodeLink(channels.get("127.0.0.1:1"), "decode-0", max_buffered=8)
    handles = [link.submit(make_spec("r0", max_tokens=9), make_ticket()), link.submit(make_spec("r1"))]
    said = [
        decode_pb2.SequenceTokens(token_ids=[7], finish_reason=generation_pb2.FINISH_REASON_LENGTH),
        decode_pb2.SequenceTokens(first_index=1, token_ids=[8]),
    ]
    link._take(
        decode_pb2.DecodeResponse(
            events=[
                decode_pb2.SequenceEvent(request_id=request_id, tokens=tokens)
                for tokens in said
                for request_id in ("r0", "r1")
            ]
        )
    )
    assert [(await anext(handle)).tokens.token_ids for handle in handles] == [[7], [7]]
    await channels.aclose()
