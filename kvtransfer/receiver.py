"""The receiver's side of a hand-over: pulls a prompt's blocks into reserved ones, all of them or none.

It knows no engine: the caller reserves the blocks before, and commits or frees them after.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from kvtransfer.block_store import BlockStore
from kvtransfer.chunks import KvMessage, LeaseState, PullEnd
from kvtransfer.conversion import BlockConversion, require_all_heads
from kvtransfer.keep_alive import KeepAlive, Kept
from kvtransfer.landing import ConvertingLanding, DirectLanding, Landing
from kvtransfer.transports.base import KVTransport
from paceline.core.errors import KvError, KvLostError, LeaseExpiredError, PacelineError
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.kv_layout import BlockId, KVLayout
from paceline.core.request import FirstToken
from paceline.core.ticket import KvTicket

# So long somebody who gives a lease back waits for the answer, which changes nothing.
_ANSWER_S = 0.2


@dataclass(frozen=True, slots=True)
class HandOverTimes:
    """How long a receiver waits for the next message and for the answer to a release.

    A stall is a wait of `stall_timeout_s` without a message; after each the owner is asked whether it is still there.
    """

    stall_timeout_s: float = 20.0
    max_stalls: int = 15
    release_timeout_s: float = 2.0


@dataclass(frozen=True, slots=True)
class ReceivedKv:
    """What came: the blocks that travelled, and the first token of each candidate."""

    first_tokens: tuple[FirstToken, ...]
    num_blocks: int
    num_bytes: int


class KVReceiver:
    """Receives hand-overs, any number at a time. Raises KvError or FingerprintMismatchError, nothing else of its own.

    When `receive` returns, every block holds exactly what its owner computed, the owner has let go of its copy, and nothing
    writes to the blocks any more. When it raises, the reserved blocks hold rubbish, and an engine that writes in place may
    go on for a while: `when_settled` and `until_settled` say when they can be used for something else.

    With the `layout` of the store, blocks that are cut in another way are converted; without it they are refused.
    """

    def __init__(
        self,
        transport: KVTransport,
        store: BlockStore,
        fingerprint: ModelFingerprint,
        times: HandOverTimes | None = None,
        *,
        layout: KVLayout | None = None,
        keep_alive: KeepAlive | None = None,
    ) -> None:
        self._transport = transport
        self._store = store
        self._fingerprint = fingerprint
        self._times = times or HandOverTimes()
        self._layout = layout
        # Receivers of one worker share it, so that a peer hears from the worker once.
        self._keep_alive = keep_alive or KeepAlive(transport)
        # The loop itself holds tasks only weakly.
        self._giving_back: set[asyncio.Task[None]] = set()

    async def receive(self, ticket: KvTicket, block_ids: Sequence[BlockId], num_held: int) -> ReceivedKv:
        """The whole hand-over, for a caller that has its blocks already."""
        async with self.hold(ticket) as hand_over:
            return await hand_over.receive(block_ids, num_held)

    async def receive_parts(
        self, tickets: Sequence[KvTicket], block_ids: Sequence[BlockId], num_held: int
    ) -> list[ReceivedKv]:
        """The same from several owners, each of which has a part of the heads: all of them or none."""
        async with AsyncExitStack() as stack:
            parts = [await stack.enter_async_context(self.hold(ticket)) for ticket in tickets]
            require_all_heads([part.conversion for part in parts])
            return [await part.receive_part(block_ids, num_held) for part in parts]

    @asynccontextmanager
    async def hold(self, ticket: KvTicket) -> AsyncGenerator["HandOver", None]:
        """Keeps the lease alive while the body waits for room and receives; LeaseExpiredError as soon as it is known to have ended.

        However the body ends without having received, the owner gets its blocks back at once.
        """
        hand_over: HandOver | None = None
        try:
            conversion = self._conversion(ticket.fingerprint)
            async with self._keep_alive.keep(ticket) as kept:
                hand_over = HandOver(kept, self._transport, self._store, self._times)
                hand_over.conversion = conversion
                yield hand_over
        finally:
            if hand_over is None or not hand_over.is_received:
                await self._give_back(ticket)

    def _conversion(self, fingerprint: ModelFingerprint) -> BlockConversion | None:
        if self._layout is None:
            self._fingerprint.require_same(fingerprint)
            return None
        self._fingerprint.require_same_content(fingerprint)
        return BlockConversion.between(fingerprint, self._layout)

    def when_settled(self, block_ids: Sequence[BlockId], then: Callable[[], None]) -> None:
        """After a hand-over into these blocks: calls `then` as soon as nothing writes to them any more, which may be now."""
        settling = self._transport.settling(block_ids)
        if settling is None:
            then()
        else:
            settling.add_done_callback(lambda _: then())

    async def until_settled(self, block_ids: Sequence[BlockId]) -> None:
        """Returns when nothing writes to these blocks any more. A cancel meanwhile comes after that."""
        settling = self._transport.settling(block_ids)
        if settling is not None:
            await _outlasted(settling)

    async def _give_back(self, ticket: KvTicket) -> None:
        """Ends the lease, also when we are cancelled again meanwhile; if that fails, its clock ends it. A slow answer is not waited for."""
        release = asyncio.create_task(self._release_quietly(ticket))
        self._giving_back.add(release)
        release.add_done_callback(self._giving_back.discard)
        done, _ = await asyncio.wait({release}, timeout=_ANSWER_S)
        for each in done:
            # An error that is none of ours is a bug, and whoever called hears of it.
            each.result()

    async def _release_quietly(self, ticket: KvTicket) -> None:
        with suppress(PacelineError, TimeoutError):
            async with asyncio.timeout(self._times.release_timeout_s):
                await self._transport.release(ticket)


class HandOver:
    """One lease that is held for reading."""

    def __init__(self, kept: Kept, transport: KVTransport, store: BlockStore, times: HandOverTimes) -> None:
        self.is_received = False
        self.conversion: BlockConversion | None = None
        self._kept = kept
        self._ticket = kept.ticket
        self._transport = transport
        self._store = store
        self._times = times
        self._last_message_s = 0.0

    async def receive(self, block_ids: Sequence[BlockId], num_held: int) -> ReceivedKv:
        """Fills `block_ids`, which are for the tokens of the ticket's blocks, in order, apart from the first `num_held`.

        Those are here already, and are neither pulled nor written. Raises FingerprintMismatchError where the owner has only a part of
        the heads.
        """
        require_all_heads([self.conversion])
        return await self.receive_part(block_ids, num_held)

    async def receive_part(self, block_ids: Sequence[BlockId], num_held: int) -> ReceivedKv:
        """The same, for a caller who gets the other heads elsewhere."""
        landing, messages = self._open(block_ids, num_held)
        pulling = asyncio.create_task(self._land(messages, landing))
        try:
            await self._until_done(pulling)
        finally:
            await _cancelled(pulling)
        first_tokens = pulling.result()
        # A renewal that the owner sees after the release is answered EXPIRED, which says nothing then.
        self._kept.settle()
        await self._confirm()
        self.is_received = True
        return ReceivedKv(first_tokens, landing.num_blocks, landing.num_bytes)

    def _open(
        self, block_ids: Sequence[BlockId], num_held: int
    ) -> tuple[Landing, AsyncGenerator[KvMessage, None]]:
        ticket, conversion = self._ticket, self.conversion
        if conversion is None:
            assert len(block_ids) == ticket.num_blocks, "reserve one block for each of the ticket's"
            assert 0 <= num_held <= len(ticket.block_hashes), "only full blocks can be held"
            landing: Landing = DirectLanding(self._store, block_ids, num_held)
            return landing, self._transport.pull(ticket, ticket.block_hashes[:num_held], block_ids)
        landing = ConvertingLanding(
            conversion, self._store, block_ids, num_held=num_held, num_their_blocks=ticket.num_blocks
        )
        num_their_held = conversion.num_their_blocks_held(num_held * conversion.ours.block_size)
        # An engine that writes in place would put their blocks where ours belong.
        return landing, self._transport.pull(ticket, ticket.block_hashes[:num_their_held], into=())

    async def _land(
        self, messages: AsyncGenerator[KvMessage, None], landing: Landing
    ) -> tuple[FirstToken, ...]:
        """In one task, however many messages come."""
        self._note_message()
        async with aclosing(messages):
            async for message in messages:
                self._note_message()
                if isinstance(message, PullEnd):
                    landing.require_all()
                    return message.first_tokens
                try:
                    landing.take(message)
                except KvError as error:
                    # The transport hears of it too: it may know another way for the next time.
                    await messages.athrow(error)
        raise KvLostError("the blocks stopped before their end; prefill again")

    def _note_message(self) -> None:
        self._last_message_s = asyncio.get_running_loop().time()

    async def _until_done(self, pulling: "asyncio.Task[tuple[FirstToken, ...]]") -> None:
        """A chunk may take long to compute, behind others; but the owner must be there meanwhile."""
        loop, patience_s = asyncio.get_running_loop(), self._times.stall_timeout_s
        num_stalls, look_s = 0, loop.time() + patience_s
        while True:
            done, _ = await asyncio.wait({pulling}, timeout=look_s - loop.time())
            if done:
                return
            if self._last_message_s + patience_s > loop.time():
                num_stalls, look_s = 0, self._last_message_s + patience_s
                continue
            num_stalls += 1
            if num_stalls == self._times.max_stalls:
                raise KvLostError(f"no block came for {num_stalls} times {patience_s:g} s; prefill again")
            await self._require_owner()
            look_s = loop.time() + patience_s

    async def _require_owner(self) -> None:
        """A silent owner may be busy with others' chunks; one that does not answer, or knows no lease, is lost."""
        stalled = f"no block came for {self._times.stall_timeout_s:g} s, and the owner"
        try:
            async with asyncio.timeout(self._times.release_timeout_s):
                (state,) = await self._transport.renew([self._ticket])
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


async def _cancelled(task: "asyncio.Task[tuple[FirstToken, ...]]") -> None:
    """Returns when the task has ended, cancelling it if need be: until then it may write."""
    task.cancel()
    await _outlasted(task)
    if not task.cancelled():
        # Whoever wants to know asks again; nobody may, after another error.
        task.exception()


async def _outlasted(future: "asyncio.Future[Any]") -> None:
    """Returns when it is done, also when we are cancelled meanwhile; that comes after."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
