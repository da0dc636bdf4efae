"""What a cluster's processes are told, and that a LocalCluster leaves nothing behind."""

import asyncio
import contextlib
import signal
import socket
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import redis.asyncio

from paceline.core.errors import ConfigError, ProcessLostError
from paceline.launcher import config as launcher_config
from paceline.launcher.cluster import LocalCluster, may_use_gpus
from paceline.launcher.commands import router_command, worker_command
from paceline.launcher.config import UpConfig
from paceline.launcher.layout import Layout, metrics_ports, router_names, router_ports
from paceline.launcher.probes import free_port, listening
from paceline.launcher.supervisor import RestartPolicy


def _layout(config: UpConfig) -> Layout:
    return Layout(
        config,
        Path("/m"),
        Path("/r"),
        {name: 7 + number for number, name in enumerate(router_names(config))},
        config.kv_bytes_per_worker(free_bytes=4 << 30, weights_bytes=0),
    )


def _consecutive_ports(count: int) -> int:
    """The first of so many ports that nobody listens on."""
    while True:
        with contextlib.suppress(ConfigError), contextlib.ExitStack() as held:
            first = held.enter_context(listening("127.0.0.1", 0, ""))
            for offset in range(1, count):
                held.enter_context(listening("127.0.0.1", first + offset, ""))
            return first


def _flags(command: tuple[str, ...]) -> dict[str, str]:
    start = command.index("-m") + 2
    return dict(zip(command[start::2], command[start + 1 :: 2], strict=True))


@pytest.mark.parametrize("option", ["tp", "pp"])
def test_workers_are_told_how_many_processes_they_are(option: str) -> None:
    """Where it is said for all of them; else each tier's section of the config file may say it."""
    several = worker_command(_layout(UpConfig(**{option: 2})), "decode-0")  # type: ignore[arg-type] # a number
    assert _flags(several)[f"--{option}"] == "2"
    assert f"--{option}" not in worker_command(_layout(UpConfig()), "decode-0")


def test_what_no_worker_would_start_with_is_refused_at_once() -> None:
    """As the workers themselves refuse it."""
    with pytest.raises(ConfigError, match="--tp and --pp"):
        UpConfig(tp=2, pp=2)


def test_a_worker_is_told_what_it_needs() -> None:
    """A worker gets its name, socket, model, limits, the table's address, and its share of cores and KV memory."""
    config = UpConfig(
        topology="2P1D", threads=3, dtype="float32", kv_dtype="int8", kv_memory="30%", max_model_len=99
    )
    command = worker_command(_layout(config), "prefill-1")
    assert "prefill_service" in command
    assert _flags(command) == {
        "--listen": "unix:/r/prefill-1.sock",
        "--worker-id": "prefill-1",
        "--model": "/m",
        "--device": "auto",
        "--gpu-turn": "1/3",
        "--dtype": "float32",
        "--kv-dtype": "int8",
        "--mla": "expanded",
        "--quantization": "none",
        "--exactness": "fast",
        "--redis": "unix:///r/redis.sock",
        "--threads": "3",
        "--max-model-len": "99",
        "--kv-memory": "429496729B",
        "--runner": "torch",
        "--kv-transport": "auto",
        "--cluster-token-file": "/r/cluster.token",
        "--metrics-port": "-1",
    }


def test_workers_take_gpus_in_turns() -> None:
    """Of both tiers together, in the order in which they are named."""
    layout = _layout(UpConfig(topology="1P2D", device="cuda"))
    flags = [_flags(worker_command(layout, worker)) for worker in ("prefill-0", "decode-0", "decode-1")]
    assert [each["--gpu-turn"] for each in flags] == ["0/3", "1/3", "2/3"]
    assert {each["--device"] for each in flags} == {"cuda"}


@pytest.mark.parametrize(
    ("device", "has_driver", "expected"),
    [("cpu", True, False), ("auto", True, True), ("auto", False, False), ("cuda:1", False, True)],
)
def test_weights_that_may_go_to_gpus_need_no_memory_here(
    device: str, has_driver: bool, expected: bool, tmp_path: Path
) -> None:
    """What is asked for is believed; else the driver says whether there is one."""
    assert may_use_gpus(device, tmp_path if has_driver else tmp_path / "none") == expected


