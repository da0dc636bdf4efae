"""The receiver's side of a hand-over: pulls a prompt's blocks into reserved ones, all of them or none.

It knows no engine: the caller reserves the blocks before, and commits or frees them after.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from kvtransfer.block_store import BlockStore
from kvtransfer.chunks import KvChunk, KvMessage, LeaseState
from kvtransfer.keep_alive import keep_alive
from kvtransfer.transports.base import KVTransport
from paceline.core.errors import KvChecksumError, KvLostError, LeaseExpiredError, PacelineError
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.kv_layout import BlockId
from paceline.core.request import FirstToken
from paceline.core.ticket import KvTicket


@dataclass(frozen=True, slots=True)
class ReceivedKv:
    """What came: the blocks that travelled, and the first token."""

    first_token: FirstToken
    num_blocks: int
    num_bytes: int


class KVReceiver:
    """Receives hand-overs, any number at a time.

    When `receive` returns, every block holds exactly what its owner computed and the owner has let go of its copy. When
    it raises, the reserved blocks hold rubbish. After either, nothing writes to them any more.
    """

    def __init__(
        self,
        transport: KVTransport,
        store: BlockStore,
        fingerprint: ModelFingerprint,
        *,
        stall_timeout_s: float = 20.0,
        renew_every_s: float = 5.0,
        release_timeout_s: float = 2.0,
    ) -> None:
        self._transport = transport
        self._store = store
        self._fingerprint = fingerprint
        self._stall_timeout_s = stall_timeout_s
        self._renew_every_s = renew_every_s
        self._release_timeout_s = release_timeout_s
        # The loop itself holds tasks only weakly.
        self._giving_back: set[asyncio.Task[None]] = set()

    async def receive(self, ticket: KvTicket, block_ids: Sequence[BlockId], num_held: int) -> ReceivedKv:
        """Fills `block_ids`, one for each block of the ticket in order, apart from the first `num_held`.

        Those are already here, and are neither pulled nor written. Raises KvError or FingerprintMismatchError.
        """
        assert len(block_ids) == ticket.num_blocks, "reserve one block for each of the ticket's"
        assert 0 <= num_held <= len(ticket.block_hashes), "only full blocks can be held"
        landing = _Landing(self._store, block_ids, num_held)
        try:
            self._fingerprint.require_same(ticket.fingerprint)
            async with keep_alive(self._transport, ticket, every_s=self._renew_every_s):
                first_token = await self._pull(ticket, landing)
                await self._confirm(ticket)
        except BaseException:
            await self._give_back(ticket)
            raise
        return ReceivedKv(first_token, ticket.num_blocks - num_held, landing.num_bytes)

    async def _pull(self, ticket: KvTicket, landing: "_Landing") -> FirstToken:
        held_hashes = ticket.block_hashes[: landing.num_held]
        async with aclosing(self._transport.pull(ticket, held_hashes)) as messages:
            while isinstance(message := await self._next(messages), KvChunk):
                landing.write(message)
        landing.require_all()
        return message.first_token

    async def _next(self, messages: AsyncGenerator[KvMessage, None]) -> KvMessage:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                return await anext(messages)
        except TimeoutError:
            raise KvLostError(f"no block came for {self._stall_timeout_s:g} s; prefill again") from None
        except StopAsyncIteration:
            raise KvLostError("the blocks stopped before their end; prefill again") from None

    async def _confirm(self, ticket: KvTicket) -> None:
        """Only the owner knows whether the blocks were still the lease's when the last byte was read."""
        try:
            async with asyncio.timeout(self._release_timeout_s):
                state = await self._transport.release(ticket)
        except TimeoutError:
            raise KvLostError("the owner did not say whether the lease still held; prefill again") from None
        if state is not LeaseState.VALID:
            raise LeaseExpiredError(f"lease {ticket.lease_id} ended before the last byte was safe")

    async def _give_back(self, ticket: KvTicket) -> None:
        """Ends the lease, also when we are cancelled again meanwhile; if that fails, its clock ends it."""
        release = asyncio.create_task(self._release_quietly(ticket))
        self._giving_back.add(release)
        release.add_done_callback(self._giving_back.discard)
        await asyncio.shield(release)

    async def _release_quietly(self, ticket: KvTicket) -> None:
        with suppress(PacelineError, TimeoutError):
            async with asyncio.timeout(self._release_timeout_s):
                await self._transport.release(ticket)


class _Landing:
    """Where the pieces go: each next byte has one place, and a piece for any other is refused unwritten."""

    def __init__(self, store: BlockStore, block_ids: Sequence[BlockId], num_held: int) -> None:
        self.num_held = num_held
        self.num_bytes = 0
        self._store = store
        self._block_ids = block_ids
        self._ordinal = num_held
        self._offset = 0

    def write(self, chunk: KvChunk) -> None:
        """Writes the next piece; with the last one of a block, checks the block as it now lies in the store."""
        self._require_next(chunk)
        self._store.write(self._block_ids[self._ordinal], self._offset, chunk.data)
        self.num_bytes += len(chunk.data)
        self._offset += len(chunk.data)
        if self._offset == self._store.block_bytes:
            self._finish_block(chunk.checksum)

    def require_all(self) -> None:
        """Raises KvLostError unless every block is here."""
        if self._ordinal != len(self._block_ids):
            raise KvLostError(f"the hand-over ended at block {self._ordinal} of {len(self._block_ids)}")

    def _require_next(self, chunk: KvChunk) -> None:
        if self._ordinal == len(self._block_ids):
            raise KvLostError("a piece came after the last block")
        if (chunk.ordinal, chunk.offset) != (self._ordinal, self._offset):
            raise KvLostError(
                f"expected block {self._ordinal} from byte {self._offset}, got block {chunk.ordinal} "
                f"from byte {chunk.offset}"
            )
        if not 0 < len(chunk.data) <= self._store.block_bytes - self._offset:
            raise KvLostError(f"a piece of {len(chunk.data)} bytes does not fit into block {self._ordinal}")

    def _finish_block(self, checksum: int) -> None:
        if self._store.checksum(self._block_ids[self._ordinal]) != checksum:
            raise KvChecksumError(self._ordinal)
        self._ordinal += 1
        self._offset = 0
