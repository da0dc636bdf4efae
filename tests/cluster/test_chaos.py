"""Real processes under load and faults: no answer changes, none is lost, nothing stays held."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from benchmarks.chaos.faults import Faults
from benchmarks.chaos.load import Load, quiet_answers
from benchmarks.chaos.requests import make_requests
from benchmarks.chaos.session import Plan, run_session
from paceline.client import PacelineClient
from paceline.launcher.cluster import LocalCluster
from paceline.launcher.config import UpConfig
from paceline.launcher.supervisor import RestartPolicy
from tests.tiny_model import VOCAB_SIZE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = "fake_step_ms = 5\nmax_num_batched_tokens = 64\nnum_blocks = 640\n"


def _config(directory: Path) -> UpConfig:
    file = directory / "paceline.toml"
    file.write_text("".join(f"[{tier}]\n{SETTINGS}" for tier in ("prefill", "decode")))
    return UpConfig(config=str(file), topology="2P2D", routers=2, runner="fake", port=0, kv_transport="grpc")


@pytest.mark.parametrize("seed", [1, 2])
async def test_no_fault_changes_or_loses_an_answer(
    tmp_path: Path, tiny_tokenizer_dir: Path, seed: int
) -> None:
    """A minute and a half of kills, stops, cuts, drains, and a Redis that dies, hangs, is slow and forgets."""
    report = await run_session(Plan(seed, duration_s=90.0), _config(tmp_path), tiny_tokenizer_dir, print)
    assert report.outcome.wrong == []
    assert report.outcome.lost == []
    assert report.leaks == []
    assert report.outcome.num_migrated > 0
    assert len(report.faults) > 5


@pytest_asyncio.fixture(loop_scope="session")
async def restarting(tmp_path: Path, tiny_tokenizer_dir: Path) -> AsyncIterator[LocalCluster]:
    """Two of everything, started again when they end."""
    policy = RestartPolicy(max_attempts=100, first_delay_s=0.1, max_delay_s=0.1)
    async with LocalCluster(_config(tmp_path), tiny_tokenizer_dir, policy=policy) as cluster:
        yield cluster


async def test_a_rolling_restart_under_load_fails_no_request(restarting: LocalCluster) -> None:
    """Every worker and every router, one after the other: no request fails, and no answer changes."""
    async with AsyncExitStack() as stack:
        addresses = restarting.router_addresses
        client = await stack.enter_async_context(PacelineClient(",".join(addresses)))
        watchers = [await stack.enter_async_context(PacelineClient(address)) for address in addresses]
        expected = await quiet_answers(client, make_requests(5, 60, VOCAB_SIZE), seed=5)
        load = Load(client, expected, seed=5)
        faults = Faults(restarting, watchers, {}, seed=5, pause_s=1.0, say=print)
        running = asyncio.create_task(load.run(8))
        await faults.restart_all()
        load.stop()
        await running
    assert load.outcome.lost == []
    assert load.outcome.wrong == []
    assert load.outcome.num_requests > 50