def test_workers_are_told_which_cores_are_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, none twice, and one file for all."""
    monkeypatch.setattr(launcher_config, "usable_cores", lambda: 7)
    layout = _layout(UpConfig(topology="1P2D"))
    flags = [_flags(worker_command(layout, worker)) for worker in ("prefill-0", "decode-0", "decode-1")]
    assert [each["--first-core"] for each in flags] == ["0", "2", "4"]
    assert {(each["--threads"], each["--cores-file"]) for each in flags} == {("2", "/r/cores")}


def test_the_router_is_told_of_every_worker() -> None:
    """The router gets the workers' addresses by tier, and how to disaggregate and to place."""
    config = UpConfig(topology="2P1D", disaggregate="always", placement="least-loaded", redis="redis://far")
    command = router_command(_layout(config), "router")
    assert _flags(command) == {
        "--listen": "127.0.0.1:7",
        "--model": "/m",
        "--redis": "redis://far",
        "--prefill": "unix:/r/prefill-0.sock,unix:/r/prefill-1.sock",
        "--decode": "unix:/r/decode-0.sock",
        "--disaggregate": "always",
        "--placement": "least-loaded",
        "--cluster-token-file": "/r/cluster.token",
        "--limiter-routers": "2",
        "--metrics-port": "-1",
    }


def test_every_process_has_a_port_for_its_metrics() -> None:
    """The router has the one that was asked for, the workers those after it; each is told its own, and where it is."""
    free = _consecutive_ports(3)
    config = UpConfig(topology="1P1D", metrics_port=free)
    ports = metrics_ports(config)
    assert ports == {"router": free, "prefill-0": free + 1, "decode-0": free + 2}
    layout = replace(_layout(config), metrics_ports=ports)
    assert _flags(router_command(layout, "router"))["--metrics-port"] == str(free)
    assert _flags(worker_command(layout, "decode-0"))["--metrics-port"] == str(free + 2)
    assert layout.metrics_addresses["decode-0"] == f"127.0.0.1:{free + 2}"


def test_any_ports_are_different_ones_and_none_is_none() -> None:
    """0 finds a free one for each process, -1 none for anybody."""
    ports = metrics_ports(UpConfig(topology="3P4D"))
    assert len(set(ports.values())) == len(ports) == 8
    assert metrics_ports(UpConfig(metrics_port=-1)) == {}
    assert _layout(UpConfig(metrics_port=-1)).metrics_addresses == {}


def test_a_port_for_metrics_that_is_taken_is_refused() -> None:
    """The one that is taken is named, also when it is a worker's."""
    free = _consecutive_ports(3)
    with (
        socket.create_server(("127.0.0.1", free + 2)),
        pytest.raises(ConfigError, match=rf"port {free + 2} on .* is in use; .* --metrics-port"),
    ):
        metrics_ports(UpConfig(metrics_port=free))


@pytest.mark.parametrize(("host", "there"), [("0.0.0.0", "127.0.0.1:9"), ("::", "[::1]:9")])
def test_where_to_scrape_a_router_that_listens_everywhere(host: str, there: str) -> None:
    """On loopback, as it is called; its workers are on loopback anyway."""
    layout = replace(
        _layout(UpConfig(host=host, allow_anonymous=True)), metrics_ports={"router": 9, "decode-0": 10}
    )
    assert layout.metrics_addresses == {"router": there, "decode-0": "127.0.0.1:10"}


def test_several_routers_have_names_and_ports_of_their_own() -> None:
    """Those after --port, and those after --metrics-port before the workers'; each is told how many share a tenant's rate."""
    free = _consecutive_ports(6)
    config = UpConfig(routers=3, port=free, metrics_port=free + 3, topology="0P1D")
    ports, names = router_ports(config), ["router-0", "router-1", "router-2"]
    assert ports == dict(zip(names, range(free, free + 3), strict=True))
    with pytest.raises(ConfigError, match="--metrics-port"), socket.create_server(("127.0.0.1", free + 5)):
        metrics_ports(config)
    layout = replace(_layout(config), ports=ports)
    told = [_flags(router_command(layout, name)) for name in names]
    assert [each["--listen"] for each in told] == [f"127.0.0.1:{port}" for port in ports.values()]
    assert {each["--limiter-routers"] for each in told} == {"3"}


def test_workers_may_be_found_by_what_they_register() -> None:
    """With --discovery redis a router hears of no address; each worker says its own."""
    layout = _layout(UpConfig(topology="1P1D", discovery="redis"))
    told = _flags(router_command(layout, "router"))
    assert (told["--prefill"], told["--decode"]) == ("redis", "redis")
    assert "--register" in worker_command(layout, "decode-0")
    assert "--prefill" not in router_command(_layout(UpConfig(topology="0P1D", discovery="redis")), "router")


