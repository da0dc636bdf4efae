"""A cluster by hand, with mutual TLS and a token everywhere: its own are served, and strangers are refused by each service."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.client import PacelineClient
from paceline.client_channel import Tls
from paceline.client_error import PacelineRpcError, from_rpc_error
from paceline.launcher.probes import free_port
from paceline.runtime.membership import CLUSTER_TOKEN
from paceline.runtime.tether import tethered
from paceline.v1 import decode_pb2, kv_transfer_pb2, prefill_pb2, worker_pb2
from tests.certificates import Authority, Pair
from tests.cluster.support import PATIENCE_S, fake_tokens, random_prompts, running_cluster
from tests.tiny_model import VOCAB_SIZE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.thorough]

TOKEN = "fedcba9876543210" * 4
PROMPTS = iter(random_prompts(seed=8, count=10, longest=300, vocab_size=VOCAB_SIZE))
WORKERS = ("prefill", "decode")
# Each tier's own service, and those that both have.
SHARED = (
    kv_transfer_pb2.DESCRIPTOR.services_by_name["KvTransferService"],
    worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
)
SERVICES: dict[str, tuple[ServiceDescriptor, ...]] = {
    "prefill": (prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"], *SHARED),
    "decode": (decode_pb2.DESCRIPTOR.services_by_name["DecodeService"], *SHARED),
}
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
GET_INFO = "/paceline.v1.WorkerService/GetInfo"


@dataclass
class Secured:
    """A cluster of three processes, what they know each other by, and what clients need."""

    cluster: Authority
    clients: Authority
    pairs: dict[str, Pair]
    client: Pair
    addresses: dict[str, str]
    processes: dict[str, Process]
    logs: Path

    def log(self, name: str) -> str:
        """What a process has said."""
        return (self.logs / f"{name}.log").read_text(errors="replace")

    async def until_said(self, name: str, word: str, times: int = 1) -> None:
        """Returns when its log has the word."""
        async with asyncio.timeout(PATIENCE_S):
            while self.log(name).count(word) < times:  # noqa: ASYNC110 - a file has no event to wait for
                await asyncio.sleep(0.02)

    def open(self, **options: Any) -> PacelineClient:
        """A client that the router lets in."""
        tls = Tls(ca=self.clients.ca, cert=self.client.cert, key=self.client.key)
        return PacelineClient(self.addresses["router"], **{"tls": tls, **options})


@asynccontextmanager
async def process(name: str, log_dir: Path, *command: str) -> AsyncIterator[Process]:
    """One that ends with the block, and with us."""
    with (log_dir / f"{name}.log").open("ab") as log:
        started = await asyncio.create_subprocess_exec(
            *tethered([sys.executable, "-P", "-m", *command], signal=signal.SIGKILL), stderr=log
        )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def until_serving(open_channel: Callable[[], grpc.aio.Channel]) -> None:
    """Returns when a server says so."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with open_channel() as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                try:
                    answer = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=5)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                except grpc.aio.AioRpcError:
                    pass
            await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def secured(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path
) -> AsyncIterator[Secured]:
    """Its workers' blocks go over gRPC, so that nothing passes by TLS."""
    directory = tmp_path_factory.mktemp("secured")
    token = directory / "token"
    token.write_text(TOKEN + "\n")
    cluster, clients = Authority(directory, "cluster"), Authority(directory, "clients")
    pairs = {name: cluster.issue(name, "127.0.0.1") for name in ("router", *WORKERS)}
    addresses = {name: f"127.0.0.1:{free_port('127.0.0.1', 0)}" for name in pairs}
    socket = f"unix:{directory / 'plain.sock'}"
    server = clients.issue("server")
    made = Secured(
        cluster, clients, pairs, clients.issue("client"), {**addresses, "plain": socket}, {}, directory
    )

    def shared(name: str) -> tuple[str, ...]:
        """What each of them is told."""
        return (
            *("--model", str(tiny_tokenizer_dir), "--listen", addresses[name], "--log-level", "debug"),
            *(
                "--cluster-token-file",
                str(token),
                "--metrics-port",
                "-1",
                *cluster.cluster_flags(pairs[name]),
            ),
        )

    public = ("--tls-cert", server.cert, "--tls-key", server.key, "--tls-client-ca", clients.ca)
    tiers = ("--prefill", addresses["prefill"], "--decode", addresses["decode"], "--disaggregate", "always")
    async with AsyncExitStack() as stack:
        for name in WORKERS:
            fake = (
                "--runner",
                "fake",
                "--num-blocks",
                "640",
                "--kv-transport",
                "grpc",
                "--worker-id",
                f"{name}-0",
            )
            made.processes[name] = await stack.enter_async_context(
                process(name, directory, f"{name}_service", *shared(name), *fake)
            )
        made.processes["router"] = await stack.enter_async_context(
            process(
                "router",
                directory,
                "router",
                *shared("router"),
                *map(str, public),
                *tiers,
                "--plain-listen",
                socket,
            )
        )
        await until_serving(lambda: grpc.aio.insecure_channel(socket))
        yield made


