"""Counts what passes through a transport, from outside."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from kvtransfer.chunks import KvChunk, KvMessage, KvWritten, LeaseState, PullEnd
from kvtransfer.transports.base import KVTransport
from paceline.core.block_hash import BlockHash
from paceline.core.clock import Clock, monotonic
from paceline.core.kv_layout import BlockId
from paceline.core.ticket import KvTicket


@dataclass(frozen=True, slots=True)
class TransportStats:
    """Counts since the start. A pull that is not in `num_ended` failed, was given up, or is under way."""

    num_pulls: int = 0
    num_ended: int = 0
    num_chunks: int = 0
    num_bytes: int = 0
    pull_duration_s: float = 0.0


class PullCounts:
    """What was counted; several transports may count together."""

    def __init__(self, *, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._num_pulls = 0
        self._num_ended = 0
        self._num_chunks = 0
        self._num_bytes = 0
        self._pull_duration_s = 0.0

    async def counted(self, messages: AsyncGenerator[KvMessage, None]) -> AsyncGenerator[KvMessage, None]:
        """The messages of one pull, as they are."""
        started_s = self._clock()
        self._num_pulls += 1
        try:
            async with aclosing(messages):
                async for message in messages:
                    self._count(message)
                    yield message
        finally:
            self._pull_duration_s += self._clock() - started_s

    def stats(self) -> TransportStats:
        """What was counted so far."""
        return TransportStats(
            num_pulls=self._num_pulls,
            num_ended=self._num_ended,
            num_chunks=self._num_chunks,
            num_bytes=self._num_bytes,
            pull_duration_s=self._pull_duration_s,
        )

    def _count(self, message: KvMessage) -> None:
        match message:
            case PullEnd():
                self._num_ended += 1
            case KvChunk():
                self._num_chunks += 1
                self._num_bytes += len(message.data)
            case KvWritten():
                self._num_chunks += 1
                self._num_bytes += message.num_bytes


class InstrumentedTransport:
    """Passes everything on to the next transport and counts it."""

    def __init__(self, next_transport: KVTransport, counts: PullCounts) -> None:
        self._next = next_transport
        self._counts = counts

    def pull(
        self, ticket: KvTicket, held_hashes: Sequence[BlockHash], into: Sequence[BlockId]
    ) -> AsyncGenerator[KvMessage, None]:
        """The next transport's messages, counted."""
        return self._counts.counted(self._next.pull(ticket, held_hashes, into))

    def settling(self, into: Sequence[BlockId]) -> "asyncio.Future[None] | None":
        """The next transport's."""
        return self._next.settling(into)

    async def renew(self, tickets: Sequence[KvTicket]) -> list[LeaseState]:
        """The next transport's answer."""
        return await self._next.renew(tickets)

    async def release(self, ticket: KvTicket) -> LeaseState:
        """The next transport's answer."""
        return await self._next.release(ticket)
