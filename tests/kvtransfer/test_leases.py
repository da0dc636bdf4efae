"""Who may read a prompt's blocks, and until when."""

import asyncio

import pytest

from kvtransfer.chunks import LeaseState
from kvtransfer.leases import LeasePhase, LeaseTable, sweep_forever
from paceline.core.clock import ManualClock
from paceline.core.errors import KvLostError, LeaseExpiredError
from paceline.core.kv_layout import BlockId
from paceline.core.request import LeaseId
from paceline.core.ticket import ReadyBlock
from tests.kvtransfer.hand_over import FIRST_TOKENS, Owner
from tests.virtual_time import in_virtual_time, virtual_clock

BLOCK = ReadyBlock(BlockId(1), 7)


def test_a_release_is_valid_exactly_once(owner: Owner) -> None:
    """The first release of a held lease is VALID and frees the blocks; the second is EXPIRED, counted, and ignored."""
    lease = owner.granted([1, 2])
    assert owner.leases.release([lease.lease_id, lease.lease_id]) == [LeaseState.VALID, LeaseState.EXPIRED]
    assert owner.ended == [lease.sequence_id]
    assert owner.leases.stats().num_released == 1
    assert owner.leases.stats().num_late_releases == 1


def test_a_lease_is_released_by_its_sequence_too(owner: Owner) -> None:
    """Who never heard the lease's name ends it by the attempt; another's lease stays, and an unknown attempt is ignored."""
    lease, other = owner.granted([1]), owner.granted([2])
    owner.leases.release_sequence(lease.sequence_id)
    owner.leases.release_sequence(lease.sequence_id)
    assert owner.ended == [lease.sequence_id]
    assert owner.leases.release([lease.lease_id, other.lease_id]) == [LeaseState.EXPIRED, LeaseState.VALID]


def test_an_unknown_lease_is_expired(owner: Owner) -> None:
    """Nothing that names a lease which was never granted does anything but say so."""
    unknown = LeaseId("0" * 32)
    assert owner.leases.renew([unknown]) == [LeaseState.EXPIRED]
    assert owner.leases.release([unknown]) == [LeaseState.EXPIRED]
    assert not owner.leases.progress(unknown, [BLOCK])
    assert not owner.leases.complete(unknown, FIRST_TOKENS)
    owner.leases.drop(unknown)
    with pytest.raises(KvLostError):
        owner.leases.get(unknown)
    assert owner.ended == []


def test_an_open_lease_has_no_clock(owner: Owner, clock: ManualClock) -> None:
    """However long a prefill computes, its lease holds; the clock starts when it completes."""
    lease = owner.grant([1])
    clock.advance(10_000)
    assert owner.leases.sweep() == 0
    owner.finish(lease)
    clock.advance(29.9)
    assert owner.leases.sweep() == 0
    clock.advance(0.1)
    assert owner.leases.sweep() == 1
    assert owner.ended == [lease.sequence_id]


def test_a_lease_that_is_not_released_expires_and_frees_its_blocks(owner: Owner, clock: ManualClock) -> None:
    """The sweep ends what nobody released, once, and a release that comes after it is EXPIRED."""
    lease = owner.granted([1])
    clock.advance(30)
    assert owner.leases.sweep() == 1
    assert owner.leases.sweep() == 0
    assert owner.leases.release([lease.lease_id]) == [LeaseState.EXPIRED]
    assert owner.ended == [lease.sequence_id]
    assert owner.leases.stats().num_expired == 1


def test_an_expired_lease_is_expired_before_any_sweep(owner: Owner, clock: ManualClock) -> None:
    """A late sweep does not make a lease longer: renewals and releases go by the clock."""
    renewed, released = owner.granted([1]), owner.granted([2])
    clock.advance(30)
    assert owner.leases.renew([renewed.lease_id]) == [LeaseState.EXPIRED]
    assert owner.leases.release([released.lease_id]) == [LeaseState.EXPIRED]
    assert owner.ended == [renewed.sequence_id, released.sequence_id]


def test_a_renewal_starts_the_clock_anew(owner: Owner, clock: ManualClock) -> None:
    """A lease that is renewed in time holds for its full time from then on, and no longer."""
    lease = owner.granted([1])
    clock.advance(29)
    assert owner.leases.renew([lease.lease_id]) == [LeaseState.VALID]
    clock.advance(29)
    assert owner.leases.sweep() == 0
    clock.advance(1)
    assert owner.leases.sweep() == 1


def test_a_renewal_does_not_put_a_clock_on_an_open_lease(owner: Owner, clock: ManualClock) -> None:
    """A receiver that renews while the prefill still computes cannot make its lease expire."""
    lease = owner.grant([1])
    assert owner.leases.renew([lease.lease_id]) == [LeaseState.VALID]
    clock.advance(10_000)
    assert owner.leases.sweep() == 0


def test_a_dropped_lease_ends_at_once(owner: Owner) -> None:
    """A prefill that fails gives its blocks back, and nobody reads them."""
    lease = owner.grant([1])
    owner.leases.drop(lease.lease_id)
    assert owner.ended == [lease.sequence_id]
    assert owner.leases.release([lease.lease_id]) == [LeaseState.EXPIRED]
    assert owner.leases.stats().num_dropped == 1


