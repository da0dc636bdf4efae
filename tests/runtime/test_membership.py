"""Who belongs to the cluster, and what strangers hear."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from paceline.client_error import PacelineRpcError, from_rpc_error
from paceline.core.clock import ManualClock
from paceline.core.errors import ConfigError, PeerLostError
from paceline.launcher.probes import free_port
from paceline.runtime.channels import Channels
from paceline.runtime.cluster_settings import ClusterSettings, check_cluster
from paceline.runtime.membership import CLUSTER_TOKEN, Membership, Strangers, read_token
from paceline.runtime.server import GrpcServer
from paceline.runtime.tls import CertificateSource
from tests.certificates import Authority
from tests.runtime.test_tls import cluster_files

TOKEN = "0123456789abcdef" * 4
SERVICE = "test.Cluster"
TLS: dict[str, Any] = {"cluster_tls_cert": "c", "cluster_tls_key": "k", "cluster_tls_ca": "a"}


async def _echo(request: bytes, context: object) -> bytes:
    return request


async def _count(request: bytes, context: object) -> AsyncIterator[bytes]:
    for number in range(3):
        yield request + b"%d" % number


async def _double(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request * 2


async def _join(requests: AsyncIterator[bytes], context: object) -> bytes:
    return b"".join([request async for request in requests])


def _handlers() -> grpc.GenericRpcHandler:
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Echo": grpc.unary_unary_rpc_method_handler(_echo),
        "Count": grpc.unary_stream_rpc_method_handler(_count),
        "Double": grpc.stream_stream_rpc_method_handler(_double),
        "Join": grpc.stream_unary_rpc_method_handler(_join),
    }
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """A server that demands the token, with a method of each kind."""
    address = f"127.0.0.1:{free_port('127.0.0.1', 0)}"
    server = GrpcServer(address, interceptors=Membership(token=TOKEN).interceptors())
    server.grpc.add_generic_rpc_handlers((_handlers(),))
    await server.start([SERVICE])
    yield address
    await server.stop(grace_s=0)


async def _words() -> AsyncIterator[bytes]:
    for word in (b"a", b"b"):
        yield word


async def call_all(channel: Any, metadata: Any = None, *, is_silent: bool = False) -> list[object]:
    """What each kind of method answers: its messages, or the error. Who is silent waits until it is let in."""

    def said() -> tuple[AsyncIterator[bytes], ...]:
        """What each call says of itself."""
        return () if is_silent else (_words(),)

    extra = {} if metadata is None else {"metadata": metadata}

    async def unary(call: Any) -> object:
        """Of those with one answer."""
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)

    async def stream(call: Any) -> object:
        """Of those with several."""
        try:
            return [message async for message in call]
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)

    return [
        await unary(channel.unary_unary(f"/{SERVICE}/Echo")(b"x", timeout=10, **extra)),
        await stream(channel.unary_stream(f"/{SERVICE}/Count")(b"x", timeout=10, **extra)),
        await stream(channel.stream_stream(f"/{SERVICE}/Double")(*said(), timeout=10, **extra)),
        await unary(channel.stream_unary(f"/{SERVICE}/Join")(*said(), timeout=10, **extra)),
    ]


async def test_calls_of_the_cluster_are_answered(address: str) -> None:
    """Every kind of call brings the token by itself."""
    channels = Channels(Membership(token=TOKEN))
    channel = channels.get(address)
    await channel.channel_ready()
    assert await call_all(channel) == [b"x", [b"x0", b"x1", b"x2"], [b"aa", b"bb"], b"ab"]
    await channels.aclose()


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        ((CLUSTER_TOKEN, ""),),
        ((CLUSTER_TOKEN, TOKEN[:-1]),),
        ((CLUSTER_TOKEN, TOKEN[:-1] + "0"),),
        ((CLUSTER_TOKEN, TOKEN + "0"),),
        ((CLUSTER_TOKEN, TOKEN.upper()),),
        ((CLUSTER_TOKEN, "x"), (CLUSTER_TOKEN, TOKEN)),
        (("authorization", f"Bearer {TOKEN}"),),
    ],
)
async def test_strangers_are_refused(address: str, metadata: Any) -> None:
    """Whatever they call and bring, before they have said anything: with a reason, and without a word of the token."""
    async with grpc.aio.insecure_channel(address) as channel:
        for answer in await call_all(channel, metadata, is_silent=True):
            assert isinstance(answer, PacelineRpcError)
            assert (answer.code, answer.reason) == (grpc.StatusCode.UNAUTHENTICATED, "PEER_UNKNOWN")
            assert "--cluster-token-file" in answer.message
            assert TOKEN[:8] not in answer.message


async def test_strangers_are_counted() -> None:
    """Each of their calls, and none of the cluster's own or of a probe; the log names the first one."""
    address, membership = f"127.0.0.1:{free_port('127.0.0.1', 0)}", Membership(token=TOKEN)
    server, channels = GrpcServer(address, interceptors=membership.interceptors()), Channels(membership)
    server.grpc.add_generic_rpc_handlers((_handlers(),))
    await server.start([SERVICE])
    with capture_logs() as logs:
        await call_all(channels.get(address))
        assert membership.strangers.num_refused == 0
        async with grpc.aio.insecure_channel(address) as channel:
            await call_all(channel, is_silent=True)
    assert membership.strangers.num_refused == 4
    (line,) = (line for line in logs if line["event"] == "stranger_refused")
    assert line["peer"].startswith("ipv4:127.0.0.1:")
    assert (line["log_level"], line["num_refused"]) == ("warning", 1)
    await channels.aclose()
    await server.stop(grace_s=0)


