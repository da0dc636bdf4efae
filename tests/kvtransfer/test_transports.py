"""What every transport promises, in process, over gRPC, through shared memory and by an engine that writes in place alike."""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from kvtransfer.chunks import LeaseState, PullEnd
from kvtransfer.receiver import KVReceiver
from kvtransfer.transports.base import KVTransport
from kvtransfer.transports.instrumented import InstrumentedTransport, PullCounts
from paceline.core.block_hash import BlockHash
from paceline.core.clock import ManualClock
from paceline.core.errors import KvChecksumError, KvError, KvLostError, LeaseExpiredError
from paceline.core.kv_layout import BlockId
from paceline.core.request import BootEpoch, LeaseId
from paceline.core.ticket import KvTicket
from tests.kvtransfer.hand_over import (
    BLOCK_BYTES,
    FINGERPRINT,
    FIRST_TOKENS,
    INTO,
    Arrived,
    HookedStore,
    Owner,
    arrivals,
    contents,
)


async def test_a_pull_gives_the_blocks_in_order_and_then_the_first_token(
    owner: Owner, transport: KVTransport, store: HookedStore
) -> None:
    """What comes are the lease's blocks, each with its checksum from when it was computed."""
    lease = owner.granted([4, 2, 9], num_full=2)
    *blocks, end = await _all(transport, store, owner.ticket(lease))
    assert end == PullEnd(FIRST_TOKENS)
    computed = zip(contents(owner.store, owner.blocks_of(lease)), lease.ready, strict=True)
    assert blocks == [
        Arrived(ordinal, content, ready.checksum) for ordinal, (content, ready) in enumerate(computed)
    ]


async def test_blocks_travel_while_later_ones_are_computed(
    owner: Owner, transport: KVTransport, store: HookedStore
) -> None:
    """A reader has the first block before the second is ready, and the last before the first token is known."""
    lease = owner.grant([4, 2])
    async with aclosing(arrivals(transport, store, owner.ticket(lease))) as blocks:
        for _ in range(2):
            owner.compute(lease, 1)
            block = await anext(blocks)
            assert isinstance(block, Arrived)
            assert block.content == bytes(owner.store.read(lease.ready[-1].block_id))
        owner.finish(lease)
        assert await anext(blocks) == PullEnd(FIRST_TOKENS)


async def test_held_blocks_do_not_travel(owner: Owner, transport: KVTransport, store: HookedStore) -> None:
    """The pull begins after the blocks that the receiver names, and writes to none of their places."""
    lease = owner.granted([4, 2, 9])
    before = contents(store, INTO[:2])
    block, _ = await _all(transport, store, owner.ticket(lease), lease.block_hashes[:2])
    assert isinstance(block, Arrived)
    assert (block.ordinal, block.content) == (2, bytes(owner.store.read(BlockId(9))))
    assert contents(store, INTO[:2]) == before


async def test_with_all_blocks_held_only_the_end_comes(
    owner: Owner, transport: KVTransport, store: HookedStore
) -> None:
    """A receiver that has everything still gets the first token."""
    lease = owner.granted([4, 2])
    assert await _all(transport, store, owner.ticket(lease), lease.block_hashes) == [PullEnd(FIRST_TOKENS)]


async def test_a_pull_can_be_repeated(owner: Owner, transport: KVTransport, store: HookedStore) -> None:
    """A receiver whose first pull broke off may pull the same lease again, once nothing writes any more."""
    lease = owner.granted([4, 2])
    async with aclosing(arrivals(transport, store, owner.ticket(lease))) as blocks:
        await anext(blocks)
    settling = transport.settling(INTO)
    if settling is not None:
        await settling
    *blocks_again, _ = await _all(transport, store, owner.ticket(lease))
    assert _contents(blocks_again) == contents(owner.store, owner.blocks_of(lease))


async def test_held_blocks_must_be_the_first_of_the_lease(
    owner: Owner, transport: KVTransport, store: HookedStore
) -> None:
    """A receiver that names other blocks, or more than the full ones, gets nothing."""
    lease = owner.granted([4, 2], num_full=1)
    for held in ([BlockHash(b"x" * 16)], [*lease.block_hashes, BlockHash(b"x" * 16)]):
        with pytest.raises(KvLostError):
            await _all(transport, store, owner.ticket(lease), held)