async def answer(secured: Secured) -> None:
    """A request that a client sends and whose blocks one worker hands to the other; its tokens are right."""
    prompt = next(PROMPTS)
    async with secured.open() as client:
        got = await client.generate_text(prompt, max_tokens=8, temperature=0, ignore_eos=True)
    assert got.token_ids == fake_tokens(prompt, 8, VOCAB_SIZE, None)
    assert (got.prefill_worker, got.decode_worker) == ("prefill-0", "decode-0")
    assert got.timeline.kv_blocks > 0
    assert got.timeline.attempts == 1


async def test_an_answer_arrives_by_a_hand_over(secured: Secured) -> None:
    """Client, router, prefill and decode: each lets the next one in, and the blocks travel."""
    await answer(secured)


def credentials(
    secured: Secured, tmp_path: Path
) -> dict[str, tuple[grpc.ChannelCredentials | None, str | None]]:
    """Strangers: what they connect with, and the token that they bring."""
    ours, other = secured.cluster, Authority(tmp_path, "stranger")
    member = ours.channel_credentials(secured.pairs["router"])
    return {
        "plaintext": (None, TOKEN),
        "no certificate": (ours.channel_credentials(), TOKEN),
        "another CA's": (ours.channel_credentials(other.issue("router")), TOKEN),
        "a client's": (ours.channel_credentials(secured.client), TOKEN),
        "no token": (member, None),
        "a wrong token": (member, TOKEN[::-1]),
    }


async def refusal(
    address: str, method: str, made: grpc.ChannelCredentials | None, token: str | None
) -> grpc.aio.AioRpcError | None:
    """What whoever calls it hears; None for an answer."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    channel: Any = (
        grpc.aio.insecure_channel(address, options=options)
        if made is None
        else grpc.aio.secure_channel(address, made, options=options)
    )
    metadata = ((CLUSTER_TOKEN, token),) if token else ()

    async with channel:
        # It says nothing before it is let in.
        call = channel.stream_stream(method)(metadata=metadata, timeout=20)
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            return error
        call.cancel()
    return None


@pytest.mark.parametrize("worker", WORKERS)
async def test_each_method_of_each_worker_refuses_strangers(
    secured: Secured, tmp_path: Path, worker: str
) -> None:
    """By TLS, before anything is said, or for want of the token with a reason; reflection too."""
    methods = [
        f"/{service.full_name}/{method.name}" for service in SERVICES[worker] for method in service.methods
    ]
    assert len(methods) >= 10
    for who, (made, token) in credentials(secured, tmp_path).items():
        for method in (*methods, REFLECTION):
            error = await refusal(secured.addresses[worker], method, made, token)
            assert error is not None, (who, method)
            if "token" in who:
                found = from_rpc_error(error)
                assert (found.code, found.reason) == (grpc.StatusCode.UNAUTHENTICATED, "PEER_UNKNOWN"), (
                    who,
                    method,
                )
            else:
                assert error.code() is grpc.StatusCode.UNAVAILABLE, (who, method)
                assert error.details() is not None


async def test_a_member_is_answered(secured: Secured) -> None:
    """The twin: with certificate and token the same call has its answer."""
    made = secured.cluster.channel_credentials(secured.pairs["decode"])
    async with grpc.aio.secure_channel(secured.addresses["prefill"], made) as channel:
        get_info: Any = channel.unary_unary(
            GET_INFO, response_deserializer=worker_pb2.GetInfoResponse.FromString
        )
        info = await get_info(b"", metadata=((CLUSTER_TOKEN, TOKEN),), timeout=20)
    assert info.worker_id == "prefill-0"


async def heard(make: Callable[[], PacelineClient]) -> PacelineRpcError:
    """What a client hears that is not let in."""
    async with make() as client:
        with pytest.raises(PacelineRpcError) as caught:
            await client.generate_text("hello", timeout_s=20)
    return caught.value


async def test_clients_without_a_certificate_are_not_let_in(secured: Secured, tmp_path: Path) -> None:
    """Nor those of another CA, of the cluster's, or without TLS; nor does a client trust a server of another CA."""
    router, ours, member = secured.addresses["router"], secured.clients, secured.pairs["router"]
    other = Authority(tmp_path, "other")
    theirs = other.issue("client")
    for tls in (
        None,
        Tls(ca=ours.ca),
        Tls(ca=ours.ca, cert=theirs.cert, key=theirs.key),
        Tls(ca=ours.ca, cert=member.cert, key=member.key),
        Tls(ca=other.ca, cert=secured.client.cert, key=secured.client.key),
        Tls(ca=ours.ca, cert=secured.client.cert, key=secured.client.key, server_name="elsewhere.example"),
    ):
        error = await heard(lambda tls=tls: PacelineClient(router, tls=tls))  # type: ignore[misc] # bound at once
        assert error.code is grpc.StatusCode.UNAVAILABLE


