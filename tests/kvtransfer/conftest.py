"""Owners of leases, reached in process and over a real gRPC server."""

from collections.abc import AsyncIterator

import grpc
import pytest

from kvtransfer.service import KvTransferServicer
from kvtransfer.transports.base import KVTransport
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.local import LocalTransport
from paceline.core.clock import ManualClock
from paceline.runtime.channels import Channels
from paceline.v1.kv_transfer_pb2_grpc import add_KvTransferServiceServicer_to_server
from tests.kvtransfer.hand_over import FINGERPRINT, Owner


@pytest.fixture
def clock() -> ManualClock:
    """Time that moves when told to."""
    return ManualClock(100.0)


@pytest.fixture
def owner(clock: ManualClock) -> Owner:
    """A worker with leases of 30 s."""
    return Owner(clock)


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
    add_KvTransferServiceServicer_to_server(KvTransferServicer(owner.sender), server)
    owner.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield server
    await server.stop(None)


@pytest.fixture
async def grpc_transport(server: grpc.aio.Server, channels: Channels) -> GrpcTransport:
    """The way to the served owner."""
    return GrpcTransport(channels, FINGERPRINT)


@pytest.fixture(params=["local", "grpc"])
def transport(request: pytest.FixtureRequest, owner: Owner) -> KVTransport:
    """Every transport; a test that takes it is a promise that each of them keeps."""
    if request.param == "local":
        return LocalTransport(owner.sender, FINGERPRINT)
    grpc_transport: GrpcTransport = request.getfixturevalue("grpc_transport")
    return grpc_transport
