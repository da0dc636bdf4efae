"""What the receiver asks of whatever carries blocks."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from kvtransfer.chunks import KvMessage, LeaseState
from paceline.core.block_hash import BlockHash
from paceline.core.errors import KvLostError
from paceline.core.kv_layout import BlockId
from paceline.core.ticket import KvTicket


class TransportBrokenError(KvLostError):
    """It is the way that failed, not its owner or the lease: the next pull may do better on another one."""


class KVTransport(Protocol):
    """Reaches the owners of leases. Whatever goes wrong on the way is a KvError or a FingerprintMismatchError."""

    def pull(
        self, ticket: KvTicket, held_hashes: Sequence[BlockHash], into: Sequence[BlockId]
    ) -> AsyncGenerator[KvMessage, None]:
        """The blocks after the held ones, each as soon as it is computed, then the end. Close it to stop.

        `into` are the receiver's blocks, one for each of the ticket's. An engine may write to them itself, and may still do so for
        a while after the pull has been closed: see `settling`.
        """

    def settling(self, into: Sequence[BlockId]) -> "asyncio.Future[None] | None":
        """After a pull: None when nothing writes to these blocks any more, else what is done as soon as that is so."""

    async def renew(self, tickets: Sequence[KvTicket]) -> list[LeaseState]:
        """Keeps leases of one owner, in one of its lives, alive; says of each whether it holds."""

    async def release(self, ticket: KvTicket) -> LeaseState:
        """Ends the lease; VALID only when it held until now. Doing it twice is harmless."""
