"""A transport that does to messages what bad days do, to plan; for tests, demos and game days."""

import asyncio
import enum
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from kvtransfer.chunks import KvChunk, KvMessage, KvWritten, LeaseState
from kvtransfer.transports.base import KVTransport, TransportBrokenError
from paceline.core.block_hash import BlockHash
from paceline.core.errors import KvLostError
from paceline.core.kv_layout import BlockId
from paceline.core.ticket import KvTicket


class FaultKind(enum.Enum):
    """What happens to a message of a pull, or to the calls beside it."""

    DELAY = "it comes `delay_s` late"
    STALL = "it and all after it never come"
    CUT = "the stream ends before it"
    BREAK = "the stream fails before it"
    BREAK_WAY = "the stream fails before it, and says that this transport will not do"
    DROP = "it is left out"
    DUPLICATE = "it comes twice"
    REORDER = "it comes after the next one"
    TRUNCATE = "its last byte is missing"
    CORRUPT = "one of its bits is flipped"
    MISPLACE = "it names the block after its own"
    LOSE_RENEWALS = "no renewal arrives"
    LOSE_RELEASE = "no release arrives"
    LOSE_RELEASE_ANSWER = "releases arrive, their answers do not"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `at` counts the messages of a pull from 0; the kinds that begin with LOSE ignore it."""

    kind: FaultKind
    at: int = 0
    delay_s: float = 0.0


class FaultyTransport:
    """Passes everything on to the next transport, apart from its faults; every pull meets them anew.

    `struck` counts those that have happened: one behind a pull's end has not.
    """

    def __init__(
        self,
        next_transport: KVTransport,
        faults: Sequence[Fault],
        *,
        struck: Counter[FaultKind] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._next = next_transport
        self._faults = tuple(faults)
        self._kinds = frozenset(fault.kind for fault in faults)
        self.struck = Counter() if struck is None else struck
        self._sleep = sleep

    async def pull(
        self, ticket: KvTicket, held_hashes: Sequence[BlockHash], into: Sequence[BlockId]
    ) -> AsyncGenerator[KvMessage, None]:
        """The next transport's messages, damaged."""
        index = 0
        late: list[KvMessage] = []
        async with aclosing(self._next.pull(ticket, held_hashes, into)) as messages:
            async for message in messages:
                faults = [fault for fault in self._faults if fault.at == index]
                index += 1
                if any(fault.kind is FaultKind.CUT for fault in faults):
                    self.struck[FaultKind.CUT] += 1
                    return
                await self._hold_up(faults)
                sent = self._damaged(message, faults)
                if any(fault.kind is FaultKind.REORDER for fault in faults):
                    late += sent
                    continue
                self.struck[FaultKind.REORDER] += bool(late)
                for damaged in (*sent, *late):
                    yield damaged
                late.clear()
        for damaged in late:
            yield damaged

    def settling(self, into: Sequence[BlockId]) -> "asyncio.Future[None] | None":
        """The next transport's."""
        return self._next.settling(into)

    async def renew(self, tickets: Sequence[KvTicket]) -> list[LeaseState]:
        """The next transport's answer, unless it is lost."""
        if self._strikes(FaultKind.LOSE_RENEWALS):
            raise KvLostError("the renewal was lost, to plan")
        return await self._next.renew(tickets)

    async def release(self, ticket: KvTicket) -> LeaseState:
        """The next transport's answer, unless it or the question is lost."""
        if self._strikes(FaultKind.LOSE_RELEASE):
            raise KvLostError("the release was lost, to plan")
        state = await self._next.release(ticket)
        if self._strikes(FaultKind.LOSE_RELEASE_ANSWER):
            raise KvLostError("the answer to the release was lost, to plan")
        return state

    def _strikes(self, kind: FaultKind) -> bool:
        self.struck[kind] += kind in self._kinds
        return kind in self._kinds

    async def _hold_up(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            self.struck[fault.kind] += fault.kind in _HOLDING_UP
            if fault.kind is FaultKind.DELAY:
                await self._sleep(fault.delay_s)
            elif fault.kind is FaultKind.STALL:
                await asyncio.Event().wait()
            elif fault.kind is FaultKind.BREAK_WAY:
                raise TransportBrokenError("the transport broke, to plan")
            elif fault.kind is FaultKind.BREAK:
                raise KvLostError("the stream broke, to plan")

    def _damaged(self, message: KvMessage, faults: Sequence[Fault]) -> list[KvMessage]:
        sent = [message]
        for fault in faults:
            damage = _DAMAGE.get(fault.kind, _unharmed)
            damaged = [after for before in sent for after in damage(before)]
            self.struck[fault.kind] += damaged != sent
            sent = damaged
        return sent


def _unharmed(message: KvMessage) -> list[KvMessage]:
    return [message]


def _dropped(_message: KvMessage) -> list[KvMessage]:
    return []


def _duplicated(message: KvMessage) -> list[KvMessage]:
    return [message, message]


def _truncated(message: KvMessage) -> list[KvMessage]:
    match message:
        case KvChunk():
            return [replace(message, data=message.data[:-1])]
        case KvWritten():
            return [replace(message, num_bytes=message.num_bytes - 1)]
        case _:
            return []


def _corrupted(message: KvMessage) -> list[KvMessage]:
    match message:
        case KvChunk() if message.data:
            return [replace(message, data=bytes([message.data[0] ^ 1]) + bytes(message.data[1:]))]
        case KvWritten():
            # Its bytes are in their place already; to the receiver a flipped bit of the checksum is the same.
            return [replace(message, checksum=message.checksum ^ 1)]
        case _:
            return [message]


def _misplaced(message: KvMessage) -> list[KvMessage]:
    if isinstance(message, KvChunk | KvWritten):
        return [replace(message, ordinal=message.ordinal + 1)]
    return [message]


_HOLDING_UP = (FaultKind.DELAY, FaultKind.STALL, FaultKind.BREAK_WAY, FaultKind.BREAK)
_DAMAGE: dict[FaultKind, Callable[[KvMessage], list[KvMessage]]] = {
    FaultKind.DROP: _dropped,
    FaultKind.DUPLICATE: _duplicated,
    FaultKind.TRUNCATE: _truncated,
    FaultKind.CORRUPT: _corrupted,
    FaultKind.MISPLACE: _misplaced,
}
