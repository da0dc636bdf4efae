"""What the receiver asks of whatever carries blocks."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from kvtransfer.chunks import KvMessage, LeaseState
from paceline.core.block_hash import BlockHash
from paceline.core.ticket import KvTicket


class KVTransport(Protocol):
    """Reaches the owners of leases. Whatever goes wrong on the way is a KvError or a FingerprintMismatchError."""

    def pull(self, ticket: KvTicket, held_hashes: Sequence[BlockHash]) -> AsyncGenerator[KvMessage, None]:
        """The blocks after the held ones, each as soon as it is computed, then the end. Close it to stop."""

    async def renew(self, ticket: KvTicket) -> LeaseState:
        """Keeps the lease alive."""

    async def release(self, ticket: KvTicket) -> LeaseState:
        """Ends the lease; VALID only when it held until now. Doing it twice is harmless."""
