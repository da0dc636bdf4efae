"""What only the gRPC transport can get wrong: sizes, deadlines, statuses, lost connections."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kvtransfer.block_store import BlockStore
from kvtransfer.borrower import PrefixBorrower
from kvtransfer.chunks import MAX_CHUNK_BYTES, ChunkMessage, KvChunk, KvMessage
from kvtransfer.leases import LeaseTable
from kvtransfer.lending import PrefixRequest
from kvtransfer.receiver import KVReceiver
from kvtransfer.sender import KVSender
from kvtransfer.service import KvTransferServicer, add_kv_transfer_service
from kvtransfer.transports.base import KVTransport
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.local import LocalTransport
from paceline.core.block_hash import BlockHash
from paceline.core.clock import ManualClock
from paceline.core.errors import FingerprintMismatchError, KvChecksumError, KvError, KvLostError
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.kv_layout import BlockId
from paceline.core.prefix import PrefixOwner
from paceline.core.request import BootEpoch, LeaseId, RequestId, SequenceId, WorkerId
from paceline.runtime.channels import Channels
from tests.kvtransfer.hand_over import FINGERPRINT, INTO, Owner, contents, random_store


class _WatchedSender(KVSender):
    """Says when its pull has ended, however it did."""

    def __init__(
        self, leases: LeaseTable, store: BlockStore, fingerprint: ModelFingerprint, boot_epoch: BootEpoch
    ) -> None:
        super().__init__(leases, store, fingerprint, boot_epoch)
        self.pull_is_over = asyncio.Event()

    async def pull(
        self,
        lease_id: LeaseId,
        boot_epoch: BootEpoch,
        fingerprint: ModelFingerprint,
        held_hashes: Sequence[BlockHash],
    ) -> AsyncGenerator[ChunkMessage, None]:
        try:
            async with aclosing(super().pull(lease_id, boot_epoch, fingerprint, held_hashes)) as messages:
                async for message in messages:
                    yield message
        finally:
            self.pull_is_over.set()


async def test_a_fingerprint_that_differs_is_refused_with_the_field(
    owner: Owner, server: grpc.aio.Server, channels: Channels
) -> None:
    """Two workers with other weights exchange no byte, and the error names what differs."""
    ours = replace(FINGERPRINT, weights="other")
    ticket = owner.ticket(owner.granted([1]))
    with pytest.raises(FingerprintMismatchError) as caught:
        await anext(GrpcTransport(channels, ours).pull(ticket, [], INTO))
    assert (caught.value.field, caught.value.ours, caught.value.theirs) == ("weights", "w", "other")


async def test_an_owner_that_is_gone_is_kv_lost(
    owner: Owner, server: grpc.aio.Server, grpc_transport: GrpcTransport
) -> None:
    """A worker that dies in the middle of a pull, or before any call, gives KV_LOST and nothing else."""
    lease = owner.grant([1, 2])
    owner.compute(lease, 1)
    async with aclosing(grpc_transport.pull(owner.ticket(lease), [], INTO)) as messages:
        await anext(messages)
        await anext(messages)
        await server.stop(None)
        with pytest.raises(KvLostError):
            await anext(messages)
    with pytest.raises(KvLostError):
        await grpc_transport.renew([owner.ticket(lease)])
    with pytest.raises(KvLostError):
        await grpc_transport.release(owner.ticket(lease))


async def test_every_call_has_a_deadline(owner: Owner, server: grpc.aio.Server, channels: Channels) -> None:
    """A pull of a prefill that never ends is KV_LOST when its time is over."""
    transport = GrpcTransport(channels, FINGERPRINT, pull_timeout_s=0.05)
    with pytest.raises(KvLostError):
        await anext(transport.pull(owner.ticket(owner.grant([1])), [], INTO))


async def test_closing_a_pull_ends_it_at_the_owner(owner: Owner, channels: Channels) -> None:
    """A receiver that loses interest leaves no call behind, and the lease is as before."""
    sender = _WatchedSender(owner.leases, owner.store, FINGERPRINT, owner.boot_epoch)
    server = await _serve(owner, sender)
    lease = owner.grant([1, 2])
    owner.compute(lease, 1)
    async with aclosing(GrpcTransport(channels, FINGERPRINT).pull(owner.ticket(lease), [], INTO)) as messages:
        await anext(messages)
    await asyncio.wait_for(sender.pull_is_over.wait(), timeout=10)
    assert owner.leases.get(lease.lease_id) is lease
    await server.stop(None)


@pytest.mark.parametrize("block_bytes", [737_280, 6 * 1024 * 1024, 1000])
async def test_blocks_of_any_size_fit_into_messages(channels: Channels, block_bytes: int) -> None:
    """A whole hand-over over gRPC, with blocks smaller than a message, larger, and larger than gRPC's limit."""
    owner = Owner(ManualClock(), max_chunk_bytes=MAX_CHUNK_BYTES, block_bytes=block_bytes)
    server = await _serve(owner, owner.sender)
    lease = owner.granted([3, 1], num_full=1)
    computed = contents(owner.store, owner.blocks_of(lease))
    store = random_store(2, block_bytes=block_bytes)
    receiver = KVReceiver(GrpcTransport(channels, FINGERPRINT), store, FINGERPRINT)
    received = await receiver.receive(owner.ticket(lease), [BlockId(5), BlockId(6)], 0)
    assert contents(store, [BlockId(5), BlockId(6)]) == computed
    assert (received.num_blocks, received.num_bytes) == (2, 2 * block_bytes)
    assert owner.ended == [lease.sequence_id]
    await server.stop(None)


