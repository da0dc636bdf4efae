"""Which way blocks come: agreed on once, left when it fails, forced or refused."""

import asyncio
import gc
import os
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest

from kvtransfer.offer import MemoryOffer
from kvtransfer.receiver import KVReceiver
from kvtransfer.service import KvTransferServicer, add_kv_transfer_service
from kvtransfer.transports.base import KVTransport, TransportBrokenError
from kvtransfer.transports.faulty import Fault, FaultKind, FaultyTransport
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.negotiated import NegotiatedTransport
from kvtransfer.transports.shm import SharedMemory
from paceline.core.errors import KvError, KvLostError
from paceline.core.request import BootEpoch
from paceline.runtime.channels import Channels
from paceline.runtime.pool_memory import SharedMemoryOffer
from paceline.v1 import kv_transfer_pb2
from tests.kvtransfer.hand_over import (
    BLOCK_BYTES,
    FINGERPRINT,
    INTO,
    NUM_POOL_BLOCKS,
    HookedStore,
    Owner,
    contents,
)


class _CountedWay(SharedMemory):
    """Shared memory that counts its handshakes, and has the faults that it is given."""

    def __init__(self, grpc: GrpcTransport, *faults: Fault) -> None:
        super().__init__(grpc)
        self.num_connects = 0
        self.faults = faults

    def connect(self, offer: MemoryOffer) -> KVTransport:  # type: ignore[override] # it adds faults
        self.num_connects += 1
        return FaultyTransport(super().connect(offer), self.faults)


class _BrokenWay(SharedMemory):
    """Works at the handshake, and never in use."""

    def connect(self, offer: MemoryOffer) -> KVTransport:  # type: ignore[override] # the same
        return FaultyTransport(super().connect(offer), [Fault(FaultKind.BREAK_WAY)])


async def _receive(
    owner: Owner, transport: KVTransport, store: HookedStore, block_ids: Sequence[int] = (4, 2, 9)
) -> None:
    """A hand-over of some blocks, which must be right."""
    lease = owner.granted(block_ids)
    computed = contents(owner.store, owner.blocks_of(lease))
    into = INTO[: len(block_ids)]
    for block_id in into:
        store.write(block_id, 0, bytes(BLOCK_BYTES))
    await KVReceiver(transport, store, FINGERPRINT).receive(owner.ticket(lease), into, 0)
    assert contents(store, into) == computed
    for block_id, content in zip(owner.blocks_of(lease), computed, strict=True):
        owner.store.write(block_id, 0, content)


def _pulls(transport: NegotiatedTransport) -> dict[str, int]:
    return {name: stats.num_pulls for name, stats in transport.stats().items()}


async def test_what_was_agreed_on_holds(
    owner: Owner, grpc_transport: GrpcTransport, store: HookedStore
) -> None:
    """One handshake for all hand-overs of an owner's life."""
    way = _CountedWay(grpc_transport)
    transport = NegotiatedTransport(grpc_transport, [way])
    for _ in range(3):
        await _receive(owner, transport, store)
    assert (way.num_connects, _pulls(transport), transport.num_fallbacks) == (1, {"grpc": 0, "shm": 3}, 0)
    assert transport.stats()["shm"].num_bytes == 9 * BLOCK_BYTES
    await transport.aclose()


async def test_another_life_is_asked_anew(
    owner: Owner, grpc_transport: GrpcTransport, store: HookedStore
) -> None:
    """A worker that comes back at its address has other memory."""
    way = _CountedWay(grpc_transport)
    transport = NegotiatedTransport(grpc_transport, [way])
    await _receive(owner, transport, store)
    owner.restart(BootEpoch(12))
    await _receive(owner, transport, store)
    assert (way.num_connects, _pulls(transport)["shm"]) == (2, 2)
    await transport.aclose()


