"""What a Decode stream still has to tell its router, in order, and in messages that gRPC takes."""

import asyncio
from collections.abc import Sequence

from paceline.core.request import SequenceId
from paceline.engine.events import NewTokens
from paceline.runtime.wire_internal import finish_reason_to_proto, logprob_to_proto
from paceline.v1 import decode_pb2, engine_pb2

# A step gives few events a sequence, so only a router that reads slowly gets so many. Bytes are counted too: the log
# probabilities of a chunk alone may take megabytes, and a message ends at 4 MiB.
_MAX_EVENTS = 1000
_MAX_BYTES = 1 << 20


class Outbox:
    """Takes events at any time; one reader takes them out."""

    def __init__(self) -> None:
        self._events: list[decode_pb2.SequenceEvent] = []
        self._ended = False
        self._wake = asyncio.Event()

    def end(self) -> None:
        """Nothing more will be asked; what is there is still taken."""
        self._ended = True
        self._wake.set()

    async def take(self) -> list[decode_pb2.SequenceEvent]:
        """The next events, at least one, as many as one message may hold; none once the stream has ended."""
        while not self._events and not self._ended:
            self._wake.clear()
            await self._wake.wait()
        num_events = _num_that_fit(self._events)
        events, self._events = self._events[:num_events], self._events[num_events:]
        return events

    def put(
        self,
        sequence_id: SequenceId,
        *,
        started: decode_pb2.SequenceStarted | None = None,
        kv_received: decode_pb2.KvReceived | None = None,
        progress: decode_pb2.SequenceProgress | None = None,
        prompt_scored: engine_pb2.PromptScored | None = None,
        tokens: decode_pb2.SequenceTokens | None = None,
        failed: decode_pb2.SequenceFailed | None = None,
    ) -> None:
        """One event of a sequence."""
        self._events.append(
            decode_pb2.SequenceEvent(
                request_id=sequence_id.request_id,
                attempt=sequence_id.attempt,
                started=started,
                kv_received=kv_received,
                progress=progress,
                prompt_scored=prompt_scored,
                tokens=tokens,
                failed=failed,
            )
        )
        self._wake.set()


def tokens_to_proto(event: NewTokens) -> decode_pb2.SequenceTokens:
    """New tokens of one candidate."""
    return decode_pb2.SequenceTokens(
        first_index=event.first_index,
        token_ids=event.token_ids,
        finish_reason=finish_reason_to_proto(event.finish_reason),
        num_preemptions=event.num_preemptions,
        logprobs=map(logprob_to_proto, event.logprobs),
        candidate=event.candidate,
    )


def _num_that_fit(events: Sequence[decode_pb2.SequenceEvent]) -> int:
    """How many of the first events one message may hold; one, however large it is."""
    num_bytes = 0
    for index, event in enumerate(events[:_MAX_EVENTS]):
        num_bytes += event.ByteSize()
        if index > 0 and num_bytes > _MAX_BYTES:
            return index
    return min(len(events), _MAX_EVENTS)
