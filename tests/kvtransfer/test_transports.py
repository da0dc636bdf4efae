"""What every transport promises, in process and over gRPC alike."""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from kvtransfer.chunks import KvChunk, KvMessage, LeaseState, PullEnd
from kvtransfer.transports.base import KVTransport
from kvtransfer.transports.instrumented import InstrumentedTransport
from paceline.core.block_hash import BlockHash
from paceline.core.clock import ManualClock
from paceline.core.errors import KvError, KvLostError, LeaseExpiredError
from paceline.core.request import BootEpoch, LeaseId
from paceline.core.ticket import KvTicket
from tests.kvtransfer.hand_over import BLOCK_BYTES, FIRST_TOKENS, Owner, contents


async def test_a_pull_gives_the_blocks_in_order_and_then_the_first_token(
    owner: Owner, transport: KVTransport
) -> None:
    """The pieces, joined, are the lease's blocks, each with its checksum from when it was computed."""
    lease = owner.granted([4, 2, 9], num_full=2)
    *chunks, end = await _all(transport, owner.ticket(lease))
    assert end == PullEnd(FIRST_TOKENS)
    assert _joined(chunks) == contents(owner.store, owner.blocks_of(lease))
    checksums = {(chunk.ordinal, chunk.checksum) for chunk in chunks if isinstance(chunk, KvChunk)}
    assert checksums == {(ordinal, block.checksum) for ordinal, block in enumerate(lease.ready)}


async def test_blocks_travel_while_later_ones_are_computed(owner: Owner, transport: KVTransport) -> None:
    """A reader has the first block before the second is ready, and the last before the first token is known."""
    lease = owner.grant([4, 2])
    async with aclosing(transport.pull(owner.ticket(lease), [])) as messages:
        for _ in range(2):
            owner.compute(lease, 1)
            block = [await anext(messages), await anext(messages)]
            assert _joined(block)[-1] == bytes(owner.store.read(lease.ready[-1].block_id))
        owner.finish(lease)
        assert await anext(messages) == PullEnd(FIRST_TOKENS)


async def test_held_blocks_do_not_travel(owner: Owner, transport: KVTransport) -> None:
    """The pull begins after the blocks that the receiver names."""
    lease = owner.granted([4, 2, 9])
    messages = await _all(transport, owner.ticket(lease), lease.block_hashes[:2])
    assert {message.ordinal for message in messages if isinstance(message, KvChunk)} == {2}


async def test_with_all_blocks_held_only_the_end_comes(owner: Owner, transport: KVTransport) -> None:
    """A receiver that has everything still gets the first token."""
    lease = owner.granted([4, 2])
    assert await _all(transport, owner.ticket(lease), lease.block_hashes) == [PullEnd(FIRST_TOKENS)]


async def test_a_pull_can_be_repeated(owner: Owner, transport: KVTransport) -> None:
    """A receiver whose first pull broke off may pull the same lease again."""
    lease = owner.granted([4, 2])
    async with aclosing(transport.pull(owner.ticket(lease), [])) as messages:
        await anext(messages)
    assert _joined(await _all(transport, owner.ticket(lease))) == contents(
        owner.store, owner.blocks_of(lease)
    )


async def test_held_blocks_must_be_the_first_of_the_lease(owner: Owner, transport: KVTransport) -> None:
    """A receiver that names other blocks, or more than the full ones, gets nothing."""
    lease = owner.granted([4, 2], num_full=1)
    for held in ([BlockHash(b"x" * 16)], [*lease.block_hashes, BlockHash(b"x" * 16)]):
        with pytest.raises(KvLostError):
            await _all(transport, owner.ticket(lease), held)


async def test_another_life_of_the_owner_has_no_leases(owner: Owner, transport: KVTransport) -> None:
    """A ticket from before a restart is worth nothing: KV_LOST, EXPIRED, EXPIRED, and the lease stays untouched."""
    lease = owner.granted([4])
    stale = replace(owner.ticket(lease), boot_epoch=BootEpoch(10))
    with pytest.raises(KvLostError):
        await _all(transport, stale)
    assert await transport.renew(stale) is LeaseState.EXPIRED
    assert await transport.release(stale) is LeaseState.EXPIRED
    assert await transport.release(owner.ticket(lease)) is LeaseState.VALID


async def test_an_unknown_lease_cannot_be_pulled(owner: Owner, transport: KVTransport) -> None:
    """A lease that never was, or was released, gives KV_LOST."""
    lease = owner.granted([4])
    for lease_id in (LeaseId("unknown"), lease.lease_id):
        owner.leases.release([lease.lease_id])
        with pytest.raises(KvLostError):
            await _all(transport, replace(owner.ticket(lease), lease_id=lease_id))


