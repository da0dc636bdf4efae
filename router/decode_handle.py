"""What a decode worker says of one sequence, until somebody reads it: bounded, in order, and joined where it waits."""

import asyncio
from collections import deque
from contextlib import suppress
from math import inf
from typing import Protocol

from paceline.core.errors import DeadlineError, PacelineError, SlowConsumerError
from paceline.core.request import SequenceId, SequenceSpec
from paceline.runtime.grpc_status import error_from_reason
from paceline.v1 import decode_pb2
from router.pace import Pace

# A worker looks at the deadline too, and knows more of what it interrupts: so it has the first word.
_LAST_WORD_S = 0.02
# What a deadline interrupts once an event of this kind has come.
_PHASE_AFTER = {"started": "prefill", "kv_received": "decode", "tokens": "decode"}


class Link(Protocol):
    """Whoever carries the sequence's messages."""

    peer: str

    def give_up(self, sequence_id: SequenceId) -> None:
        """Cancels a sequence at the worker if it is still under way."""
        ...

    def give_up_candidate(self, sequence_id: SequenceId, candidate: int) -> None:
        """Cancels one candidate of a sequence that is still under way."""
        ...


class DecodeHandle:
    """One sequence's events, all candidates'; iteration ends by an error or when the reader has what it wants.

    Tokens of a candidate that wait together come as one event, and they wait as long as the pace says, unless they are the
    first or the last ones: the more there is to do, the fewer messages there are for the same tokens.
    """

    def __init__(
        self, link: Link, spec: SequenceSpec, max_buffered: int, pace: Pace, *, is_handed_over: bool = False
    ) -> None:
        self._link = link
        self._pace = pace
        self._sequence_id = spec.sequence_id
        self._unfinished = set(spec.candidates)
        self._max_buffered = max_buffered * len(spec.candidates)
        self._events: deque[decode_pb2.SequenceEvent] = deque()
        self._error: PacelineError | None = None
        self._arrived = asyncio.Event()
        # Whether there is anything but tokens that others will follow.
        self._urgent = asyncio.Event()
        self._given_s = -inf
        # Whether the worker has the prompt's KV, and so has given the lease back.
        self.has_kv = False
        # Whether the sequence has its first tokens, from here or from whoever computed the prompt.
        self.has_tokens = is_handed_over
        self._phase = "transfer" if is_handed_over else "queued"
        # One that says nothing does not hold anybody past it.
        self._deadline = self._expiring(spec.time_budget_s)

    def __aiter__(self) -> "DecodeHandle":
        return self

    async def __anext__(self) -> decode_pb2.SequenceEvent:
        while not self._events and self._error is None:
            self._arrived.clear()
            await self._arrived.wait()
        await self._until_due()
        if self._error is not None:
            raise self._error
        event = self._events.popleft()
        if event.tokens.token_ids and self._events:
            self._join(event.tokens)
        if not self._events:
            self._urgent.clear()
        return event

    def close(self) -> None:
        """Gives the sequence up at the worker, unless it has ended."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._link.give_up(self._sequence_id)

    def keep(self, candidates: set[int]) -> None:
        """Gives up at the worker whatever else has not ended; these go on."""
        for candidate in self._unfinished - candidates:
            self._link.give_up_candidate(self._sequence_id, candidate)
        self._unfinished &= candidates

    def note_end(self, event: decode_pb2.SequenceEvent) -> bool:
        """Whether nothing comes after this event."""
        if event.tokens.finish_reason:
            self._unfinished.discard(event.tokens.candidate)
        return event.WhichOneof("event") == "failed" or not self._unfinished

    def put(self, event: decode_pb2.SequenceEvent) -> None:
        """Takes an event. A reader who is too far behind loses the sequence, so that memory stays bounded."""
        kind = event.WhichOneof("event")
        if kind == "failed":
            failed = event.failed
            self.fail(error_from_reason(failed.reason, failed.message, self._link.peer, failed.facts))
            return
        self.has_kv |= kind == "kv_received"
        self.has_tokens |= kind == "tokens"
        self._phase = _PHASE_AFTER.get(kind or "", self._phase)
        self._events.append(event)
        self._arrived.set()
        if kind != "tokens" or event.tokens.finish_reason:
            self._urgent.set()
        if len(self._events) > self._max_buffered:
            self.close()
            self.fail(
                SlowConsumerError("the client reads too slowly; read faster or ask for less", retry_after_s=1)
            )

    def fail(self, error: PacelineError) -> None:
        """Ends the sequence. What arrived before is dropped: the next attempt computes it again."""
        self._error = self._error or error
        self._events.clear()
        self._arrived.set()
        self._urgent.set()

    def _expiring(self, time_budget_s: float | None) -> asyncio.TimerHandle | None:
        if time_budget_s is None:
            return None
        return asyncio.get_running_loop().call_later(time_budget_s + _LAST_WORD_S, self._expire)

    def _expire(self) -> None:
        self.fail(DeadlineError(self._phase))

    async def _until_due(self) -> None:
        if self._urgent.is_set():
            return
        loop = asyncio.get_running_loop()
        due_s = self._given_s + self._pace.interval_s()
        if due_s > loop.time():
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await self._urgent.wait()
        self._given_s = loop.time()

    def _join(self, tokens: decode_pb2.SequenceTokens) -> None:
        """Those that come next of the same candidate; what is between them comes later."""
        others: deque[decode_pb2.SequenceEvent] = deque()
        for event in self._events:
            if _goes_on(tokens, event.tokens):
                _append(tokens, event.tokens)
            else:
                others.append(event)
        self._events = others


def _goes_on(tokens: decode_pb2.SequenceTokens, later: decode_pb2.SequenceTokens) -> bool:
    """Whether the later ones are the next of the same candidate; other events have no tokens."""
    is_next = later.first_index == tokens.first_index + len(tokens.token_ids)
    return bool(later.token_ids) and is_next and later.candidate == tokens.candidate


def _append(tokens: decode_pb2.SequenceTokens, later: decode_pb2.SequenceTokens) -> None:
    first_index = tokens.first_index
    # Lists grow; what is said once, such as the end, is the later one's.
    tokens.MergeFrom(later)
    tokens.first_index = first_index
