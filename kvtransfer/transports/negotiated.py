"""Chooses for each owner the best way that both sides can use, in one handshake, and leaves it for gRPC when it fails in use."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.chunks import KvMessage, LeaseState
from kvtransfer.offer import MemoryOffer
from kvtransfer.transports.base import KVTransport, TransportBrokenError
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.instrumented import InstrumentedTransport, PullCounts, TransportStats
from paceline.core.block_hash import BlockHash
from paceline.core.errors import KvChecksumError, KvError
from paceline.core.kv_layout import BlockId
from paceline.core.request import BootEpoch
from paceline.core.ticket import KvTicket
from paceline.runtime.log import get_logger

GRPC = "grpc"

log = get_logger()


class Way(Protocol):
    """A kind of transport that reads owners' pools itself."""

    @property
    def name(self) -> str:
        """What it is called in settings, logs and metrics."""

    @property
    def writes_in_place(self) -> bool:
        """Whether blocks come to their places by themselves: then they must be cut as the receiver's are."""

    def connect(self, offer: MemoryOffer) -> KVTransport:
        """The transport to one owner in one of its lives; raises TransportBrokenError, saying why, when that cannot be."""

    def settling(self, into: Sequence[BlockId]) -> "asyncio.Future[None] | None":
        """See KVTransport.settling; of all its transports, also those that nobody uses any more."""

    async def aclose(self) -> None:
        """Ends what it has opened; nobody pulls any more."""


@dataclass(eq=False, slots=True)
class _Link:
    """What was agreed on with an owner in one of its lives."""

    boot_epoch: BootEpoch
    name: str
    transport: KVTransport
    writes_in_place: bool = False
    forgetting: asyncio.TimerHandle | None = None


