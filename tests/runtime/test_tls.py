"""Certificates out of files: what works is served, what would not is one line at start."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from paceline.core.errors import ConfigError
from paceline.launcher.probes import free_port
from paceline.runtime.reload import reload_certificates
from paceline.runtime.server import GrpcServer
from paceline.runtime.tls import CertificateSource, TlsFiles, read_certificates
from tests.certificates import Authority, Pair

NOW = datetime.now(UTC)
DAY = timedelta(days=1)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """The CA of the cluster."""
    return Authority(tmp_path)


def cluster_files(authority: Authority, pair: Pair) -> TlsFiles:
    """Of a process of the cluster."""
    return TlsFiles(
        str(pair.cert), str(pair.key), str(authority.ca), "--cluster-tls", "--cluster-tls-ca", is_cluster=True
    )


def public_files(pair: Pair, client_ca: Path | None = None) -> TlsFiles:
    """Of a router's public side."""
    return TlsFiles(str(pair.cert), str(pair.key), str(client_ca or ""), "--tls", "--tls-client-ca")


def refusal(files: TlsFiles) -> str:
    """What is said of files that would not work."""
    with pytest.raises(ConfigError) as caught:
        read_certificates(files)
    assert "\n" not in str(caught.value)
    assert "PRIVATE KEY" not in str(caught.value)
    return str(caught.value)


def test_good_certificates_are_taken(authority: Authority) -> None:
    """On both sides, and with a CA of clients that has not signed our own certificate."""
    pair = authority.issue("worker")
    assert read_certificates(cluster_files(authority, pair)).ca == authority.ca.read_bytes()
    assert read_certificates(public_files(pair)).ca is None
    read_certificates(public_files(pair, Authority(authority.ca.parent, "clients").ca))


def test_a_missing_file_is_named(authority: Authority) -> None:
    """With the setting that names it."""
    pair = authority.issue("worker")
    for field, setting in (
        ("cert", "--cluster-tls-cert"),
        ("key", "--cluster-tls-key"),
        ("ca", "--cluster-tls-ca"),
    ):
        files = {"cert": str(pair.cert), "key": str(pair.key), "ca": str(authority.ca), field: "nowhere.pem"}
        said = refusal(
            TlsFiles(**files, setting="--cluster-tls", ca_setting="--cluster-tls-ca", is_cluster=True)
        )
        assert said == f"{setting}: cannot read nowhere.pem: No such file or directory"


def test_a_key_of_another_certificate_is_refused(authority: Authority) -> None:
    """Both files are named."""
    one, other = authority.issue("one"), authority.issue("other")
    said = refusal(public_files(Pair(one.cert, other.key)))
    assert said.startswith(f"--tls-key: the key in {other.key} does not belong to")


@pytest.mark.parametrize("is_cluster", [True, False])
def test_a_certificate_out_of_its_time_is_refused(authority: Authority, is_cluster: bool) -> None:
    """It has expired, or is not valid yet: no peer would take it."""
    old = authority.issue("old", begins=NOW - 2 * DAY, ends=NOW - DAY)
    early = authority.issue("early", begins=NOW + DAY, ends=NOW + 2 * DAY)
    for pair, why in ((old, "certificate has expired"), (early, "certificate is not yet valid")):
        files = cluster_files(authority, pair) if is_cluster else public_files(pair)
        said = refusal(files)
        assert said == f"{files.setting}-cert: {pair.cert} would be refused by peers: {why}"


def test_a_certificate_of_another_ca_is_refused_in_a_cluster(authority: Authority, tmp_path: Path) -> None:
    """Its own peers would refuse it; clients have roots of their own, which nobody here knows."""
    pair = Authority(tmp_path, "other").issue("worker")
    assert "not signed by the CA in" in refusal(cluster_files(authority, pair))
    read_certificates(public_files(pair))


