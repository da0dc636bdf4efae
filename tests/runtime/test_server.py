"""A gRPC server as all our services run it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.core.errors import ConfigError
from paceline.launcher.probes import free_port
from paceline.runtime.channels import Channels
from paceline.runtime.server import GrpcServer, run_service
from paceline.runtime.tls import CertificateSource, TlsFiles
from tests.certificates import Authority

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


@pytest.fixture
async def echo(address: str) -> AsyncIterator[Any]:
    """A method that says how long its message is, on a server that takes a mebibyte."""
    server = GrpcServer(address, max_receive_bytes=1 << 20)

    async def measure(request: bytes, context: object) -> bytes:
        """In decimals."""
        return str(len(request)).encode()

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(measure)
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"M": handler}),))
    await server.start([])
    # What a client does not want to send does not get far enough.
    options = (("grpc.max_metadata_size", 1 << 20), ("grpc.absolute_max_metadata_size", 1 << 20))
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield channel.unary_unary("/t.T/M")
    await server.stop(grace_s=0)


async def _refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
async def test_a_message_is_bounded_whatever_it_was_on_the_wire(
    echo: Any, compression: grpc.Compression
) -> None:
    """What is small when it is sent and large when it is unpacked is refused like what is large at once."""
    at_limit = await echo(bytes(1 << 20), compression=compression, timeout=30)
    assert at_limit == b"1048576"
    code, said = await _refused(echo(bytes((1 << 20) + 1), compression=compression, timeout=30))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in said
    # A hundred mebibytes in a hundred kibibytes.
    if compression is grpc.Compression.Gzip:
        code, _ = await _refused(echo(bytes(100 << 20), compression=compression, timeout=30))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_metadata_are_bounded(echo: Any) -> None:
    """15 KiB pass, always, and 17 KiB never; the server serves on."""
    for _ in range(5):
        assert await echo(b"x", metadata=(("k", "v" * (15 << 10)),), timeout=30) == b"1"
        code, said = await _refused(echo(b"x", metadata=(("k", "v" * (17 << 10)),), timeout=30))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "metadata" in said


async def test_a_second_address_is_the_same_without_tls(address: str, tmp_path: Path) -> None:
    """Probes of this machine come in by it, and by the first one nobody without TLS."""
    authority = Authority(tmp_path)
    pair = authority.issue("router")
    source = CertificateSource(
        TlsFiles(str(pair.cert), str(pair.key), "", setting="--tls", ca_setting="--tls-client-ca")
    )
    port = free_port("127.0.0.1", 0)
    server = GrpcServer(f"127.0.0.1:{port}", credentials=source.server_credentials(), plain_listen=address)
    await server.start([SERVICE])
    channels = Channels()
    assert await _health(channels, address, "liveness") == SERVING
    code, _ = await _refused(_health(channels, f"127.0.0.1:{port}", "liveness"))
    assert code is grpc.StatusCode.UNAVAILABLE
    await channels.aclose()
    await server.stop(grace_s=0)


async def test_channels_are_made_once_for_an_address() -> None:
    """Every call to one address shares a connection; another address has its own."""
    channels = Channels()
    assert channels.get("127.0.0.1:1") is channels.get("127.0.0.1:1")
    assert channels.get("127.0.0.1:1") is not channels.get("127.0.0.1:2")
    await channels.aclose()
