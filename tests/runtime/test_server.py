"""A gRPC server as all our services run it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.core.errors import ConfigError
from paceline.runtime.channels import Channels
from paceline.runtime.server import GrpcServer, run_service

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "paceline.v1.InferenceService"


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    """Channels, closed in the end."""
    channels = Channels()
    yield channels
    await channels.aclose()


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A socket that nobody else uses."""
    return f"unix:{tmp_path_factory.mktemp('s') / 'socket'}"


@pytest.fixture
async def server(address: str) -> AsyncIterator[GrpcServer]:
    """A server that has started and does not serve yet."""
    server = GrpcServer(address)
    await server.start([SERVICE])
    yield server
    await server.stop(grace_s=0)


async def _health(channels: Channels, address: str, name: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channels.get(address))
    response = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
    return int(response.status)


async def test_a_server_is_alive_before_it_is_ready(
    server: GrpcServer, channels: Channels, address: str
) -> None:
    """Liveness holds from the start; the whole server and each service say NOT_SERVING until told otherwise."""
    assert await _health(channels, address, "liveness") == SERVING
    for name in ("", SERVICE):
        assert await _health(channels, address, name) == NOT_SERVING
    await server.set_serving(serving=True)
    for name in ("", SERVICE):
        assert await _health(channels, address, name) == SERVING


async def test_readiness_and_liveness_are_apart(server: GrpcServer, channels: Channels, address: str) -> None:
    """Not ready is not dead, and dead is not only unready."""
    await server.set_serving(serving=True)
    await server.set_serving(serving=False)
    assert await _health(channels, address, "liveness") == SERVING
    await server.set_dead()
    assert await _health(channels, address, "liveness") == NOT_SERVING


async def test_an_unknown_service_has_no_health(server: GrpcServer, channels: Channels, address: str) -> None:
    """As the health protocol wants it."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _health(channels, address, "nobody")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_what_is_served(server: GrpcServer, channels: Channels, address: str) -> None:
    """A tool without our protos finds the service, health, and reflection itself."""
    channel: Any = channels.get(address)
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = [s.name async for response in call for s in response.list_services_response.service]
    assert {SERVICE, "grpc.health.v1.Health"} < set(names)


async def test_a_busy_port_is_one_clear_error() -> None:
    """Two servers never share a port: the second is refused with the address, and the first goes on."""
    first = GrpcServer("127.0.0.1:0")
    port = first.grpc.add_insecure_port("127.0.0.1:0")
    await first.start([SERVICE])
    with pytest.raises(ConfigError, match=str(port)):
        await GrpcServer(f"127.0.0.1:{port}").start([SERVICE])
    channels = Channels()
    assert await _health(channels, f"127.0.0.1:{port}", "liveness") == SERVING
    await channels.aclose()
    await first.stop(grace_s=0)


async def test_a_stopping_server_is_not_ready(server: GrpcServer, channels: Channels, address: str) -> None:
    """Whoever watches hears it before the server is gone."""
    await server.set_serving(serving=True)
    stub: Any = health_pb2_grpc.HealthStub(channels.get(address))
    watch = aiter(stub.Watch(health_pb2.HealthCheckRequest(service="")))
    assert (await anext(watch)).status == SERVING
    stopping = asyncio.create_task(server.stop(grace_s=5))
    assert (await anext(watch)).status == NOT_SERVING
    await channels.aclose()
    await stopping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_the_service_to_stop(number: signal.Signals) -> None:
    """It sets the event; a service that returns ends with status 0."""

    async def main(stop: asyncio.Event) -> None:
        """Signals itself."""
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        await stop.wait()

    assert run_service(main) == 0


def test_an_error_of_ours_ends_the_process_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1 and the message, no traceback; another exception is a bug and is not hidden."""

    async def refuse(stop: asyncio.Event) -> None:
        """Cannot start."""
        raise ConfigError("--model is missing")

    async def crash(stop: asyncio.Event) -> None:
        """Has a bug."""
        raise ValueError("a bug")

    assert run_service(refuse) == 1
    assert capsys.readouterr().err == "error: --model is missing\n"
    with pytest.raises(ValueError, match="a bug"):
        run_service(crash)


async def test_channels_are_made_once_for_an_address() -> None:
    """Every call to one address shares a connection; another address has its own."""
    channels = Channels()
    assert channels.get("127.0.0.1:1") is channels.get("127.0.0.1:1")
    assert channels.get("127.0.0.1:1") is not channels.get("127.0.0.1:2")
    await channels.aclose()
