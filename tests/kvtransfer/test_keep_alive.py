"""Leases that are held at one peer are renewed together, whoever joins or leaves meanwhile."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from kvtransfer.chunks import LeaseState
from kvtransfer.keep_alive import MAX_LEASES_PER_CALL, KeepAlive
from kvtransfer.leases import LeasePhase
from kvtransfer.receiver import KVReceiver
from kvtransfer.transports.faulty import Fault, FaultKind, FaultyTransport
from kvtransfer.transports.local import LocalTransport
from paceline.core.errors import KvLostError, LeaseExpiredError
from paceline.core.kv_layout import BlockId
from paceline.core.request import BootEpoch
from paceline.core.ticket import KvTicket
from tests.kvtransfer.hand_over import FINGERPRINT, Owner, random_store
from tests.virtual_time import in_virtual_time, virtual_clock


class Watched(FaultyTransport):
    """Notes when which leases were renewed together; fails, or takes its time, when told to."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(LocalTransport(owner.sender, FINGERPRINT), ())
        self.calls: list[tuple[float, list[KvTicket]]] = []
        self.num_to_lose = 0
        self.error: Exception = KvLostError("lost")
        self.renewal_s = 0.0

    async def renew(self, tickets: Sequence[KvTicket]) -> list[LeaseState]:
        """See KVTransport.renew."""
        self.calls.append((virtual_clock(), list(tickets)))
        if self.num_to_lose:
            self.num_to_lose -= 1
            raise self.error
        states = await super().renew(tickets)
        await asyncio.sleep(self.renewal_s)
        return states


class Bench:
    """An owner, and a worker that keeps leases there alive."""

    def __init__(self) -> None:
        self.owner = Owner(virtual_clock)
        self.transport = Watched(self.owner)
        self.keep_alive = KeepAlive(self.transport)

    def ticket(self, block_id: int = 0) -> KvTicket:
        """The right to pull a complete prompt of one block."""
        return self.owner.ticket(self.owner.granted([block_id]))


@in_virtual_time
async def test_all_leases_of_a_peer_are_renewed_in_one_call() -> None:
    """Every 5 s, in the order in which they joined, for as long as they are held."""
    bench = Bench()
    tickets = [bench.ticket(block_id) for block_id in range(3)]
    async with AsyncExitStack() as held:
        for ticket in tickets:
            await held.enter_async_context(bench.keep_alive.keep(ticket))
        assert bench.keep_alive.num_peers == 1
        await asyncio.sleep(61)
    assert bench.transport.calls == [(5.0 * beat, tickets) for beat in range(1, 13)]
    assert bench.owner.leases.stats().num_active == 3


@in_virtual_time
async def test_tickets_join_and_leave_at_any_time() -> None:
    """Each call names those that are held then; with the last one the peer's task is gone."""
    bench = Bench()
    first, second = bench.ticket(0), bench.ticket(1)
    async with bench.keep_alive.keep(first):
        await asyncio.sleep(7)
        async with bench.keep_alive.keep(second):
            await asyncio.sleep(5)
        await asyncio.sleep(5)
    await asyncio.sleep(60)
    assert bench.transport.calls == [(5.0, [first]), (10.0, [first, second]), (15.0, [first])]
    assert bench.keep_alive.num_peers == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


@in_virtual_time
async def test_each_life_of_an_owner_is_a_peer_of_its_own() -> None:
    """An old ticket of a worker that has restarted does not travel with those of its new life, and only it ends."""
    bench = Bench()
    ticket = bench.ticket()
    stale = replace(bench.ticket(1), boot_epoch=BootEpoch(10))
    async with bench.keep_alive.keep(ticket):
        with pytest.raises(LeaseExpiredError):  # noqa: PT012 (the body is what is interrupted)
            async with bench.keep_alive.keep(stale):
                assert bench.keep_alive.num_peers == 2
                await asyncio.sleep(60)
        await asyncio.sleep(2)
    assert bench.transport.calls == [(5.0, [ticket]), (5.0, [stale])]