async def test_a_command_line_without_tls_says_what_is_wrong(secured: Secured) -> None:
    """Somebody is there and hangs up: that is another thing than nobody."""
    cli = (sys.executable, "-m", "paceline.cli", "generate", "hello", "--address")
    router = secured.addresses["router"]
    ours, mine = (
        str(secured.clients.ca),
        ("--tls-cert", str(secured.client.cert), "--tls-key", str(secured.client.key)),
    )
    assert (await run(*cli, router))[1] == (
        f"error: no Paceline server answers at {router}; it hangs up: does it speak TLS (--tls, --tls-ca), "
        "and ask for a certificate (--tls-cert)?\n"
    )
    assert "TLS fails" in (await run(*cli, router, "--tls", *mine))[1]
    assert "start one with ./run up" in (await run(*cli, "127.0.0.1:1", "--tls-ca", ours))[1]
    assert "cannot read nowhere.pem" in (await run(*cli, router, "--tls-ca", "nowhere.pem"))[1]
    assert (await run(*cli, router, "--tls-ca", ours, *mine, "--raw", "--max-tokens", "3"))[0] == 0


async def run(*command: str) -> tuple[int | None, str]:
    """Status of a command, and its own words on stderr; gRPC adds lines of its own."""
    started = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    _, err = await started.communicate()
    lines = [line for line in err.decode().splitlines(keepends=True) if "ssl_transport_security" not in line]
    return started.returncode, "".join(lines)


async def test_a_router_that_is_no_member_finds_nobody_and_says_why(
    secured: Secured, tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    """Without certificates, or without the token: no worker of another cluster is taken, and the log names the settings."""
    flags = (
        *("--model", str(tiny_tokenizer_dir), "--listen", f"unix:{tmp_path}/r", "--metrics-port", "-1"),
        *("--decode", secured.addresses["decode"]),
    )
    member = secured.cluster.cluster_flags(secured.pairs["router"])
    for name, told, why in (
        ("plain", (), "do both sides have --cluster-tls-cert"),
        ("tokenless", member, "--cluster-token-file"),
    ):
        async with process(name, tmp_path, "router", *flags, *told):
            lonely = Secured(secured.cluster, secured.clients, {}, secured.client, {}, {}, tmp_path)
            await lonely.until_said(name, "worker_unreachable")
            said = next(line for line in lonely.log(name).splitlines() if "worker_unreachable" in line)
            assert why in json.loads(said)["error"]
            assert "worker_found" not in lonely.log(name)


async def test_certificates_are_replaced_while_all_run(secured: Secured) -> None:
    """On SIGHUP each process takes its new files; requests are served before, meanwhile and after, and a broken file changes nothing."""
    for pair in secured.pairs.values():
        pair.key.write_text("no key\n")
    await _hang_up(secured, "certificates_refused")
    await answer(secured)
    for name in secured.pairs:
        secured.cluster.issue(name, "127.0.0.1")
    await _hang_up(secured, '"side": "cluster", "event": "certificates_loaded"')
    await answer(secured)
    assert secured.log("router").count("worker_lost") == 0


async def _hang_up(secured: Secured, word: str) -> None:
    for name, started in secured.processes.items():
        started.send_signal(signal.SIGHUP)
        await secured.until_said(name, word)


async def test_a_local_cluster_serves_clients_over_tls(
    tmp_path: Path, tiny_tokenizer_dir: Path, secured: Secured
) -> None:
    """`./run up` comes up though it has no certificate that its router would take; clients need one, and no other way is open to them."""
    server = secured.clients.issue("local")
    async with running_cluster(
        tmp_path,
        tiny_tokenizer_dir,
        runner="fake",
        topology="0P1D",
        tls_cert=str(server.cert),
        tls_key=str(server.key),
        tls_client_ca=str(secured.clients.ca),
    ) as cluster:
        tls = Tls(ca=secured.clients.ca, cert=secured.client.cert, key=secured.client.key)
        async with PacelineClient(cluster.address, tls=tls) as client:
            got = await client.generate_text((4, 5, 6), max_tokens=5, temperature=0, ignore_eos=True)
        assert got.token_ids == fake_tokens((4, 5, 6), 5, VOCAB_SIZE, None)
        for wrong in (None, Tls(ca=secured.clients.ca)):
            error = await heard(lambda tls=wrong: PacelineClient(cluster.address, tls=tls))  # type: ignore[misc] # bound at once
            assert error.code is grpc.StatusCode.UNAVAILABLE