def test_whoever_knocks_often_fills_no_log() -> None:
    """A line a minute, with how many calls it were so far."""
    clock = ManualClock()
    strangers = Strangers(clock)
    with capture_logs() as logs:
        for _ in range(1000):
            strangers.note("ipv4:10.0.0.9:1")
        clock.advance(59.0)
        strangers.note("ipv4:10.0.0.9:2")
        clock.advance(1.0)
        strangers.note("ipv4:10.0.0.9:3")
    assert [(line["peer"], line["num_refused"]) for line in logs] == [
        ("ipv4:10.0.0.9:1", 1),
        ("ipv4:10.0.0.9:3", 1002),
    ]


async def test_a_method_that_is_not_there_tells_strangers_nothing(address: str) -> None:
    """They hear the same of it as of one that is."""
    async with grpc.aio.insecure_channel(address) as channel:
        anything: Any = channel
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anything.unary_unary(f"/{SERVICE}/Nothing")(b"", timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_is_open_and_reflection_is_not(address: str) -> None:
    """A probe knows no secret, and learns none; what there is to call, the cluster's own may ask."""
    async with grpc.aio.insecure_channel(address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        plain: Any = channel
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(plain)
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.ServerReflectionInfo(iter(asked), timeout=10)))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        call = stub.ServerReflectionInfo(iter(asked), timeout=10, metadata=((CLUSTER_TOKEN, TOKEN),))
        assert SERVICE in str(await anext(aiter(call)))


async def test_a_certificate_does_not_make_up_for_the_token(authority: Authority) -> None:
    """Where both are set, both are demanded."""
    address = f"127.0.0.1:{free_port('127.0.0.1', 0)}"
    source = CertificateSource(cluster_files(authority, authority.issue("one")))
    both = Membership(token=TOKEN, certificates=source)
    server = GrpcServer(address, credentials=both.server_credentials(), interceptors=both.interceptors())
    server.grpc.add_generic_rpc_handlers((_handlers(),))
    await server.start([SERVICE])
    channels, without = Channels(both), Channels(Membership(certificates=source))
    assert (await call_all(channels.get(address)))[0] == b"x"
    refused = (await call_all(without.get(address)))[0]
    assert isinstance(refused, PacelineRpcError)
    assert refused.reason == "PEER_UNKNOWN"
    await channels.aclose()
    await without.aclose()
    await server.stop(grace_s=0)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """The cluster's."""
    return Authority(tmp_path)


@pytest.mark.parametrize("identity", ["worker.example", "localhost"])
async def test_a_name_stands_for_all_workers(authority: Authority, identity: str) -> None:
    """With --cluster-tls-name the certificate must have that name, wherever the worker listens; without it, its host's."""
    address = f"127.0.0.1:{free_port('127.0.0.1', 0)}"
    source = CertificateSource(cluster_files(authority, authority.issue("worker", identity)))
    server = GrpcServer(address, credentials=source.server_credentials())
    server.grpc.add_generic_rpc_handlers((_handlers(),))
    await server.start([SERVICE])
    named = Channels(Membership(certificates=source, peer_name="worker.example"))
    plain = Channels(Membership(certificates=source))
    is_named = (await call_all(named.get(address)))[0] == b"x"
    assert is_named == (identity == "worker.example")
    assert (await call_all(plain.get(address)))[0] != b"x"
    await named.aclose()
    await plain.aclose()
    await server.stop(grace_s=0)