@pytest.mark.parametrize("fault", [FaultKind.BREAK_WAY, FaultKind.CORRUPT])
async def test_a_way_that_fails_in_use_is_left_for_grpc(
    owner: Owner, grpc_transport: GrpcTransport, store: HookedStore, fault: FaultKind
) -> None:
    """The hand-over fails as a whole; the next ones of that owner's life come over gRPC. Its next life is asked again."""
    way = _CountedWay(grpc_transport, Fault(fault))
    transport = NegotiatedTransport(grpc_transport, [way])
    with pytest.raises(KvError) as caught:
        await _receive(owner, transport, store)
    assert caught.value.reason in {"KV_LOST", "KV_CHECKSUM"}
    for _ in range(2):
        await _receive(owner, transport, store)
    assert (way.num_connects, _pulls(transport), transport.num_fallbacks) == (1, {"grpc": 2, "shm": 1}, 1)
    owner.restart(BootEpoch(12))
    way.faults = ()
    await _receive(owner, transport, store)
    assert _pulls(transport) == {"grpc": 2, "shm": 2}
    await transport.aclose()


async def test_a_lost_lease_is_not_the_ways_fault(
    owner: Owner, grpc_transport: GrpcTransport, store: HookedStore
) -> None:
    """A pull that the owner refuses says nothing about how blocks come."""
    transport = NegotiatedTransport(grpc_transport, [SharedMemory(grpc_transport)])
    lease = owner.granted([1])
    owner.leases.release([lease.lease_id])
    with pytest.raises(KvLostError):
        await KVReceiver(transport, store, FINGERPRINT).receive(owner.ticket(lease), INTO[:1], 0)
    await _receive(owner, transport, store)
    assert (_pulls(transport), transport.num_fallbacks) == ({"grpc": 0, "shm": 2}, 0)
    await transport.aclose()


async def test_a_lease_that_ends_while_it_is_read_is_not_the_ways_fault(
    owner: Owner, grpc_transport: GrpcTransport, store: HookedStore
) -> None:
    """Its blocks are another request's by then, and match no checksum; the next hand-over comes by the same way."""
    transport = NegotiatedTransport(grpc_transport, [SharedMemory(grpc_transport)])
    lease = owner.granted([1, 5])
    store.on_checksum = lambda: owner.sender.release_sequence(lease.sequence_id, owner.boot_epoch)
    with pytest.raises(KvError):
        await KVReceiver(transport, store, FINGERPRINT).receive(owner.ticket(lease), INTO[:2], 0)
    store.on_checksum = None
    await _receive(owner, transport, store)
    assert (_pulls(transport), transport.num_fallbacks) == ({"grpc": 0, "shm": 2}, 0)
    await transport.aclose()


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        SharedMemoryOffer(2**22 + 1, 5, NUM_POOL_BLOCKS * BLOCK_BYTES, b"n" * 16),
        SharedMemoryOffer(os.getpid(), 0, 64, b"n" * 16),
    ],
)
async def test_memory_that_cannot_be_reached_is_passed_over(
    owner: Owner, grpc_transport: GrpcTransport, store: HookedStore, wrong: SharedMemoryOffer | None
) -> None:
    """An owner on another host, in another container, or without such memory: gRPC, unless told otherwise."""
    owner.offer(MemoryOffer(NUM_POOL_BLOCKS, BLOCK_BYTES, wrong))
    transport = NegotiatedTransport(grpc_transport, [SharedMemory(grpc_transport)])
    await _receive(owner, transport, store)
    assert _pulls(transport) == {"grpc": 1, "shm": 0}
    forced = NegotiatedTransport(grpc_transport, [SharedMemory(grpc_transport)], is_required=True)
    with pytest.raises(TransportBrokenError, match="--kv-transport"):
        await _receive(owner, forced, store)
    assert _pulls(forced) == {"grpc": 0, "shm": 0}


async def test_a_forced_way_that_fails_is_tried_again(
    owner: Owner, grpc_transport: GrpcTransport, store: HookedStore
) -> None:
    """There is no other one."""
    transport = NegotiatedTransport(grpc_transport, [_BrokenWay(grpc_transport)], is_required=True)
    for _ in range(2):
        with pytest.raises(TransportBrokenError):
            await _receive(owner, transport, store)
    assert _pulls(transport) == {"grpc": 0, "shm": 2}


class _InPlaceWay(_CountedWay):
    """Says that it writes in place."""

    writes_in_place = True


