"""The one stream between this router and a decode worker: sequences and cancels go up, tokens come down."""

import asyncio
from collections.abc import AsyncIterator

import grpc

from paceline.core.errors import (
    DrainingError,
    EngineFailedError,
    PacelineError,
    PeerLostError,
)
from paceline.core.prefix import PrefixHint
from paceline.core.request import RequestId, SequenceId, SequenceSpec
from paceline.core.ticket import KvTicket
from paceline.runtime.grpc_status import error_from_rpc
from paceline.runtime.wire_internal import prefix_hint_to_proto, spec_to_proto, ticket_to_proto
from paceline.v1 import decode_pb2, engine_pb2
from paceline.v1.decode_pb2_grpc import DecodeServiceStub
from router.decode_handle import DecodeHandle
from router.pace import UNPACED, Pace

# What a worker says that gives up what it has, or takes nothing new, and will soon be gone.
LEAVING = (DrainingError, EngineFailedError)
_LEAVING_REASONS = tuple(error.reason for error in LEAVING)


class DecodeLink:
    """The stream to one decode worker, shared by all requests. It is always read, whoever is slow."""

    def __init__(self, channel: grpc.aio.Channel, peer: str, max_buffered: int, pace: Pace = UNPACED) -> None:
        self.peer = peer
        self._stub = DecodeServiceStub(channel)
        self._max_buffered = max_buffered
        self._pace = pace
        self._outbox: asyncio.Queue[decode_pb2.DecodeRequest] = asyncio.Queue()
        self._handles: dict[SequenceId, DecodeHandle] = {}
        # Whether the worker has refused work since it is about to end; its load report follows, or the end of the stream.
        self.is_leaving = False
        # Set when the stream has ended: whatever is submitted then would wait for ever.
        self._ended: PacelineError | None = None

    @property
    def is_open(self) -> bool:
        """Whether sequences can still be submitted."""
        return self._ended is None

    async def run(self) -> None:
        """Carries messages until the stream breaks; then every sequence on it is lost. Raises PacelineError."""
        error: PacelineError = PeerLostError(f"the stream to {self.peer} has ended")
        call = self._stub.Decode(self._requests())
        try:
            async for response in call:
                self._take(response)
        except grpc.aio.AioRpcError as rpc_error:
            error = error_from_rpc(rpc_error, self.peer)
        finally:
            call.cancel()
            self._end(PeerLostError(str(error)))
        raise error

    def submit(
        self, spec: SequenceSpec, ticket: KvTicket | None = None, hint: PrefixHint | None = None
    ) -> DecodeHandle:
        """Sends a sequence; without a ticket the worker computes the prompt itself, apart from what the hint's owner has of it.

        Raises PeerLostError when the stream has ended.
        """
        if self._ended is not None:
            raise self._ended
        context, sequence = spec_to_proto(spec)
        submit = decode_pb2.Submit(
            context=context,
            sequence=sequence,
            ticket=ticket_to_proto(ticket) if ticket else None,
            prefix_hint=prefix_hint_to_proto(hint),
        )
        handle = DecodeHandle(self, spec, self._max_buffered, self._pace, is_handed_over=ticket is not None)
        self._handles[spec.sequence_id] = handle
        self._outbox.put_nowait(decode_pb2.DecodeRequest(submit=submit))
        return handle

    def give_up(self, sequence_id: SequenceId) -> None:
        """Cancels a sequence at the worker if it is still under way."""
        if self._handles.pop(sequence_id, None) is None:
            return
        cancel = decode_pb2.Cancel(request_id=sequence_id.request_id, attempt=sequence_id.attempt)
        self._outbox.put_nowait(decode_pb2.DecodeRequest(cancel=cancel))

    def give_up_candidate(self, sequence_id: SequenceId, candidate: int) -> None:
        """Cancels one candidate of a sequence that is still under way."""
        if sequence_id not in self._handles:
            return
        cancel = decode_pb2.Cancel(
            request_id=sequence_id.request_id, attempt=sequence_id.attempt, candidate=candidate
        )
        self._outbox.put_nowait(decode_pb2.DecodeRequest(cancel=cancel))

    @property
    def num_sequences(self) -> int:
        """Sequences under way."""
        return len(self._handles)

    def _end(self, error: PeerLostError) -> None:
        self._ended = error
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            handle.fail(error)

    async def _requests(self) -> AsyncIterator[decode_pb2.DecodeRequest]:
        while True:
            yield await self._outbox.get()

    def _take(self, response: decode_pb2.DecodeResponse) -> None:
        """A step's events. Whoever waits for a first token has it before the others go on: to send theirs takes a while, too."""
        going_on = list[tuple[SequenceId, decode_pb2.SequenceEvent]]()
        for event in response.events:
            self.is_leaving |= event.failed.reason in _LEAVING_REASONS
            sequence_id = SequenceId(RequestId(event.request_id), event.attempt)
            handle = self._handles.get(sequence_id)
            if handle is not None and handle.has_tokens:
                going_on.append((sequence_id, event))
            else:
                self._put(sequence_id, event)
        for sequence_id, event in going_on:
            self._put(sequence_id, event)

    def _put(self, sequence_id: SequenceId, event: decode_pb2.SequenceEvent) -> None:
        handle = self._handles.get(sequence_id)
        if handle is None:  # given up since, or at its end
            return
        if handle.note_end(event):
            del self._handles[sequence_id]
        handle.put(event)


def first_tokens(first: engine_pb2.FirstToken, *, index: int) -> decode_pb2.SequenceTokens:
    """A prefill's token in the form in which decode sends those that follow it."""
    return decode_pb2.SequenceTokens(
        first_index=index,
        token_ids=[first.token_id],
        finish_reason=first.finish_reason,
        logprobs=[first.logprob] if first.HasField("logprob") else [],
        candidate=first.candidate,
    )
