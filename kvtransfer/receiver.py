"""The receiver's side of a hand-over: pulls a prompt's blocks into reserved ones, all of them or none.

It knows no engine: the caller reserves the blocks before, and commits or frees them after.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass

from kvtransfer.block_store import BlockStore
from kvtransfer.chunks import KvChunk, KvMessage, LeaseState
from kvtransfer.keep_alive import keep_alive
from kvtransfer.landing import Landing
from kvtransfer.transports.base import KVTransport
from paceline.core.errors import KvError, KvLostError, LeaseExpiredError, PacelineError
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.kv_layout import BlockId
from paceline.core.request import FirstToken
from paceline.core.ticket import KvTicket


@dataclass(frozen=True, slots=True)
class HandOverTimes:
    """How long a receiver waits for the next message and for the answer to a release, and how often it renews.

    A stall is a wait of `stall_timeout_s` without a message; after each the owner is asked whether it is still there.
    """

    stall_timeout_s: float = 20.0
    max_stalls: int = 15
    release_timeout_s: float = 2.0
    renew_every_s: float = 5.0


@dataclass(frozen=True, slots=True)
class ReceivedKv:
    """What came: the blocks that travelled, and the first token of each candidate."""

    first_tokens: tuple[FirstToken, ...]
    num_blocks: int
    num_bytes: int


class KVReceiver:
    """Receives hand-overs, any number at a time. Raises KvError or FingerprintMismatchError, nothing else of its own.

    When `receive` returns, every block holds exactly what its owner computed, and the owner has let go of its copy.
    When it raises, the reserved blocks hold rubbish. After either, nothing writes to them any more.
    """

    def __init__(
        self,
        transport: KVTransport,
        store: BlockStore,
        fingerprint: ModelFingerprint,
        times: HandOverTimes | None = None,
    ) -> None:
        self._transport = transport
        self._store = store
        self._fingerprint = fingerprint
        self._times = times or HandOverTimes()
        # The loop itself holds tasks only weakly.
        self._giving_back: set[asyncio.Task[None]] = set()

    async def receive(self, ticket: KvTicket, block_ids: Sequence[BlockId], num_held: int) -> ReceivedKv:
        """The whole hand-over, for a caller that has its blocks already."""
        async with self.hold(ticket) as hand_over:
            return await hand_over.receive(block_ids, num_held)

    @asynccontextmanager
    async def hold(self, ticket: KvTicket) -> AsyncGenerator["HandOver", None]:
        """Keeps the lease alive while the body waits for room and receives.

        However the body ends without having received, the owner gets its blocks back at once.
        """
        hand_over = HandOver(ticket, self._transport, self._store, self._times)
        try:
            self._fingerprint.require_same(ticket.fingerprint)
            async with keep_alive(self._transport, ticket, every_s=self._times.renew_every_s):
                yield hand_over
        finally:
            if not hand_over.is_received:
                await self._give_back(ticket)

    async def _give_back(self, ticket: KvTicket) -> None:
        """Ends the lease, also when we are cancelled again meanwhile; if that fails, its clock ends it."""
        release = asyncio.create_task(self._release_quietly(ticket))
        self._giving_back.add(release)
        release.add_done_callback(self._giving_back.discard)
        await asyncio.shield(release)

    async def _release_quietly(self, ticket: KvTicket) -> None:
        with suppress(PacelineError, TimeoutError):
            async with asyncio.timeout(self._times.release_timeout_s):
                await self._transport.release(ticket)


class HandOver:
    """One lease that is held for reading."""

    def __init__(
        self, ticket: KvTicket, transport: KVTransport, store: BlockStore, times: HandOverTimes
    ) -> None:
        self.is_received = False
        self._ticket = ticket
        self._transport = transport
        self._store = store
        self._times = times

    async def receive(self, block_ids: Sequence[BlockId], num_held: int) -> ReceivedKv:
        """Fills `block_ids`, one for each block of the ticket in order, apart from the first `num_held`.

        Those are here already, and are neither pulled nor written.
        """
        assert len(block_ids) == self._ticket.num_blocks, "reserve one block for each of the ticket's"
        assert 0 <= num_held <= len(self._ticket.block_hashes), "only full blocks can be held"
        landing = Landing(self._store, block_ids, num_held)
        first_tokens = await self._pull(num_held, landing)
        await self._confirm()
        self.is_received = True
        return ReceivedKv(first_tokens, len(block_ids) - num_held, landing.num_bytes)

    async def _pull(self, num_held: int, landing: Landing) -> tuple[FirstToken, ...]:
        held_hashes = self._ticket.block_hashes[:num_held]
        async with aclosing(self._transport.pull(self._ticket, held_hashes)) as messages:
            while isinstance(message := await self._next(messages), KvChunk):
                landing.write(message)
        landing.require_all()
        return message.first_tokens

    async def _next(self, messages: AsyncGenerator[KvMessage, None]) -> KvMessage:
        """The next message. A chunk may take long to compute, behind others; but the owner must be there meanwhile."""
        arriving = asyncio.ensure_future(anext(messages, None))
        try:
            await self._until_done(arriving)
        finally:
            await _cancelled(arriving)
        message = arriving.result()
        if message is None:
            raise KvLostError("the blocks stopped before their end; prefill again")
        return message

    async def _until_done(self, arriving: "asyncio.Future[KvMessage | None]") -> None:
        for _ in range(self._times.max_stalls):
            done, _ = await asyncio.wait({arriving}, timeout=self._times.stall_timeout_s)
            if done:
                return
            await self._require_owner()
        raise KvLostError("the owner answers, but its blocks do not come; prefill again")

    async def _require_owner(self) -> None:
        """A silent owner may be busy with others' chunks; one that does not answer, or knows no lease, is lost."""
        stalled = f"no block came for {self._times.stall_timeout_s:g} s, and the owner"
        try:
            async with asyncio.timeout(self._times.release_timeout_s):
                state = await self._transport.renew(self._ticket)
        except (KvError, TimeoutError):
            raise KvLostError(f"{stalled} does not answer; prefill again") from None
        if state is not LeaseState.VALID:
            raise KvLostError(f"{stalled} holds the lease no more; prefill again")

    async def _confirm(self) -> None:
        """Only the owner knows whether the blocks were still the lease's when the last byte was read."""
        try:
            async with asyncio.timeout(self._times.release_timeout_s):
                state = await self._transport.release(self._ticket)
        except TimeoutError:
            raise KvLostError("the owner did not say whether the lease still held; prefill again") from None
        if state is not LeaseState.VALID:
            raise LeaseExpiredError(f"lease {self._ticket.lease_id} ended before the last byte was safe")


async def _cancelled(task: "asyncio.Future[KvMessage | None]") -> None:
    """Returns when the task has ended, cancelling it if need be: its generator can be closed only then."""
    task.cancel()
    await asyncio.wait({task})