async def test_blocks_without_places_are_not_written_in_place(
    owner: Owner, grpc_transport: GrpcTransport, store: HookedStore
) -> None:
    """Blocks that must be converted come over gRPC; the others still come by the way that was agreed on."""
    transport = NegotiatedTransport(grpc_transport, [_InPlaceWay(grpc_transport)])
    ticket = owner.ticket(owner.granted([4, 2]))
    async with aclosing(transport.pull(ticket, [], into=())) as messages:
        assert [message async for message in messages]
    assert _pulls(transport) == {"grpc": 1, "shm": 0}
    await _receive(owner, transport, store)
    assert (_pulls(transport), transport.num_fallbacks) == ({"grpc": 1, "shm": 1}, 0)
    await transport.aclose()
    forced = NegotiatedTransport(grpc_transport, [_InPlaceWay(grpc_transport)], is_required=True)
    with pytest.raises(TransportBrokenError, match="must be converted"):
        await anext(forced.pull(ticket, [], into=()))
    await forced.aclose()


async def test_without_other_ways_nobody_is_asked(
    owner: Owner, grpc_transport: GrpcTransport, store: HookedStore
) -> None:
    """Forced gRPC costs no handshake."""
    owner.offer(None)
    transport = NegotiatedTransport(grpc_transport, [])
    await _receive(owner, transport, store)
    assert _pulls(transport) == {"grpc": 1}


async def test_a_handshake_that_fails_is_no_failure(
    owner: Owner, channels: Channels, store: HookedStore
) -> None:
    """An owner that does not answer it, as an older version would not, still sends its blocks; it is asked again next time."""
    server = grpc.aio.server()

    class Older(KvTransferServicer):
        """Knows no handshake."""

        num_asked = 0

        async def DescribeMemory(  # noqa: N802 - gRPC's name
            self, request: kv_transfer_pb2.DescribeMemoryRequest, context: object
        ) -> kv_transfer_pb2.DescribeMemoryResponse:
            """Fails."""
            self.num_asked += 1
            raise NotImplementedError

    older = Older(owner.sender)
    add_kv_transfer_service(older, server)
    owner.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    over_grpc = GrpcTransport(channels, FINGERPRINT)
    transport = NegotiatedTransport(over_grpc, [SharedMemory(over_grpc)])
    for _ in range(2):
        await _receive(owner, transport, store)
    assert (older.num_asked, _pulls(transport)["grpc"]) == (2, 2)
    await server.stop(None)


async def test_memory_of_an_owner_that_nobody_reads_is_let_go(
    owner: Owner, grpc_transport: GrpcTransport, store: HookedStore
) -> None:
    """A dead owner's pool would stay in the machine's memory as long as a reader has it mapped."""
    transport = NegotiatedTransport(grpc_transport, [SharedMemory(grpc_transport)], idle_s=0.01)
    await _receive(owner, transport, store)
    assert _num_mapped() == 1
    async with asyncio.timeout(20):
        while _num_mapped() > 0:  # noqa: ASYNC110 - nobody says when memory is unmapped
            await asyncio.sleep(0.01)
    await _receive(owner, transport, store)
    assert _pulls(transport)["shm"] == 2
    await transport.aclose()


async def test_memory_of_an_owner_that_is_lost_is_let_go_at_once(
    owner: Owner, server: grpc.aio.Server, grpc_transport: GrpcTransport, store: HookedStore
) -> None:
    """A pull that fails since nobody answers forgets the owner's memory."""
    transport = NegotiatedTransport(grpc_transport, [SharedMemory(grpc_transport)])
    await _receive(owner, transport, store)
    assert _num_mapped() == 1
    lease = owner.granted([1])
    await server.stop(None)
    with pytest.raises(KvLostError):
        async with aclosing(transport.pull(owner.ticket(lease), [], INTO[:1])) as messages:
            await anext(messages)
    assert _num_mapped() == 0


def _num_mapped() -> int:
    """How often a pool is mapped into this process to be read only."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum("memfd:paceline-kv" in line and line.split()[1].startswith("r-") for line in lines)
