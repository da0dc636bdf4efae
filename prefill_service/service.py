"""PrefillService: one prompt in, a ticket, progress and the first token of each candidate out."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvtransfer.leases import Lease
from paceline.core.errors import InvariantError, PacelineError
from paceline.core.prefix import PrefixHint
from paceline.core.request import FirstToken, RequestId, SequenceId, SequenceSpec
from paceline.engine.events import BlocksReady, Event, Failed, NewTokens, PromptScored, Recall, Started
from paceline.engine.sequence import SequenceRole
from paceline.runtime.grpc_status import abort_with
from paceline.runtime.wire_internal import (
    first_token_to_proto,
    prefix_hint_from_proto,
    prompt_scored_to_proto,
    spec_from_proto,
    ticket_to_proto,
)
from paceline.v1 import prefill_pb2, prefill_pb2_grpc
from paceline.worker.events import EventQueue
from paceline.worker.recalls import Recalls, deadline_of
from paceline.worker.worker import Worker


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Serves one prefill worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Computes one prompt."""
        try:
            spec = spec_from_proto(request.context, request.sequence)
            self._worker.require_room_for(spec)
            prefill = _Prefill(self._worker, spec, prefix_hint_from_proto(request))
            try:
                async for response in prefill.run():
                    yield response
            finally:
                prefill.close()
        except PacelineError as error:
            sequence_id = SequenceId(RequestId(request.context.request_id), request.context.attempt)
            self._worker.failures.note(sequence_id, error)
            await abort_with(context, error)


class _Prefill:
    """One prompt's way through the engine. Its blocks belong to the lease once that is complete; else they go back."""

    def __init__(self, worker: Worker, spec: SequenceSpec, hint: PrefixHint | None) -> None:
        self._worker = worker
        self._spec = spec
        self._hint = hint
        self._recalls = Recalls(worker, lambda recall: worker.engine.release(recall.sequence_id))
        self._lease: Lease | None = None
        self._first_tokens: list[FirstToken] = []
        self._is_submitted = False

    async def run(self) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        events = self._submit()
        async for event in events:
            if isinstance(event, Recall):
                self._recalls.begin(event)
            elif isinstance(event, NewTokens):
                self._first_tokens.append(_first_token(event))
                if len(self._first_tokens) == len(self._spec.candidates):
                    yield self._result()
                    return
            elif (response := self._take(event)) is not None:
                yield response

    def close(self) -> None:
        """Whatever happened: gives back what no complete lease holds, and nothing of another call."""
        if not self._is_submitted:
            return
        if self._lease is not None:
            self._worker.leases.drop(self._lease.lease_id)
        elif not self._recalls.give_up(self._spec.sequence_id, set(self._spec.candidates)):
            self._worker.engine.release(self._spec.sequence_id)

    def _submit(self) -> EventQueue:
        events, spec, num_remote_tokens = EventQueue(), self._spec, 0
        if self._hint is not None:
            self._recalls.remember(spec, self._hint.owner, deadline_of(spec))
            num_remote_tokens = self._hint.num_tokens
        self._is_submitted = self._worker.engine.submit(
            spec, SequenceRole.PREFILL_ONLY, events.put, num_remote_tokens
        )
        if not self._is_submitted:
            raise InvariantError(f"{spec.sequence_id} is here already")
        return events

    def _take(self, event: Event) -> prefill_pb2.PrefillResponse | None:
        match event:
            case Started():
                return prefill_pb2.PrefillResponse(started=self._start(event))
            case BlocksReady():
                self._worker.leases.progress(self._held.lease_id, event.blocks)
                # The result follows at once, and says that all is computed.
                if event.num_computed_tokens == len(self._spec.known_ids):
                    return None
                progress = prefill_pb2.PrefillProgress(computed_tokens=event.num_computed_tokens)
                return prefill_pb2.PrefillResponse(progress=progress)
            case PromptScored():
                scored = prompt_scored_to_proto(event.first_index, event.logprobs)
                return prefill_pb2.PrefillResponse(prompt_scored=scored)
            case Failed():
                raise event.error
        raise AssertionError(f"a prefill never gives {type(event).__name__}")

    def _result(self) -> prefill_pb2.PrefillResponse:
        self._worker.leases.complete(self._held.lease_id, self._first_tokens)
        result = prefill_pb2.PrefillResult(first_tokens=map(first_token_to_proto, self._first_tokens))
        return prefill_pb2.PrefillResponse(result=result)

    def _start(self, event: Started) -> prefill_pb2.PrefillStarted:
        self._lease, ticket = self._worker.grant(event)
        return prefill_pb2.PrefillStarted(
            ticket=ticket_to_proto(ticket),
            cached_tokens=event.num_cached_tokens,
            queued_s=event.queued_s,
            num_pulled_blocks=event.num_pulled_blocks,
            num_pulled_bytes=event.num_pulled_blocks * self._worker.loaded.layout.block_bytes,
        )

    @property
    def _held(self) -> Lease:
        assert self._lease is not None, "Started comes first"
        return self._lease


def _first_token(event: NewTokens) -> FirstToken:
    logprob = event.logprobs[0] if event.logprobs else None
    return FirstToken(event.token_ids[0], event.finish_reason, logprob, event.candidate)
