"""A hand-over through memory that both processes have mapped: the owner says where blocks lie, the receiver copies them itself.

There is one copy, from pool to pool. What the owner says comes over gRPC, and so do renewals and the release.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from kvtransfer.chunks import KvChunk, KvMessage, KvReference, LeaseState, PullEnd
from kvtransfer.offer import MemoryOffer
from kvtransfer.transports.base import TransportBrokenError
from kvtransfer.transports.grpc import GrpcTransport
from paceline.core.block_hash import BlockHash
from paceline.core.kv_layout import BlockId
from paceline.core.ticket import KvTicket
from paceline.runtime.pool_memory import map_offered

# So much is copied and checked in about half a millisecond; then others have their turn on the event loop.
_BYTES_AT_ONCE = 2 << 20


class SharedMemory:
    """The way through shared memory. It needs an owner on the same host, of the same user."""

    name = "shm"
    writes_in_place = False

    def __init__(self, grpc: GrpcTransport) -> None:
        self._grpc = grpc

    def connect(self, offer: MemoryOffer) -> "SharedMemoryTransport":
        """Maps an owner's pool; raises TransportBrokenError, saying why, when that cannot be."""
        if offer.shared_memory is None:
            raise TransportBrokenError("it offers no shared memory")
        if offer.shared_memory.num_bytes != offer.num_blocks * offer.block_bytes:
            raise TransportBrokenError("the shared memory is not as large as the pool")
        try:
            pool = map_offered(offer.shared_memory)
        except OSError as error:
            raise TransportBrokenError(f"its memory cannot be mapped: {error}") from error
        return SharedMemoryTransport(self._grpc, pool, offer.block_bytes)

    def settling(self, into: Sequence[BlockId]) -> None:
        """Nothing but the receiver writes."""

    async def aclose(self) -> None:
        """Nothing to close."""


class SharedMemoryTransport:
    """Reads the pool of one owner in one of its lives, mapped as long as the transport or a piece of it is there."""

    def __init__(self, grpc: GrpcTransport, pool: memoryview, block_bytes: int) -> None:
        self._grpc = grpc
        self._pool = pool
        self._block_bytes = block_bytes
        self._num_blocks = len(pool) // block_bytes

    async def pull(
        self,
        ticket: KvTicket,
        held_hashes: Sequence[BlockHash],
        into: Sequence[BlockId],  # noqa: ARG002 - see KVTransport
    ) -> AsyncGenerator[KvMessage, None]:
        """Each block as one piece, which is the owner's memory itself: take it before you ask for the next."""
        num_bytes = 0
        async with aclosing(self._grpc.pull_references(ticket, held_hashes)) as messages:
            async for message in messages:
                if isinstance(message, PullEnd):
                    yield message
                    continue
                for reference in message:
                    if num_bytes >= _BYTES_AT_ONCE:
                        await asyncio.sleep(0)
                        num_bytes = 0
                    num_bytes += self._block_bytes
                    yield self._chunk(reference)

    def settling(self, into: Sequence[BlockId]) -> None:
        """Nothing but the receiver writes."""

    async def renew(self, tickets: Sequence[KvTicket]) -> list[LeaseState]:
        """Keeps the leases alive."""
        return await self._grpc.renew(tickets)

    async def release(self, ticket: KvTicket) -> LeaseState:
        """Ends the lease."""
        return await self._grpc.release(ticket)

    def _chunk(self, reference: KvReference) -> KvChunk:
        if reference.block_id >= self._num_blocks:
            raise TransportBrokenError(
                f"the owner names block {reference.block_id} of a pool of {self._num_blocks}"
            )
        start = reference.block_id * self._block_bytes
        data = self._pool[start : start + self._block_bytes]
        return KvChunk(reference.ordinal, 0, data, reference.checksum)