async def test_another_life_of_the_owner_has_no_leases(
    owner: Owner, transport: KVTransport, store: HookedStore
) -> None:
    """A ticket from before a restart is worth nothing: KV_LOST, EXPIRED, EXPIRED, and the lease stays untouched."""
    lease = owner.granted([4])
    stale = replace(owner.ticket(lease), boot_epoch=BootEpoch(10))
    with pytest.raises(KvLostError):
        await _all(transport, store, stale)
    assert await transport.renew([stale]) == [LeaseState.EXPIRED]
    assert await transport.release(stale) is LeaseState.EXPIRED
    assert await transport.release(owner.ticket(lease)) is LeaseState.VALID


async def test_an_unknown_lease_cannot_be_pulled(
    owner: Owner, transport: KVTransport, store: HookedStore
) -> None:
    """A lease that never was, or was released, gives KV_LOST."""
    lease = owner.granted([4])
    for lease_id in (LeaseId("unknown"), lease.lease_id):
        owner.leases.release([lease.lease_id])
        with pytest.raises(KvLostError):
            await _all(transport, store, replace(owner.ticket(lease), lease_id=lease_id))


async def test_a_release_is_valid_once(owner: Owner, transport: KVTransport) -> None:
    """The first release says VALID, the next EXPIRED; a renewal between says EXPIRED too."""
    ticket = owner.ticket(owner.granted([4]))
    assert await transport.renew([ticket]) == [LeaseState.VALID]
    assert await transport.release(ticket) is LeaseState.VALID
    assert await transport.renew([ticket]) == [LeaseState.EXPIRED]
    assert await transport.release(ticket) is LeaseState.EXPIRED


async def test_many_leases_are_renewed_in_one_call(owner: Owner, transport: KVTransport) -> None:
    """The answers come in the order of the tickets, and one lease that has ended does not touch the others."""
    tickets = [owner.ticket(owner.granted([block])) for block in range(4)]
    await transport.release(tickets[2])
    valid, expired = LeaseState.VALID, LeaseState.EXPIRED
    assert await transport.renew(tickets) == [valid, valid, expired, valid]


async def test_no_block_is_named_after_a_release(
    owner: Owner, transport: KVTransport, store: HookedStore
) -> None:
    """A pull whose lease is released midway ends with an error, and with nothing more before it."""
    lease = owner.grant([4, 2])
    owner.compute(lease, 1)
    async with aclosing(arrivals(transport, store, owner.ticket(lease))) as blocks:
        await anext(blocks)
        owner.leases.release([lease.lease_id])
        with pytest.raises(KvError):
            await anext(blocks)


async def test_what_is_read_while_the_lease_ends_is_not_accepted(
    owner: Owner, transport: KVTransport, store: HookedStore
) -> None:
    """Its blocks are another's at once, and whatever of them has come by then, the hand-over fails."""
    lease = owner.granted([4, 2, 9])
    store.on_checksum = lambda: owner.leases.release_sequence(lease.sequence_id)
    receiver = KVReceiver(transport, store, FINGERPRINT)
    with pytest.raises(KvError):
        await receiver.receive(owner.ticket(lease), INTO[:3], 0)
    assert owner.ended == [lease.sequence_id]


async def test_a_failed_prefill_ends_the_pull(
    owner: Owner, transport: KVTransport, store: HookedStore
) -> None:
    """A reader that waits for a block of a prefill that fails gets KV_LOST."""
    lease = owner.grant([4, 2])
    owner.compute(lease, 1)
    async with aclosing(arrivals(transport, store, owner.ticket(lease))) as blocks:
        await anext(blocks)
        owner.leases.drop(lease.lease_id)
        with pytest.raises(KvLostError):
            await anext(blocks)


async def test_a_lease_that_expires_cannot_be_read_on(
    owner: Owner, transport: KVTransport, store: HookedStore, clock: ManualClock
) -> None:
    """A release after the time is over is EXPIRED, and a new pull finds nothing."""
    lease = owner.granted([4])
    ticket = owner.ticket(lease)
    clock.advance(30)
    assert await transport.release(ticket) is LeaseState.EXPIRED
    with pytest.raises(KvLostError):
        await _all(transport, store, ticket)