async def test_a_release_is_valid_once(owner: Owner, transport: KVTransport) -> None:
    """The first release says VALID, the next EXPIRED; a renewal between says EXPIRED too."""
    ticket = owner.ticket(owner.granted([4]))
    assert await transport.renew(ticket) is LeaseState.VALID
    assert await transport.release(ticket) is LeaseState.VALID
    assert await transport.renew(ticket) is LeaseState.EXPIRED
    assert await transport.release(ticket) is LeaseState.EXPIRED


async def test_nothing_is_read_after_a_release(owner: Owner, transport: KVTransport) -> None:
    """A pull whose lease is released midway ends with an error, and never shows the blocks' next owner's bytes."""
    lease = owner.grant([4, 2])
    computed = contents(owner.store, owner.blocks_of(lease))
    owner.compute(lease, 1)
    seen: list[KvMessage] = []
    with pytest.raises(KvError):  # noqa: PT012 (the release comes within the pull)
        async with aclosing(transport.pull(owner.ticket(lease), [])) as messages:
            seen.append(await anext(messages))
            owner.leases.release([lease.lease_id])
            async for message in messages:
                seen.append(message)  # noqa: PERF401 (what came before the error counts)
    assert all(_is_piece_of(message, computed) for message in seen)


async def test_a_failed_prefill_ends_the_pull(owner: Owner, transport: KVTransport) -> None:
    """A reader that waits for a block of a prefill that fails gets KV_LOST."""
    lease = owner.grant([4, 2])
    owner.compute(lease, 1)
    with pytest.raises(KvLostError):  # noqa: PT012 (the drop comes within the pull)
        async with aclosing(transport.pull(owner.ticket(lease), [])) as messages:
            await anext(messages)
            await anext(messages)
            owner.leases.drop(lease.lease_id)
            await anext(messages)


async def test_a_lease_that_expires_cannot_be_read_on(
    owner: Owner, transport: KVTransport, clock: ManualClock
) -> None:
    """A release after the time is over is EXPIRED, and a new pull finds nothing."""
    lease = owner.granted([4])
    ticket = owner.ticket(lease)
    clock.advance(30)
    assert await transport.release(ticket) is LeaseState.EXPIRED
    with pytest.raises(KvLostError):
        await _all(transport, ticket)


async def test_an_expiry_between_two_pieces_ends_the_pull(owner: Owner, clock: ManualClock) -> None:
    """The lease is looked at again after each wait for the reader."""
    lease = owner.granted([4, 2])
    pull = owner.sender.pull(lease.lease_id, owner.boot_epoch, owner.ticket(lease).fingerprint, [])
    async with aclosing(pull) as messages:
        await anext(messages)
        clock.advance(30)
        with pytest.raises(LeaseExpiredError):
            await anext(messages)


async def test_an_instrumented_transport_counts_what_passes(owner: Owner, transport: KVTransport) -> None:
    """Pulls, pieces, bytes and time are counted, and the messages are the same."""
    clock = ManualClock()
    instrumented = InstrumentedTransport(transport, clock=clock)
    lease = owner.granted([4, 2, 9])
    async with aclosing(instrumented.pull(owner.ticket(lease), [])) as messages:
        clock.advance(0.0)
        seen = [await anext(messages)]
        clock.advance(2.5)
        seen += [message async for message in messages]
    assert seen == await _all(transport, owner.ticket(lease))
    stats = instrumented.stats()
    assert (stats.num_pulls, stats.num_ended, stats.num_chunks) == (1, 1, 6)
    assert (stats.num_bytes, stats.pull_duration_s) == (3 * BLOCK_BYTES, 2.5)
    assert await instrumented.release(owner.ticket(lease)) is LeaseState.VALID


async def _all(transport: KVTransport, ticket: KvTicket, held: Sequence[BlockHash] = ()) -> list[KvMessage]:
    async with aclosing(transport.pull(ticket, held)) as messages:
        return [message async for message in messages]


def _joined(messages: Sequence[KvMessage]) -> list[bytes]:
    blocks: dict[int, bytes] = {}
    for message in messages:
        if isinstance(message, KvChunk):
            assert message.offset == len(blocks.get(message.ordinal, b""))
            blocks[message.ordinal] = blocks.get(message.ordinal, b"") + message.data
    return [blocks[ordinal] for ordinal in sorted(blocks)]


def _is_piece_of(message: KvMessage, blocks: Sequence[bytes]) -> bool:
    assert isinstance(message, KvChunk)
    block = blocks[message.ordinal]
    return block[message.offset : message.offset + len(message.data)] == message.data