async def test_a_block_that_changed_at_its_owner_is_not_accepted(
    owner: Owner, grpc_transport: GrpcTransport
) -> None:
    """The checksum is that of when the block was computed, so a block overwritten since does not pass."""
    lease = owner.granted([1])
    owner.store.write(BlockId(1), 3, b"!")
    receiver = KVReceiver(grpc_transport, random_store(2), FINGERPRINT)
    with pytest.raises(KvChecksumError):
        await receiver.receive(owner.ticket(lease), [BlockId(0)], 0)
    assert owner.ended == [lease.sequence_id]


async def test_no_message_is_larger_than_the_limit(owner: Owner, grpc_transport: GrpcTransport) -> None:
    """Pieces are at most as large as the sender's limit."""
    lease = owner.granted([1, 2])
    async with aclosing(grpc_transport.pull(owner.ticket(lease), [], INTO)) as messages:
        sizes = [len(message.data) async for message in messages if isinstance(message, KvChunk)]
    assert max(sizes) <= 32


async def _serve(owner: Owner, sender: KVSender) -> grpc.aio.Server:
    server = grpc.aio.server()
    add_kv_transfer_service(KvTransferServicer(sender), server)
    owner.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    return server


async def test_a_worker_without_a_lender_lends_nothing(
    owner: Owner, server: grpc.aio.Server, channels: Channels
) -> None:
    """The answer has no ticket."""
    receiver = KVReceiver(GrpcTransport(channels, FINGERPRINT), owner.store, FINGERPRINT)
    borrower = PrefixBorrower(channels, receiver, FINGERPRINT)
    asked = PrefixRequest(SequenceId(RequestId("r"), 0), "", (1, 2, 3, 4))
    prefix_owner = PrefixOwner(WorkerId("prefill-0"), owner.address, owner.boot_epoch)
    assert await borrower.borrow(prefix_owner, asked, [], [], num_held=0) == 0


@pytest.mark.parametrize("way", ["local", "grpc"])
async def test_no_piece_is_sent_after_a_release(
    owner: Owner, grpc_transport: GrpcTransport, way: str
) -> None:
    """A pull whose lease is released in the middle of a block ends with an error, and never shows the next owner's bytes."""
    transport: KVTransport = grpc_transport if way == "grpc" else LocalTransport(owner.sender, FINGERPRINT)
    lease = owner.grant([4, 2])
    computed = contents(owner.store, owner.blocks_of(lease))
    owner.compute(lease, 1)
    seen: list[KvMessage] = []
    with pytest.raises(KvError):  # noqa: PT012 (the release comes within the pull)
        async with aclosing(transport.pull(owner.ticket(lease), [], INTO)) as messages:
            seen.append(await anext(messages))
            owner.leases.release([lease.lease_id])
            async for message in messages:
                seen.append(message)  # noqa: PERF401 (what came before the error counts)
    assert all(_is_piece_of(message, computed) for message in seen)


def _is_piece_of(message: KvMessage, blocks: Sequence[bytes]) -> bool:
    assert isinstance(message, KvChunk)
    block = blocks[message.ordinal]
    return block[message.offset : message.offset + len(message.data)] == message.data


async def test_an_owner_that_is_back_is_reached_at_once(
    owner: Owner, channels: Channels, tmp_path: Path
) -> None:
    """Whoever has called in vain while it was away gets the blocks of its next life with the first ticket."""
    owner.address = f"unix:{tmp_path}/owner.sock"
    transport = GrpcTransport(channels, FINGERPRINT)
    lost = owner.ticket(owner.granted([1]))
    # Nobody is there: the channel waits longer and longer before it tries again.
    for _ in range(30):
        with pytest.raises(KvLostError):
            await transport.release(lost)
        await asyncio.sleep(0.05)
    owner.restart(BootEpoch(12))
    server = grpc.aio.server()
    add_kv_transfer_service(KvTransferServicer(owner.sender), server)
    server.add_insecure_port(owner.address)
    await server.start()
    try:
        ticket = owner.ticket(owner.granted([2, 3]))
        receiver = KVReceiver(transport, random_store(2), FINGERPRINT)
        assert (await receiver.receive(ticket, INTO[:2], 0)).num_blocks == 2
    finally:
        await server.stop(None)