class NegotiatedTransport:
    """Pulls by the first of `ways` that works with the owner, else by gRPC, unless `is_required`; everything else goes over gRPC.

    So do blocks that have to be converted, where the way would write them in place.

    What was agreed on holds for the owner's life. A way that has failed in use, or has brought a damaged block, is not tried again in
    it. A link that nobody uses for `idle_s` seconds is forgotten: it may hold the memory of an owner that is long dead.
    """

    def __init__(
        self, grpc: GrpcTransport, ways: Sequence[Way], *, is_required: bool = False, idle_s: float = 60.0
    ) -> None:
        self._grpc = grpc
        self._ways = tuple(ways)
        self._is_required = is_required
        self._idle_s = idle_s
        self._links: dict[str, _Link] = {}
        self._counts = {name: PullCounts() for name in (GRPC, *(way.name for way in ways))}
        self.num_fallbacks = 0

    async def pull(
        self, ticket: KvTicket, held_hashes: Sequence[BlockHash], into: Sequence[BlockId]
    ) -> AsyncGenerator[KvMessage, None]:
        """The messages of the way that is taken with the ticket's owner. Throw in what is wrong with one, so that it is noted."""
        link = await self._agreed(ticket)
        if link.writes_in_place and not into:
            # Blocks that are cut in another way than ours have no places among them.
            if self._is_required:
                raise TransportBrokenError(
                    f"blocks of {ticket.owner_id} must be converted, and --kv-transport {link.name} writes them in place; "
                    "set it to auto"
                )
            link = self._by_grpc(ticket)
        try:
            async with aclosing(link.transport.pull(ticket, held_hashes, into)) as messages:
                async for message in messages:
                    yield message
        except TransportBrokenError as error:
            self._fall_back(ticket, link, error)
            raise
        except KvChecksumError as error:
            # Blocks of a lease that has ended meanwhile are another request's, and match nothing.
            if await self._still_holds(ticket):
                self._fall_back(ticket, link, error)
            raise
        except KvError:
            # The owner may be gone, and nobody else would let go of its memory.
            self._forget(ticket.owner_address, link)
            raise
        finally:
            self._forget_later(ticket.owner_address, link)

    def settling(self, into: Sequence[BlockId]) -> "asyncio.Future[None] | None":
        """The first way's that may still write."""
        return next((settling for way in self._ways if (settling := way.settling(into))), None)

    async def renew(self, tickets: Sequence[KvTicket]) -> list[LeaseState]:
        """Keeps the leases alive."""
        return await self._grpc.renew(tickets)

    async def release(self, ticket: KvTicket) -> LeaseState:
        """Ends the lease."""
        return await self._grpc.release(ticket)

    def stats(self) -> dict[str, TransportStats]:
        """What came by each way."""
        return {name: counts.stats() for name, counts in self._counts.items()}

    async def aclose(self) -> None:
        """Lets go of everything; nobody pulls any more."""
        for address, link in list(self._links.items()):
            self._forget(address, link)
        for way in self._ways:
            await way.aclose()

    # -- agreeing

    async def _agreed(self, ticket: KvTicket) -> _Link:
        known = self._known(ticket)
        if known is not None:
            return known
        if not self._ways:
            return self._by_grpc(ticket)
        try:
            offer = await self._grpc.describe(ticket)
        except KvError as error:
            if self._is_required:
                raise
            # Whether the owner is there at all, the pull will show; the next one asks again.
            self._log_fallback(ticket, str(error))
            return self._by_grpc(ticket)
        # Several may have asked at a time.
        link = self._known(ticket) or self._agree(ticket, offer)
        self._links[ticket.owner_address] = link
        return link

    def _known(self, ticket: KvTicket) -> _Link | None:
        link = self._links.get(ticket.owner_address)
        return link if link is not None and link.boot_epoch == ticket.boot_epoch else None

    def _agree(self, ticket: KvTicket, offer: MemoryOffer) -> _Link:
        passed_over: dict[str, str] = {}
        for way in self._ways:
            try:
                transport = way.connect(offer)
            except TransportBrokenError as error:
                passed_over[way.name] = str(error)
                continue
            log.info("kv_transport", owner=ticket.owner_id, transport=way.name, passed_over=passed_over)
            return self._link(ticket, way.name, transport, writes_in_place=way.writes_in_place)
        if self._is_required:
            why = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items())
            raise TransportBrokenError(
                f"blocks of {ticket.owner_id} cannot come by --kv-transport ({why}); set it to auto on both workers"
            )
        log.info("kv_transport", owner=ticket.owner_id, transport=GRPC, passed_over=passed_over)
        return self._by_grpc(ticket)

    def _by_grpc(self, ticket: KvTicket) -> _Link:
        return self._link(ticket, GRPC, self._grpc)

    def _link(
        self, ticket: KvTicket, name: str, transport: KVTransport, *, writes_in_place: bool = False
    ) -> _Link:
        counted = InstrumentedTransport(transport, self._counts[name])
        return _Link(ticket.boot_epoch, name, counted, writes_in_place)

    # -- leaving

    async def _still_holds(self, ticket: KvTicket) -> bool:
        try:
            return await self._grpc.renew([ticket]) == [LeaseState.VALID]
        except KvError:
            return False

    def _fall_back(self, ticket: KvTicket, link: _Link, error: KvError) -> None:
        if link.name == GRPC:
            return
        self._forget(ticket.owner_address, link)
        if not self._is_required and self._known(ticket) is None:
            self._links[ticket.owner_address] = self._by_grpc(ticket)
        self._log_fallback(ticket, f"{link.name}: {error}")

    def _log_fallback(self, ticket: KvTicket, why: str) -> None:
        self.num_fallbacks += 1
        log.warning("kv_transport_fallback", owner=ticket.owner_id, why=why)

    def _forget(self, address: str, link: _Link) -> None:
        if link.forgetting is not None:
            link.forgetting.cancel()
        if self._links.get(address) is link and link.name != GRPC:
            del self._links[address]

    def _forget_later(self, address: str, link: _Link) -> None:
        if link.forgetting is not None:
            link.forgetting.cancel()
        if self._links.get(address) is link and link.name != GRPC:
            loop = asyncio.get_running_loop()
            link.forgetting = loop.call_later(self._idle_s, self._forget, address, link)
