"""Owners of leases, reached in process, over a real gRPC server, and through what such a server says of their memory."""

import secrets
from collections.abc import AsyncIterator

import grpc
import pytest

from kvtransfer.offer import MemoryOffer
from kvtransfer.service import KvTransferServicer, add_kv_transfer_service
from kvtransfer.transports.base import KVTransport
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.late import LateTransport
from kvtransfer.transports.local import LocalTransport
from kvtransfer.transports.negotiated import NegotiatedTransport
from kvtransfer.transports.nixl import Nixl
from kvtransfer.transports.shm import SharedMemory
from paceline.core.clock import ManualClock
from paceline.runtime.channels import Channels
from tests.kvtransfer.hand_over import BLOCK_BYTES, FINGERPRINT, NUM_POOL_BLOCKS, HookedStore, Owner


@pytest.fixture
def clock() -> ManualClock:
    """Time that moves when told to."""
    return ManualClock(100.0)


@pytest.fixture
def owner(clock: ManualClock) -> Owner:
    """A worker with leases of 30 s."""
    return Owner(clock)


@pytest.fixture
def store() -> HookedStore:
    """Where a test receives."""
    return HookedStore(NUM_POOL_BLOCKS, BLOCK_BYTES)


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    """Channels, closed in the end."""
    channels = Channels()
    yield channels
    await channels.aclose()


@pytest.fixture
async def server(owner: Owner) -> AsyncIterator[grpc.aio.Server]:
    """The owner, served on a port of this machine that `owner.address` then names."""
    server = grpc.aio.server()
    add_kv_transfer_service(KvTransferServicer(owner.sender), server)
    owner.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield server
    await server.stop(None)


@pytest.fixture
async def grpc_transport(server: grpc.aio.Server, channels: Channels) -> GrpcTransport:
    """The way to the served owner."""
    return GrpcTransport(channels, FINGERPRINT)


@pytest.fixture
async def shm_transport(grpc_transport: GrpcTransport) -> AsyncIterator[NegotiatedTransport]:
    """Shared memory or nothing."""
    transport = NegotiatedTransport(grpc_transport, [SharedMemory(grpc_transport)], is_required=True)
    yield transport
    assert {name for name, stats in transport.stats().items() if stats.num_pulls} <= {"shm"}
    await transport.aclose()


@pytest.fixture
async def nixl_transport(
    owner: Owner, store: HookedStore, grpc_transport: GrpcTransport
) -> AsyncIterator[NegotiatedTransport]:
    """NIXL or nothing; the owner has an agent of its own."""
    pytest.importorskip("nixl_cu12", reason="NIXL is an optional extra, and is not installed")
    agents = [
        Nixl.open(f"{name}-{secrets.token_hex(8)}", each.pool, BLOCK_BYTES, grpc_transport, lambda: True)
        for name, each in (("owner", owner.store), ("receiver", store))
    ]
    theirs, ours = agents
    owner.offer(MemoryOffer(NUM_POOL_BLOCKS, BLOCK_BYTES, nixl=theirs.offer))
    owner.sender._on_read = theirs.expect_readers
    transport = NegotiatedTransport(grpc_transport, [ours], is_required=True)
    yield transport
    assert {name for name, stats in transport.stats().items() if stats.num_pulls} <= {"nixl"}
    await transport.aclose()
    await theirs.aclose()


@pytest.fixture(params=["local", "late", "grpc", "shm", "nixl"])
def transport(request: pytest.FixtureRequest, owner: Owner, store: HookedStore) -> KVTransport:
    """Every transport; a test that takes it is a promise that each of them keeps."""
    if request.param == "local":
        return LocalTransport(owner.sender, FINGERPRINT)
    if request.param == "late":
        return LateTransport(owner.sender, FINGERPRINT, owner.store, store)
    transport: KVTransport = request.getfixturevalue(f"{request.param}_transport")
    return transport
