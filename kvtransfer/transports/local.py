"""A hand-over inside one process; for tests, and for a worker that is both tiers."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from kvtransfer.chunks import KvMessage, LeaseState, PullEnd
from kvtransfer.sender import KVSender
from paceline.core.block_hash import BlockHash
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.kv_layout import BlockId
from paceline.core.ticket import KvTicket


class LocalTransport:
    """Asks one sender, whatever address the ticket names."""

    def __init__(self, sender: KVSender, fingerprint: ModelFingerprint) -> None:
        self._sender = sender
        self._fingerprint = fingerprint

    async def pull(
        self,
        ticket: KvTicket,
        held_hashes: Sequence[BlockHash],
        into: Sequence[BlockId],  # noqa: ARG002 - see KVTransport
    ) -> AsyncGenerator[KvMessage, None]:
        """The blocks after the held ones, then the end; copied, as if they came from elsewhere."""
        pull = self._sender.pull(ticket.lease_id, ticket.boot_epoch, self._fingerprint, held_hashes)
        async with aclosing(pull) as messages:
            async for message in messages:
                if isinstance(message, PullEnd):
                    yield message
                    continue
                for piece in [replace(piece, data=bytes(piece.data)) for piece in message]:
                    yield piece

    def settling(self, into: Sequence[BlockId]) -> None:
        """Nothing but the receiver writes."""

    async def renew(self, tickets: Sequence[KvTicket]) -> list[LeaseState]:
        """Keeps the leases alive."""
        return self._sender.renew([ticket.lease_id for ticket in tickets], tickets[0].boot_epoch)

    async def release(self, ticket: KvTicket) -> LeaseState:
        """Ends the lease."""
        return self._sender.release([ticket.lease_id], ticket.boot_epoch)[0]