async def test_an_expiry_between_two_pieces_ends_the_pull(owner: Owner, clock: ManualClock) -> None:
    """The lease is looked at again after each wait for the reader, of pieces and of references."""
    for pull in (owner.sender.pull, owner.sender.pull_references):
        lease = owner.grant([4, 2])
        owner.compute(lease, 1)
        async with aclosing(
            pull(lease.lease_id, owner.boot_epoch, owner.ticket(lease).fingerprint, [])
        ) as messages:
            await anext(messages)
            owner.finish(lease)
            clock.advance(30)
            with pytest.raises(LeaseExpiredError):
                await anext(messages)


async def test_a_hand_over_is_whole(owner: Owner, transport: KVTransport, store: HookedStore) -> None:
    """Received with all checks, each block is in its place and no other one has changed; the owner's blocks are free."""
    lease = owner.granted([4, 2, 9], num_full=2)
    computed = contents(owner.store, owner.blocks_of(lease))
    others = [BlockId(index) for index in range(20)]
    before = contents(store, others)
    received = await KVReceiver(transport, store, FINGERPRINT).receive(owner.ticket(lease), INTO[:3], 0)
    assert contents(store, INTO[:3]) == computed
    assert contents(store, others) == before
    assert (received.first_tokens, received.num_blocks) == (FIRST_TOKENS, 3)
    assert received.num_bytes == 3 * BLOCK_BYTES
    assert owner.ended == [lease.sequence_id]
    assert transport.settling(INTO) is None


async def test_a_block_that_changed_at_its_owner_is_not_accepted(
    owner: Owner, transport: KVTransport, store: HookedStore
) -> None:
    """The checksum is that of when the block was computed, so a block overwritten since does not pass."""
    lease = owner.granted([1])
    owner.store.write(BlockId(1), 3, b"!")
    with pytest.raises(KvChecksumError):
        await KVReceiver(transport, store, FINGERPRINT).receive(owner.ticket(lease), INTO[:1], 0)
    assert owner.ended == [lease.sequence_id]


async def test_a_lease_without_first_tokens_is_pulled_like_any_other(
    owner: Owner, transport: KVTransport, store: HookedStore
) -> None:
    """What is lent out of a cache has nobody's first token; its end comes all the same."""
    lease = owner.grant([1, 2])
    owner.compute(lease, 2)
    owner.leases.complete(lease.lease_id, ())
    received = await KVReceiver(transport, store, FINGERPRINT).receive(owner.ticket(lease), INTO[:2], 0)
    assert (received.first_tokens, received.num_blocks) == ((), 2)
    assert owner.ended == [lease.sequence_id]


async def test_an_instrumented_transport_counts_what_passes(
    owner: Owner, transport: KVTransport, store: HookedStore
) -> None:
    """Pulls, bytes and time are counted, and the messages are the same."""
    clock = ManualClock()
    instrumented = InstrumentedTransport(transport, counts := PullCounts(clock=clock))
    lease = owner.granted([4, 2, 9])
    async with aclosing(arrivals(instrumented, store, owner.ticket(lease))) as blocks:
        seen = [await anext(blocks)]
        clock.advance(2.5)
        seen += [block async for block in blocks]
    assert seen == await _all(transport, store, owner.ticket(lease))
    stats = counts.stats()
    assert (stats.num_pulls, stats.num_ended) == (1, 1)
    assert stats.num_chunks >= 3
    assert (stats.num_bytes, stats.pull_duration_s) == (3 * BLOCK_BYTES, 2.5)
    assert await instrumented.release(owner.ticket(lease)) is LeaseState.VALID


async def _all(
    transport: KVTransport, store: HookedStore, ticket: KvTicket, held: Sequence[BlockHash] = ()
) -> list[Arrived | PullEnd]:
    async with aclosing(arrivals(transport, store, ticket, held)) as blocks:
        return [block async for block in blocks]


def _contents(blocks: Sequence[Arrived | PullEnd]) -> list[bytes]:
    return [block.content for block in blocks if isinstance(block, Arrived)]