@in_virtual_time
async def test_a_call_names_a_bounded_number_of_leases() -> None:
    """More leases than one message may name are renewed in several, in the same beat."""
    bench = Bench()
    ticket = bench.ticket()
    async with AsyncExitStack() as held:
        for _ in range(MAX_LEASES_PER_CALL + 3):
            await held.enter_async_context(bench.keep_alive.keep(ticket))
        await asyncio.sleep(6)
    assert [(when_s, len(tickets)) for when_s, tickets in bench.transport.calls] == [
        (5.0, MAX_LEASES_PER_CALL),
        (5.0, 3),
    ]


@in_virtual_time
async def test_a_renewal_that_fails_does_not_end_the_renewing() -> None:
    """Lost renewals are nothing, as long as one comes through in time."""
    bench = Bench()
    bench.transport.num_to_lose = 4
    ticket = bench.ticket()
    async with bench.keep_alive.keep(ticket):
        await asyncio.sleep(300)
    assert bench.owner.leases.get(ticket.lease_id).phase is LeasePhase.COMPLETE


@in_virtual_time
async def test_an_ended_lease_interrupts_whoever_holds_it() -> None:
    """Who waits for room under a lease that has ended waits in vain: it hears so at the next beat, and others do not."""
    bench = Bench()
    ended, other = bench.ticket(0), bench.ticket(1)
    async with bench.keep_alive.keep(other):
        with pytest.raises(LeaseExpiredError):  # noqa: PT012 (the body is what is interrupted)
            async with bench.keep_alive.keep(ended):
                bench.owner.leases.release([ended.lease_id])
                await asyncio.sleep(300)
        assert virtual_clock() == pytest.approx(5)
        await asyncio.sleep(300)


@in_virtual_time
async def test_a_hand_over_ends_as_soon_as_its_lease_is_known_to_have_ended() -> None:
    """A receiver whose pull stands still hears at the next beat that it cannot succeed, long before its stall time-out."""
    owner = Owner(virtual_clock)
    transport = FaultyTransport(LocalTransport(owner.sender, FINGERPRINT), [Fault(FaultKind.STALL, at=1)])
    receiver = KVReceiver(transport, random_store(2), FINGERPRINT)
    lease = owner.granted([3, 4])
    asyncio.get_running_loop().call_later(1, owner.leases.release, [lease.lease_id])
    with pytest.raises(LeaseExpiredError):
        await receiver.receive(owner.ticket(lease), [BlockId(0), BlockId(1)], 0)
    assert virtual_clock() == pytest.approx(5)


@in_virtual_time
async def test_a_settled_lease_is_not_interrupted() -> None:
    """A renewal that crosses the release is answered EXPIRED, which then says nothing; and no other one is sent."""
    bench = Bench()
    bench.transport.renewal_s = 1.0
    ticket = bench.ticket()
    async with bench.keep_alive.keep(ticket) as kept:
        bench.owner.leases.release([ticket.lease_id])
        await asyncio.sleep(5.5)
        kept.settle()
        await asyncio.sleep(60)
    assert len(bench.transport.calls) == 1


@in_virtual_time
async def test_a_time_out_of_the_body_stays_a_time_out() -> None:
    """Only the end of the lease is told as such."""
    bench = Bench()
    with pytest.raises(TimeoutError):
        async with bench.keep_alive.keep(bench.ticket()), asyncio.timeout(3):
            await asyncio.sleep(60)
    assert bench.keep_alive.num_peers == 0


@in_virtual_time
async def test_a_cancel_passes() -> None:
    """Whoever is cancelled while it holds a lease is cancelled, and leaves nothing behind."""
    bench = Bench()
    ticket = bench.ticket()

    async def hold() -> None:
        """Holds it for long."""
        async with bench.keep_alive.keep(ticket):
            await asyncio.sleep(300)

    holding = asyncio.create_task(hold())
    await asyncio.sleep(1)
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding
    assert asyncio.all_tasks() == {asyncio.current_task()}


@in_virtual_time
async def test_a_renewal_that_breaks_by_a_bug_does_not_end_the_others() -> None:
    """The peer's task goes on: the leases are renewed with the next beat."""
    bench = Bench()
    bench.transport.num_to_lose, bench.transport.error = 2, ValueError("nobody knows this")
    async with bench.keep_alive.keep(bench.ticket()):
        await asyncio.sleep(61)
    assert len(bench.transport.calls) == 12
    assert bench.owner.leases.stats().num_expired == 0
