"""Keeps leases from expiring while somebody is about to read under them, or reads.

There is one task for each peer, which is an owner in one of its lives: it renews all leases that are held there in one
call, every few seconds, however many there are.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from kvtransfer.chunks import LeaseState
from kvtransfer.transports.base import KVTransport
from paceline.core.errors import LeaseExpiredError, PacelineError
from paceline.core.request import BootEpoch
from paceline.core.ticket import KvTicket
from paceline.runtime.log import get_logger

log = get_logger()

# A lease's name takes some 34 bytes, so that a message of so many stays far below gRPC's limit of 4 MiB.
MAX_LEASES_PER_CALL = 1024


class Peer(NamedTuple):
    """An owner in one of its lives."""

    address: str
    boot_epoch: BootEpoch


class Kept:
    """One lease that is renewed until it is settled, or has ended."""

    def __init__(self, ticket: KvTicket, pulse: "_Pulse") -> None:
        self.ticket = ticket
        self.has_ended = False
        # Interrupts the one who holds the lease.
        self.life = asyncio.timeout(None)
        self._pulse = pulse

    def settle(self) -> None:
        """The lease is about to be released: it is not renewed any more, and what a renewal under way says of it is ignored."""
        self._pulse.kept.pop(self, None)

    def end(self) -> None:
        """The owner says that it has ended. Nothing that is read under it could be committed, so whoever reads stops."""
        self.has_ended = True
        self.life.reschedule(asyncio.get_running_loop().time())


class KeepAlive:
    """The heartbeats of one worker. Tickets join and leave at any time; a peer's task ends with its last one."""

    def __init__(self, transport: KVTransport, *, every_s: float = 5.0) -> None:
        self._transport = transport
        self._every_s = every_s
        self._pulses: dict[Peer, _Pulse] = {}

    @property
    def num_peers(self) -> int:
        """Owners of which a lease is held."""
        return len(self._pulses)

    @asynccontextmanager
    async def keep(self, ticket: KvTicket) -> AsyncGenerator[Kept, None]:
        """Renews the ticket's lease while the body runs.

        A renewal that fails says nothing: the owner may be slow. One that is answered EXPIRED ends the body with
        LeaseExpiredError, unless the lease is settled by then.
        """
        peer = Peer(ticket.owner_address, ticket.boot_epoch)
        pulse = self._pulses.get(peer)
        if pulse is None:
            pulse = self._pulses[peer] = _Pulse(self._transport, self._every_s)
        kept = Kept(ticket, pulse)
        pulse.kept[kept] = pulse.members[kept] = None
        try:
            async with kept.life:
                yield kept
        except TimeoutError:
            if not kept.has_ended:
                raise
            raise LeaseExpiredError(f"{ticket.owner_id} has ended lease {ticket.lease_id}") from None
        finally:
            await self._leave(peer, pulse, kept)

    async def _leave(self, peer: Peer, pulse: "_Pulse", kept: Kept) -> None:
        kept.settle()
        del pulse.members[kept]
        if not pulse.members:
            # At once: who comes while this task ends gets another one.
            del self._pulses[peer]
            await pulse.stop()


class _Pulse:
    """Renews what is kept at one peer. Its members are those whose bodies still run, settled or not."""

    def __init__(self, transport: KVTransport, every_s: float) -> None:
        self.members: dict[Kept, None] = {}
        self.kept: dict[Kept, None] = {}
        self._transport = transport
        self._every_s = every_s
        self._task = asyncio.create_task(self._beat_forever())

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            kept = list(self.kept)
            for begin in range(0, len(kept), MAX_LEASES_PER_CALL):
                await self._renew(kept[begin : begin + MAX_LEASES_PER_CALL])

    async def _renew(self, batch: Sequence[Kept]) -> None:
        try:
            states = await self._transport.renew([kept.ticket for kept in batch])
            told = list(zip(batch, states, strict=True))
        except PacelineError:
            return
        except Exception:
            # Others' leases hang on this task: one call that went wrong in a way nobody knows must not end it.
            log.exception("heartbeat_broken", owner=batch[0].ticket.owner_id)
            return
        for kept, state in told:
            if state is LeaseState.EXPIRED and kept in self.kept:
                kept.settle()
                kept.end()