def test_routers_of_tenants_have_one_secret(tmp_path: Path) -> None:
    """Else a tenant would find through one router nothing of what it has from another; one that the file names stays."""
    file = tmp_path / "c.toml"
    file.write_text('[router]\ncache_salt_file = "mine"\n')
    several = UpConfig(routers=2, tenants="t.toml")
    salted = _flags(router_command(_layout(several), "router-1"))["--cache-salt-file"]
    assert salted == str(_layout(several).salt_file)
    for config in (UpConfig(tenants="t.toml"), UpConfig(routers=2), replace(several, config=str(file))):
        assert "--cache-salt-file" not in router_command(_layout(config), router_names(config)[0])


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"routers": 0}, "--routers 0"),
        ({"routers": 17}, "--routers 17"),
        ({"routers": 2, "port": 65535}, "--port 65535 leaves too few"),
        ({"routers": 2, "metrics_port": 65533}, "--metrics-port 65533 leaves too few"),
    ],
)
def test_routers_that_cannot_be_are_refused(settings: dict[str, int], why: str) -> None:
    """With the flag that is wrong."""
    with pytest.raises(ConfigError, match=why):
        UpConfig(**settings)  # type: ignore[arg-type] # numbers


def test_a_tier_without_workers_is_left_out() -> None:
    """With 0P the router hears of no prefill worker."""
    assert "--prefill" not in router_command(_layout(UpConfig(topology="0P1D")), "router")


def test_the_router_alone_hears_of_tenants() -> None:
    """It is told the file, or that everybody may come; workers know no keys."""
    layout = _layout(UpConfig(tenants="t.toml"))
    assert _flags(router_command(layout, "router"))["--tenants"] == str(Path("t.toml").resolve())
    assert "--tenants" not in worker_command(layout, "decode-0")
    assert "--allow-anonymous" in router_command(_layout(UpConfig(allow_anonymous=True)), "router")


def test_the_router_alone_hears_of_its_clients_tls() -> None:
    """It is told the files, and where the launcher looks at it; without TLS that is where clients call."""
    layout = _layout(UpConfig(tls_cert="c.pem", tls_key="k.pem", tls_client_ca="a.pem"))
    told = _flags(router_command(layout, "router"))
    assert {name: Path(told[f"--tls-{name}"]) for name in ("cert", "key", "client-ca")} == {
        "cert": Path("c.pem").resolve(),
        "key": Path("k.pem").resolve(),
        "client-ca": Path("a.pem").resolve(),
    }
    assert told["--plain-listen"] == layout.plain_router_address("router") == "unix:/r/router.sock"
    assert "--tls-cert" not in worker_command(layout, "decode-0")
    assert "--plain-listen" not in router_command(_layout(UpConfig()), "router")


def test_the_config_file_goes_on_to_every_service() -> None:
    """Services read their own sections of the file that the launcher was given."""
    layout = _layout(UpConfig(config="c.toml"))
    for command in (router_command(layout, "router"), worker_command(layout, "decode-0")):
        assert _flags(command)["--config"] == str(Path("c.toml").resolve())


@pytest.mark.parametrize(
    ("host", "listens", "called"),
    [
        ("127.0.0.1", "127.0.0.1:7", "127.0.0.1:7"),
        ("0.0.0.0", "0.0.0.0:7", "127.0.0.1:7"),
        ("::", "[::]:7", "[::1]:7"),
    ],
)
def test_the_address_to_call(host: str, listens: str, called: str) -> None:
    """A router that listens everywhere is called on loopback."""
    layout = _layout(UpConfig(host=host, allow_anonymous=True))
    assert (layout.router_address("router"), layout.local_router_address("router")) == (listens, called)


def test_a_password_is_no_argument_of_a_process() -> None:
    """What others on the machine could read in a list of processes names a file that only we can read."""
    for url in ("redis://u:secret@far", "redis+sentinel://far/m?sentinel_password=secret"):
        layout = _layout(UpConfig(topology="1P1D", redis=url))
        for command in (router_command(layout, "router"), worker_command(layout, "prefill-0")):
            assert "secret" not in " ".join(command)
            assert f"@{layout.redis_file}" in command
    assert "redis://u@far" in router_command(_layout(UpConfig(redis="redis://u@far")), "router")