def test_the_end_of_the_prefill_stream_leaves_a_complete_lease_alone(owner: Owner) -> None:
    """Once the result is out the receiver and the clock decide, so dropping on every exit of the stream is safe."""
    lease = owner.granted([1])
    owner.leases.drop(lease.lease_id)
    assert owner.ended == []
    assert owner.leases.release([lease.lease_id]) == [LeaseState.VALID]


def test_a_prefill_learns_that_its_lease_has_ended(owner: Owner) -> None:
    """After an early release, progress and completion are ignored and say so."""
    lease = owner.grant([1, 2])
    assert owner.leases.release([lease.lease_id]) == [LeaseState.VALID]
    assert not owner.leases.progress(lease.lease_id, [BLOCK])
    assert not owner.leases.complete(lease.lease_id, FIRST_TOKENS)
    assert owner.leases.stats().num_released == 1


def test_a_lease_completes_only_with_all_its_blocks(owner: Owner) -> None:
    """A first token before the last block is our bug, as are more blocks than were granted."""
    lease = owner.grant([1, 2])
    owner.compute(lease, 1)
    with pytest.raises(AssertionError, match="all of its blocks"):
        owner.leases.complete(lease.lease_id, FIRST_TOKENS)
    with pytest.raises(AssertionError, match="more ready blocks"):
        owner.leases.progress(lease.lease_id, [BLOCK, BLOCK])


def test_lease_ids_cannot_be_guessed(owner: Owner) -> None:
    """Each lease has an id of 128 random bits."""
    ids = {owner.grant([1]).lease_id for _ in range(100)}
    assert len(ids) == 100
    assert all(len(bytes.fromhex(lease_id)) == 16 for lease_id in ids)


async def test_a_reader_wakes_when_its_block_is_ready(owner: Owner) -> None:
    """Who waits for a block gets it with the progress that reaches it, not before."""
    lease = owner.grant([1, 2, 3])
    reader = asyncio.create_task(owner.leases.wait_ready(lease, 1))
    await _settle()
    owner.compute(lease, 1)
    await _settle()
    assert not reader.done()
    owner.compute(lease, 1)
    assert await reader == lease.ready[1]


async def test_a_reader_wakes_with_the_first_token(owner: Owner) -> None:
    """Who waits for the end gets the first token, also when all blocks were ready long before."""
    lease = owner.grant([1])
    reader = asyncio.create_task(owner.leases.wait_complete(lease))
    owner.compute(lease, 1)
    await _settle()
    assert not reader.done()
    owner.finish(lease)
    assert await reader == FIRST_TOKENS


@pytest.mark.parametrize("end", ["drop", "release"])
async def test_a_waiting_reader_sees_the_end_of_its_lease(owner: Owner, end: str) -> None:
    """A lease that ends while somebody waits for a block wakes every reader with KV_LOST."""
    lease = owner.grant([1])
    readers = [asyncio.create_task(owner.leases.wait_ready(lease, 0)) for _ in range(3)]
    await _settle()
    if end == "drop":
        owner.leases.drop(lease.lease_id)
    else:
        owner.leases.release([lease.lease_id])
    results = await asyncio.gather(*readers, return_exceptions=True)
    assert [type(result) for result in results] == [KvLostError] * 3


async def test_a_reader_of_an_expired_lease_is_told(owner: Owner, clock: ManualClock) -> None:
    """A reader that comes back after the time is over gets LEASE_EXPIRED, swept or not."""
    lease = owner.granted([1])
    clock.advance(30)
    with pytest.raises(LeaseExpiredError):
        await owner.leases.wait_ready(lease, 0)
    assert lease.phase is LeasePhase.EXPIRED
    with pytest.raises(LeaseExpiredError):
        await owner.leases.wait_complete(lease)
    assert owner.ended == [lease.sequence_id]


@in_virtual_time
async def test_the_sweeper_ends_leases_when_nothing_else_happens() -> None:
    """A timer alone frees an abandoned lease's blocks, within a period of its time."""
    owner = Owner(virtual_clock)
    sweeper = asyncio.create_task(sweep_forever(owner.leases, every_s=1.0))
    lease = owner.granted([1])
    await asyncio.sleep(29.5)
    assert owner.ended == []
    await asyncio.sleep(2)
    assert owner.ended == [lease.sequence_id]
    sweeper.cancel()


def test_the_table_is_empty_when_every_lease_has_ended(owner: Owner, clock: ManualClock) -> None:
    """Nothing is remembered of leases that are over, so that the table cannot grow."""
    table: LeaseTable = owner.leases
    released, dropped, _expired = owner.granted([1]), owner.grant([2]), owner.granted([3])
    table.release([released.lease_id])
    table.drop(dropped.lease_id)
    clock.advance(30)
    table.sweep()
    stats = table.stats()
    assert (stats.num_active, stats.num_granted) == (0, 3)
    assert (stats.num_released, stats.num_dropped, stats.num_expired) == (1, 1, 1)
    table.check_invariants()


async def _settle() -> None:
    """Lets every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)