async def test_nothing_crosses_a_network_in_the_clear() -> None:
    """A channel to another machine needs TLS, or a word that the network is safe; one on this machine needs neither."""
    channels = Channels(Membership(token=TOKEN))
    with pytest.raises(PeerLostError, match="in the clear; set --cluster-tls-cert"):
        channels.get("10.0.0.1:50061")
    channels.get("127.0.0.1:50061")
    channels.get("unix:/somewhere")
    trusting = Channels(Membership(token=TOKEN, allow_plaintext=True))
    trusting.get("10.0.0.1:50061")
    await channels.aclose()
    await trusting.aclose()


async def test_renewed_channels_are_new_and_the_old_ones_go_on(address: str) -> None:
    """Who holds one may finish with it."""
    channels = Channels(Membership(token=TOKEN))
    old = channels.get(address)
    channels.renew()
    assert channels.get(address) is not old
    assert (await call_all(old))[0] == (await call_all(channels.get(address)))[0] == b"x"
    await channels.aclose()


def test_a_token_is_read_without_the_space_around_it(tmp_path: Path) -> None:
    """As an editor or `openssl rand` leaves it; no file is no token."""
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert read_token(str(file)) == TOKEN
    assert read_token("") == ""


@pytest.mark.parametrize("content", ["", "short", "x" * 257, "with space " * 5, "ünïcode-" * 8, "a\tb" * 20])
def test_a_bad_token_is_refused_and_not_shown(tmp_path: Path, content: str) -> None:
    """Too short to be a secret, too long or unfit for metadata."""
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"--cluster-token-file: .* 32 to 256 printable") as caught:
        read_token(str(file))
    assert not content or content not in str(caught.value)
    with pytest.raises(ConfigError, match=r"--cluster-token-file: cannot read .*nowhere"):
        read_token(str(tmp_path / "nowhere"))


OPEN, CLOSED = "0.0.0.0:50061", ("127.0.0.1:50061", "localhost:1", "unix:/x", "[::1]:1")


@pytest.mark.parametrize("settings", [{}, {"cluster_token_file": "t"}, {"allow_plaintext": True}])
def test_a_worker_does_not_serve_strangers(settings: dict[str, Any]) -> None:
    """Beyond loopback it needs certificates; a token alone would cross the network in the clear, and nothing alone is not enough."""
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:50061 .* --cluster-tls-cert"):
        check_cluster(ClusterSettings(**settings), listen=OPEN)
    for listen in CLOSED:
        check_cluster(ClusterSettings(**settings), listen=listen)


@pytest.mark.parametrize("settings", [TLS, {"cluster_token_file": "t", "allow_plaintext": True}])
def test_what_a_worker_may_listen_beyond_loopback_with(settings: dict[str, Any]) -> None:
    """Certificates, or a token where the network is said to be safe."""
    check_cluster(ClusterSettings(**settings), listen=OPEN)


def test_a_router_calls_workers_on_other_machines_over_tls() -> None:
    """Or where the network is said to be safe; on this machine as it likes."""
    peers = ["127.0.0.1:1", "10.0.0.1:50061"]
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1:50061 is on another machine"):
        check_cluster(ClusterSettings(cluster_token_file="t"), peers=peers)
    check_cluster(ClusterSettings(**TLS), peers=peers)
    check_cluster(ClusterSettings(allow_plaintext=True), peers=peers)
    check_cluster(ClusterSettings(), peers=peers[:1])


def test_settings_that_would_be_ignored_are_refused() -> None:
    """A name without certificates, and plaintext beside them."""
    with pytest.raises(ConfigError, match="--cluster-tls-name means nothing"):
        check_cluster(ClusterSettings(cluster_tls_name="n"))
    with pytest.raises(ConfigError, match="--allow-plaintext contradicts"):
        check_cluster(ClusterSettings("", "c", "k", "a", allow_plaintext=True))
    with pytest.raises(ConfigError, match="--cluster-tls-key and --cluster-tls-ca is missing"):
        check_cluster(ClusterSettings(cluster_tls_cert="c"))
