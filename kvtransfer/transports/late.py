"""A transport that writes to the receiver's blocks itself and goes on when it is given up, as engines for RDMA do; for tests."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from kvtransfer.block_store import BlockStore
from kvtransfer.chunks import KvMessage, KvReference, KvWritten, LeaseState, PullEnd
from kvtransfer.sender import KVSender
from kvtransfer.transports.in_flight import InFlight
from paceline.core.block_hash import BlockHash
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.kv_layout import BlockId
from paceline.core.ticket import KvTicket


class LateTransport:
    """Copies from `source`, whose leases `sender` knows, to `target`. Each block takes `write_s` seconds, whoever still listens."""

    def __init__(
        self,
        sender: KVSender,
        fingerprint: ModelFingerprint,
        source: BlockStore,
        target: BlockStore,
        *,
        write_s: float = 0.0,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._sender = sender
        self._fingerprint = fingerprint
        self._source = source
        self._target = target
        self._write_s = write_s
        self._sleep = sleep
        self._in_flight = InFlight()

    async def pull(
        self, ticket: KvTicket, held_hashes: Sequence[BlockHash], into: Sequence[BlockId]
    ) -> AsyncGenerator[KvMessage, None]:
        """Blocks that are written already, as many as were computed at a time; then the end."""
        pull = self._sender.pull_references(
            ticket.lease_id, ticket.boot_epoch, self._fingerprint, held_hashes
        )
        async with aclosing(pull) as messages:
            async for message in messages:
                if isinstance(message, PullEnd):
                    yield message
                    continue
                places = [into[reference.ordinal] for reference in message]
                await self._in_flight.until_written(self._write(message, places), places)
                for reference in message:
                    yield KvWritten(reference.ordinal, self._target.block_bytes, reference.checksum)

    def settling(self, into: Sequence[BlockId]) -> "asyncio.Future[None] | None":
        """What is still being written."""
        return self._in_flight.settling(into)

    async def renew(self, tickets: Sequence[KvTicket]) -> list[LeaseState]:
        """Keeps the leases alive."""
        return self._sender.renew([ticket.lease_id for ticket in tickets], tickets[0].boot_epoch)

    async def release(self, ticket: KvTicket) -> LeaseState:
        """Ends the lease."""
        return self._sender.release([ticket.lease_id], ticket.boot_epoch)[0]

    async def _write(self, references: Sequence[KvReference], places: Sequence[BlockId]) -> None:
        for reference, place in zip(references, places, strict=True):
            await self._sleep(self._write_s)
            self._target.write(place, 0, self._source.read(reference.block_id))
