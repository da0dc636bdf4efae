"""The sequences of one Decode stream: submitted, received or computed here, generated, cancelled."""

import asyncio
import time
from collections.abc import Sequence

from decode_service.recalls import Recalls
from paceline.core.errors import DeadlineError, PacelineError
from paceline.core.request import RequestId, SequenceId, SequenceSpec
from paceline.core.ticket import KvTicket
from paceline.engine.events import Event, Failed, NewTokens, PromptScored, Recall, Reserved, Started
from paceline.engine.sequence import SequenceRole
from paceline.runtime.grpc_status import as_paceline_error
from paceline.runtime.log import get_logger
from paceline.runtime.wire_internal import (
    finish_reason_to_proto,
    logprob_to_proto,
    prompt_scored_to_proto,
    spec_from_proto,
    ticket_from_proto,
)
from paceline.v1 import decode_pb2, engine_pb2
from paceline.worker.worker import Worker

# A step gives few events a sequence, so only a router that reads slowly gets so many. Bytes are counted too: the log
# probabilities of a chunk alone may take megabytes, and a message ends at 4 MiB.
_MAX_EVENTS = 1000
_MAX_BYTES = 1 << 20

log = get_logger()


class DecodeSession:
    """Whatever it took is given back: when it ends by itself, is cancelled, fails, or when the stream breaks."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        # The candidates of each sequence that have not ended.
        self._live: dict[SequenceId, set[int]] = {}
        self._reservations: dict[SequenceId, asyncio.Future[Reserved]] = {}
        self._hand_overs: dict[SequenceId, asyncio.Task[None]] = {}
        self._recalls = Recalls(worker)
        self._outbox: list[decode_pb2.SequenceEvent] = []
        self._ended = False
        self._wake = asyncio.Event()

    # -- what the router sends

    def submit(self, message: decode_pb2.Submit) -> None:
        """Takes a sequence; a refusal comes as its SequenceFailed. A repeated message is ignored."""
        sequence_id = SequenceId(RequestId(message.context.request_id), message.context.attempt)
        if sequence_id in self._live:
            return
        try:
            spec = spec_from_proto(message.context, message.sequence)
            self._worker.require_room_for(spec)
        except PacelineError as error:
            self._send_failed(sequence_id, error)
            return
        self._live[sequence_id] = set(spec.candidates)
        if message.HasField("ticket"):
            hand_over = asyncio.create_task(self._hand_over(spec, ticket_from_proto(message.ticket)))
            self._hand_overs[sequence_id] = hand_over
            # Not in the task itself: cancelled before it begins, it would never get there.
            hand_over.add_done_callback(lambda _: self._hand_overs.pop(sequence_id, None))
        else:
            self._worker.engine.submit(spec, SequenceRole.GENERATE, self._take)

    def cancel(self, message: decode_pb2.Cancel) -> None:
        """Gives one attempt up, or one candidate of it."""
        sequence_id = SequenceId(RequestId(message.request_id), message.attempt)
        if not message.HasField("candidate"):
            self._give_up(sequence_id)
        elif message.candidate in self._live.get(sequence_id, ()):
            self._give_up_candidate(sequence_id, message.candidate)

    def end(self) -> None:
        """Nothing more will come from the router."""
        self._ended = True
        self._wake.set()

    # -- what goes back

    async def take_events(self) -> list[decode_pb2.SequenceEvent]:
        """The next events, at least one, as many as one message may hold; none once the stream has ended."""
        while not self._outbox and not self._ended:
            self._wake.clear()
            await self._wake.wait()
        num_events = _num_that_fit(self._outbox)
        events, self._outbox = self._outbox[:num_events], self._outbox[num_events:]
        return events

    async def aclose(self) -> None:
        """Gives up every sequence; returns when no hand-over and no recall writes any more."""
        hand_overs = list(self._hand_overs.values())
        for sequence_id in list(self._live):
            self._give_up(sequence_id)
        await asyncio.gather(*hand_overs, return_exceptions=True)
        await self._recalls.aclose()

    # -- hand-over

    async def _hand_over(self, spec: SequenceSpec, ticket: KvTicket) -> None:
        """Reserves blocks, has them filled, commits; the sequence is released here if any of that fails.

        It is released only after the receiver has returned: until then the receiver may write to its blocks.
        """
        sequence_id = spec.sequence_id
        deadline_s = _deadline_s(spec)
        try:
            async with asyncio.timeout_at(deadline_s), self._worker.receiver.hold(ticket) as hand_over:
                reserved = await self._reserve(spec)
                started_s = time.monotonic()
                received = await hand_over.receive(reserved.block_ids, reserved.num_held)
        except asyncio.CancelledError:
            self._worker.engine.release(sequence_id)
            raise
        except TimeoutError:
            self._worker.engine.release(sequence_id)
            self._fail_hand_over(sequence_id, DeadlineError("transfer"))
            return
        except Exception as error:  # noqa: BLE001 - whatever it was, the router must hear of it
            self._worker.engine.release(sequence_id)
            self._fail_hand_over(sequence_id, error)
            return
        finally:
            self._reservations.pop(sequence_id, None)
        self._worker.num_blocks_pulled += received.num_blocks
        self._send(
            sequence_id,
            kv_received=decode_pb2.KvReceived(
                num_blocks=received.num_blocks,
                num_bytes=received.num_bytes,
                duration_s=time.monotonic() - started_s,
            ),
        )
        # Those that have been cancelled meanwhile do not begin.
        live = self._live.get(sequence_id, set())
        first_tokens = [first for first in received.first_tokens if first.candidate in live]
        for first in first_tokens:
            if first.finish_reason is not None:
                self._note_end(sequence_id, first.candidate)
        if sequence_id in self._live:
            self._recalls.remember(spec, ticket, deadline_s)
        self._worker.engine.commit(sequence_id, first_tokens)

    async def _reserve(self, spec: SequenceSpec) -> Reserved:
        reservation: asyncio.Future[Reserved] = asyncio.get_running_loop().create_future()
        self._reservations[spec.sequence_id] = reservation
        self._worker.engine.submit(spec, SequenceRole.AWAIT_KV, self._take)
        return await reservation

    def _fail_hand_over(self, sequence_id: SequenceId, error: Exception) -> None:
        self._live.pop(sequence_id, None)
        if not isinstance(error, PacelineError):
            log.error("hand_over_failed", request_id=sequence_id.request_id, exc_info=error)
        self._send_failed(sequence_id, as_paceline_error(error))

    def _give_up(self, sequence_id: SequenceId) -> None:
        live = self._live.pop(sequence_id, set())
        self._recalls.forget(sequence_id)
        hand_over = self._receiving(sequence_id)
        if hand_over is not None:
            hand_over.cancel()
            return
        recalled = {candidate for candidate in live if self._recalls.give_up(sequence_id, candidate)}
        if not recalled:
            self._worker.engine.release(sequence_id)
            return
        # Those whose blocks are being filled follow when nobody writes to them any more.
        for candidate in live - recalled:
            self._worker.engine.release_candidate(sequence_id, candidate)

    def _give_up_candidate(self, sequence_id: SequenceId, candidate: int) -> None:
        if self._live[sequence_id] == {candidate}:
            self._give_up(sequence_id)
            return
        self._note_end(sequence_id, candidate)
        # Blocks that are still being filled are the others' too; the commit leaves the candidate out.
        if self._receiving(sequence_id) is None and not self._recalls.give_up(sequence_id, candidate):
            self._worker.engine.release_candidate(sequence_id, candidate)

    def _receiving(self, sequence_id: SequenceId) -> asyncio.Task[None] | None:
        hand_over = self._hand_overs.get(sequence_id)
        return None if hand_over is None or hand_over.done() else hand_over

    def _note_end(self, sequence_id: SequenceId, candidate: int) -> None:
        live = self._live.get(sequence_id, set())
        live.discard(candidate)
        if not live:
            self._live.pop(sequence_id, None)
            self._recalls.forget(sequence_id)

    # -- what the engine says

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            self._take_one(event)

    def _take_one(self, event: Event) -> None:
        match event:
            case Reserved():
                self._take_reservation(event)
            case Recall():
                self._recalls.begin(event)
            case Started():
                started = decode_pb2.SequenceStarted(
                    cached_tokens=event.num_cached_tokens, queued_s=event.queued_s
                )
                self._send(event.sequence_id, started=started)
            case PromptScored():
                scored = prompt_scored_to_proto(event.first_index, event.logprobs)
                self._send(event.sequence_id, prompt_scored=scored)
            case NewTokens():
                if event.finish_reason is not None:
                    self._note_end(event.sequence_id, event.candidate)
                self._send(event.sequence_id, tokens=_tokens(event))
            case Failed():
                self._take_failure(event)
            case _:
                raise AssertionError(f"a decode worker never gives {type(event).__name__}")

    def _take_reservation(self, event: Reserved) -> None:
        reservation = self._reservations.get(event.sequence_id)
        # A hand-over that is being cancelled waits for it no more, and releases the blocks itself.
        if reservation is not None and not reservation.done():
            reservation.set_result(event)

    def _take_failure(self, event: Failed) -> None:
        reservation = self._reservations.get(event.sequence_id)
        if reservation is not None and not reservation.done():
            reservation.set_exception(event.error)
            return
        self._live.pop(event.sequence_id, None)
        self._recalls.forget(event.sequence_id)
        self._send_failed(event.sequence_id, event.error)

    def _send_failed(self, sequence_id: SequenceId, error: PacelineError) -> None:
        failed = decode_pb2.SequenceFailed(reason=error.reason, message=str(error), facts=error.facts())
        self._send(sequence_id, failed=failed)

    def _send(
        self,
        sequence_id: SequenceId,
        *,
        started: decode_pb2.SequenceStarted | None = None,
        kv_received: decode_pb2.KvReceived | None = None,
        prompt_scored: engine_pb2.PromptScored | None = None,
        tokens: decode_pb2.SequenceTokens | None = None,
        failed: decode_pb2.SequenceFailed | None = None,
    ) -> None:
        self._outbox.append(
            decode_pb2.SequenceEvent(
                request_id=sequence_id.request_id,
                attempt=sequence_id.attempt,
                started=started,
                kv_received=kv_received,
                prompt_scored=prompt_scored,
                tokens=tokens,
                failed=failed,
            )
        )
        self._wake.set()


def _deadline_s(spec: SequenceSpec) -> float | None:
    """When the caller stops waiting, on the event loop's clock."""
    if spec.time_budget_s is None:
        return None
    return asyncio.get_running_loop().time() + spec.time_budget_s


def _num_that_fit(events: Sequence[decode_pb2.SequenceEvent]) -> int:
    """How many of the first events one message may hold; one, however large it is."""
    num_bytes = 0
    for index, event in enumerate(events[:_MAX_EVENTS]):
        num_bytes += event.ByteSize()
        if index > 0 and num_bytes > _MAX_BYTES:
            return index
    return min(len(events), _MAX_EVENTS)


def _tokens(event: NewTokens) -> decode_pb2.SequenceTokens:
    return decode_pb2.SequenceTokens(
        first_index=event.first_index,
        token_ids=event.token_ids,
        finish_reason=finish_reason_to_proto(event.finish_reason),
        num_preemptions=event.num_preemptions,
        logprobs=map(logprob_to_proto, event.logprobs),
        candidate=event.candidate,
    )
