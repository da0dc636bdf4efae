"""The sequences of one Decode stream: submitted, received or computed here, generated, cancelled."""

import asyncio
import time
from collections.abc import Sequence

from decode_service.outbox import Outbox, tokens_to_proto
from decode_service.quarantine import Quarantine
from kvtransfer.receiver import ReceivedKv
from paceline.core.errors import DeadlineError, PacelineError
from paceline.core.kv_layout import BlockId
from paceline.core.prefix import PrefixOwner
from paceline.core.request import RequestId, SequenceId, SequenceSpec
from paceline.core.ticket import KvTicket
from paceline.engine.events import (
    Event,
    Failed,
    NewTokens,
    Progress,
    PromptScored,
    Recall,
    Reserved,
    Started,
)
from paceline.engine.sequence import SequenceRole
from paceline.runtime.grpc_status import as_paceline_error
from paceline.runtime.log import get_logger
from paceline.runtime.wire_internal import (
    prefix_hint_from_proto,
    prompt_scored_to_proto,
    spec_from_proto,
    ticket_from_proto,
)
from paceline.v1 import decode_pb2
from paceline.worker.recalls import Recalls, deadline_of
from paceline.worker.worker import Worker

log = get_logger()


class DecodeSession:
    """Whatever it took is given back: when it ends by itself, is cancelled, fails, or when the stream breaks."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        # The candidates of each sequence that have not ended.
        self._live: dict[SequenceId, set[int]] = {}
        self._reservations: dict[SequenceId, asyncio.Future[Reserved]] = {}
        self._hand_overs: dict[SequenceId, asyncio.Task[None]] = {}
        self._quarantine = Quarantine(worker)
        self._recalls = Recalls(worker, self._release_recalled)
        self._outbox = Outbox()

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
            self._compute(spec, message)

    def cancel(self, message: decode_pb2.Cancel) -> None:
        """Gives one attempt up, or one candidate of it."""
        sequence_id = SequenceId(RequestId(message.request_id), message.attempt)
        if not message.HasField("candidate"):
            self._give_up(sequence_id)
        elif message.candidate in self._live.get(sequence_id, ()):
            self._give_up_candidate(sequence_id, message.candidate)

    def end(self) -> None:
        """Nothing more will come from the router."""
        self._outbox.end()

    # -- what goes back

    async def take_events(self) -> list[decode_pb2.SequenceEvent]:
        """See Outbox.take."""
        return await self._outbox.take()

    async def aclose(self) -> None:
        """Gives up every sequence; returns when no hand-over and no recall is under way any more."""
        hand_overs = list(self._hand_overs.values())
        for sequence_id in list(self._live):
            self._give_up(sequence_id)
        await asyncio.gather(*hand_overs, return_exceptions=True)
        await self._recalls.aclose()

    # -- without a hand-over

    def _compute(self, spec: SequenceSpec, message: decode_pb2.Submit) -> None:
        """The prompt is computed here, but for what this worker or another one has of it."""
        hint = prefix_hint_from_proto(message)
        if hint is not None:
            self._recalls.remember(spec, hint.owner, deadline_of(spec))
        num_remote_tokens = 0 if hint is None else hint.num_tokens
        self._worker.engine.submit(spec, SequenceRole.GENERATE, self._take, num_remote_tokens)

    def _release_recalled(self, recall: Recall) -> None:
        for candidate in recall.candidates:
            self._worker.engine.release_candidate(recall.sequence_id, candidate)

    # -- hand-over

    async def _hand_over(self, spec: SequenceSpec, ticket: KvTicket) -> None:
        """Reserves blocks, has them filled, commits; the sequence is released here if any of that fails.

        The router hears of a failure at once. The sequence is released when nothing writes to its blocks any more.
        """
        sequence_id = spec.sequence_id
        deadline_s = deadline_of(spec)
        block_ids: Sequence[BlockId] = ()
        try:
            async with asyncio.timeout_at(deadline_s), self._worker.receiver.hold(ticket) as hand_over:
                reserved = await self._reserve(spec)
                block_ids, started_s = reserved.block_ids, time.monotonic()
                received = await hand_over.receive(block_ids, reserved.num_held)
        except asyncio.CancelledError:
            self._quarantine.release_when_settled(sequence_id, block_ids)
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was, the router must hear of it
            self._quarantine.release_when_settled(sequence_id, block_ids)
            is_late = isinstance(error, TimeoutError)
            self._fail_hand_over(sequence_id, DeadlineError("transfer") if is_late else error)
            return
        finally:
            self._reservations.pop(sequence_id, None)
        self._tell_received(sequence_id, received, time.monotonic() - started_s)
        # Whoever cuts its blocks in another way lends none.
        if sequence_id in self._live and ticket.fingerprint == self._worker.loaded.fingerprint:
            owner = PrefixOwner(ticket.owner_id, ticket.owner_address, ticket.boot_epoch)
            self._recalls.remember(spec, owner, deadline_s)
        self._commit(sequence_id, received)

    def _tell_received(self, sequence_id: SequenceId, received: ReceivedKv, duration_s: float) -> None:
        self._worker.num_blocks_pulled += received.num_blocks
        self._outbox.put(
            sequence_id,
            kv_received=decode_pb2.KvReceived(
                num_blocks=received.num_blocks,
                num_bytes=received.num_bytes,
                duration_s=duration_s,
            ),
        )

    def _commit(self, sequence_id: SequenceId, received: ReceivedKv) -> None:
        # Those that have been cancelled meanwhile do not begin.
        live = self._live.get(sequence_id, set())
        first_tokens = [first for first in received.first_tokens if first.candidate in live]
        for first in first_tokens:
            if first.finish_reason is not None:
                self._note_end(sequence_id, first.candidate)
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
        if sequence_id in self._quarantine:
            return
        live = self._live.pop(sequence_id, set())
        self._recalls.forget(sequence_id)
        hand_over = self._receiving(sequence_id)
        if hand_over is not None:
            hand_over.cancel()
            return
        recalled = self._recalls.give_up(sequence_id, live)
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
        if self._receiving(sequence_id) is None and not self._recalls.give_up(sequence_id, {candidate}):
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
                    cached_tokens=event.num_cached_tokens,
                    queued_s=event.queued_s,
                    num_pulled_blocks=event.num_pulled_blocks,
                    num_pulled_bytes=event.num_pulled_blocks * self._worker.loaded.layout.block_bytes,
                )
                self._outbox.put(event.sequence_id, started=started)
            case Progress():
                progress = decode_pb2.SequenceProgress(computed_tokens=event.num_computed_tokens)
                self._outbox.put(event.sequence_id, progress=progress)
            case PromptScored():
                scored = prompt_scored_to_proto(event.first_index, event.logprobs)
                self._outbox.put(event.sequence_id, prompt_scored=scored)
            case NewTokens():
                if event.finish_reason is not None:
                    self._note_end(event.sequence_id, event.candidate)
                self._outbox.put(event.sequence_id, tokens=tokens_to_proto(event))
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
        self._worker.failures.note(sequence_id, error)
        failed = decode_pb2.SequenceFailed(reason=error.reason, message=str(error), facts=error.facts())
        self._outbox.put(sequence_id, failed=failed)