def test_what_is_no_certificate_is_refused(authority: Authority, tmp_path: Path) -> None:
    """Text in the place of a certificate, a key or a CA, or a key with a password, about which nobody is asked."""
    pair, text = authority.issue("worker"), tmp_path / "text.pem"
    text.write_text("hello\n")
    assert "are not a certificate and its key" in refusal(public_files(Pair(text, pair.key)))
    assert "are not a certificate and its key" in refusal(public_files(Pair(pair.cert, text)))
    assert refusal(public_files(pair, text)) == f"--tls-client-ca: {text} holds no certificate in PEM"
    locked = tmp_path / "locked.key"
    locked.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIB\n-----END ENCRYPTED PRIVATE KEY-----\n")
    assert "without a password" in refusal(public_files(Pair(pair.cert, locked)))


def test_settings_that_go_together_are_asked_for() -> None:
    """Half of a pair is an error that names what is missing, and none of it is no TLS."""
    assert not TlsFiles("", "", "", "--tls", "--tls-client-ca").check()
    assert TlsFiles("c", "k", "", "--tls", "--tls-client-ca").check()
    with pytest.raises(ConfigError, match="--tls-key is missing"):
        TlsFiles("c", "", "", "--tls", "--tls-client-ca").check()
    with pytest.raises(ConfigError, match="--tls-client-ca means nothing without --tls-cert"):
        TlsFiles("", "", "a", "--tls", "--tls-client-ca").check()
    with pytest.raises(ConfigError, match="--cluster-tls-ca is missing"):
        TlsFiles("c", "k", "", "--cluster-tls", "--cluster-tls-ca", is_cluster=True).check()


@asynccontextmanager
async def serving(source: CertificateSource) -> AsyncIterator[str]:
    """A server with these certificates; gives its address."""
    address = f"127.0.0.1:{free_port('127.0.0.1', 0)}"
    server = GrpcServer(address, credentials=source.server_credentials())
    await server.start([])
    try:
        yield address
    finally:
        await server.stop(grace_s=0)


async def is_alive(address: str, credentials: grpc.ChannelCredentials | None) -> bool:
    """Whether a client is let in, over a connection of its own."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    channel: Any = (
        grpc.aio.secure_channel(address, credentials, options=options)
        if credentials
        else grpc.aio.insecure_channel(address, options=options)
    )
    async with channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=10)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_who_shows_a_certificate_of_the_ca_is_let_in(authority: Authority, tmp_path: Path) -> None:
    """Nobody without one, with one of another CA, or without TLS; and a client finds out whom it talks to."""
    source = CertificateSource(cluster_files(authority, authority.issue("worker")))
    other = Authority(tmp_path, "other")
    mine, theirs = authority.issue("router"), other.issue("router")
    async with serving(source) as address:
        assert await is_alive(address, authority.channel_credentials(mine))
        assert not await is_alive(address, authority.channel_credentials())
        assert not await is_alive(address, authority.channel_credentials(theirs))
        assert not await is_alive(address, other.channel_credentials(mine))
        assert not await is_alive(address, None)


async def test_without_a_ca_everybody_is_let_in_over_tls(authority: Authority) -> None:
    """As clients of a public server are."""
    async with serving(CertificateSource(public_files(authority.issue("router")))) as address:
        assert await is_alive(address, authority.channel_credentials())
        assert not await is_alive(address, None)


async def test_new_files_are_taken_for_new_connections(authority: Authority, tmp_path: Path) -> None:
    """Once they are read again; a connection that is there goes on, and broken files change nothing."""
    pair, later = authority.issue("router"), Authority(tmp_path, "later")
    source = CertificateSource(public_files(pair))
    async with (
        serving(source) as address,
        grpc.aio.secure_channel(address, authority.channel_credentials()) as held,
    ):
        await held.channel_ready()
        replaced = later.issue("router")
        shutil.copy(replaced.cert, pair.cert)
        with capture_logs() as logs:
            reload_certificates("public", source)
        assert [(each["event"], each["side"]) for each in logs] == [("certificates_refused", "public")]
        assert await is_alive(address, authority.channel_credentials())
        shutil.copy(replaced.key, pair.key)
        with capture_logs() as logs:
            reload_certificates("public", source)
        assert [each["event"] for each in logs] == ["certificates_loaded"]
        assert await is_alive(address, later.channel_credentials())
        assert not await is_alive(address, authority.channel_credentials())
        stub: Any = health_pb2_grpc.HealthStub(held)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