def test_a_busy_port_is_refused() -> None:
    """A port that somebody listens on is refused by number."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            free_port("127.0.0.1", port)


def _config(**settings: object) -> UpConfig:
    defaults = {"port": 0, "runner": "fake", "grace_s": 5.0, "startup_timeout_s": 60.0}
    return UpConfig(**{**defaults, **settings})  # type: ignore[arg-type] # the keywords are fields


@pytest.mark.usefixtures("stand_ins")
async def test_a_cluster_serves_and_is_gone(model_dir: Path) -> None:
    """Inside the block every process runs and Redis answers; afterwards nothing runs and no file is left."""
    async with LocalCluster(_config(topology="2P1D"), model_dir) as cluster:
        assert cluster.pids.keys() == {"redis", "prefill-0", "prefill-1", "decode-0", "router"}
        assert cluster.worker_addresses.keys() == {"prefill-0", "prefill-1", "decode-0"}
        assert cluster.ready
        async with redis.asyncio.from_url(cluster.redis_url) as client:
            await client.set("key", "value", ex=10)
            assert await client.get("key") == b"value"
        run_dir, token = cluster.layout.run_dir, cluster.layout.token_file
        assert (token.stat().st_mode & 0o777, run_dir.stat().st_mode & 0o777) == (0o600, 0o700)
        assert len(token.read_text()) == 64
    assert not psutil.Process().children(recursive=True)
    assert not run_dir.exists()


@pytest.mark.usefixtures("stand_ins")
async def test_a_killed_worker_comes_back(model_dir: Path) -> None:
    """A worker and even Redis come back on their old addresses, while the router keeps its process."""
    policy = RestartPolicy(first_delay_s=0.01)
    async with LocalCluster(_config(), model_dir, policy=policy) as cluster:
        router = cluster.pids["router"]
        for name in ("decode-0", "redis"):
            before = cluster.pids[name]
            cluster.kill(name)
            await cluster.until_ready()
            assert cluster.pids[name] != before
        assert cluster.pids["router"] == router


@pytest.mark.usefixtures("stand_ins")
async def test_without_restarts_a_lost_router_is_final(model_dir: Path) -> None:
    """A policy of no attempts reports the first death of the router, and leaves workers to be stopped."""
    async with LocalCluster(_config(), model_dir, policy=RestartPolicy(max_attempts=0)) as cluster:
        cluster.kill("router", signal.SIGTERM)
        assert (await cluster.until_lost()).process == "router"
        assert "decode-0" in cluster.pids


@pytest.mark.usefixtures("stand_ins")
async def test_a_failed_start_leaves_nothing(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When one worker dies at start, the others and Redis are stopped before the error is raised."""
    monkeypatch.setenv("STAND_IN_decode-0", "dies")
    with pytest.raises(
        ProcessLostError, match="decode-0 exited with status 3: error: no room for the KV cache"
    ):
        await LocalCluster(_config(), model_dir).start()
    assert not psutil.Process().children(recursive=True)


@pytest.mark.usefixtures("stand_ins")
async def test_a_cancelled_start_leaves_nothing(model_dir: Path) -> None:
    """A start that is cancelled half-way stops what it has started."""
    said = asyncio.Event()
    cluster = LocalCluster(_config(), model_dir, say=lambda line: said.set() if "decode-0" in line else None)
    starting = asyncio.create_task(cluster.start())
    await said.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not psutil.Process().children(recursive=True)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3cr3t@127.0.0.1:1",
        "rediss://:s3cr3t@127.0.0.1:1",
        "redis+sentinel://:s3cr3t@127.0.0.1:1/ours?sentinel_password=s3cr3t",
        "redis+cluster://:s3cr3t@127.0.0.1:1",
    ],
)
async def test_an_unreachable_redis_is_refused(model_dir: Path, url: str) -> None:
    """Nothing is started when the Redis that was asked for does not answer; one sentence says so, without its password."""
    with pytest.raises(ConfigError, match="no Redis answers at") as caught:
        await LocalCluster(_config(redis=url), model_dir).start()
    assert "s3cr3t" not in str(caught.value)
    assert len(str(caught.value)) < 300


async def test_a_log_directory_that_cannot_be_is_refused(model_dir: Path) -> None:
    """A place where no log can be kept is named, and nothing is started."""
    with pytest.raises(ConfigError, match="cannot keep logs in"):
        await LocalCluster(_config(log_dir=str(model_dir / "config.json" / "logs")), model_dir).start()
