"""One session: a cluster comes up, tells its answers in quiet, is hurt under load, and must be whole in the end."""

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.faults import Faults
from benchmarks.chaos.load import Load, Outcome, quiet_answers
from benchmarks.chaos.relay import Relay
from benchmarks.chaos.requests import make_requests
from paceline.client import PacelineClient
from paceline.launcher.cluster import LocalCluster
from paceline.launcher.config import UpConfig
from paceline.launcher.layout import worker_names
from paceline.launcher.supervisor import RestartPolicy
from paceline.runtime.channels import Channels
from paceline.v1 import worker_pb2
from paceline.v1.worker_pb2_grpc import WorkerServiceStub

_FOR_EVER = 1 << 30
_RESTARTS = RestartPolicy(max_attempts=_FOR_EVER, first_delay_s=0.2, max_delay_s=0.5)
# Leases of lost peers, and what waits for them, are over by then.
_SETTLE_S = 60.0
_PROGRESS_S = 10.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a session is like."""

    seed: int
    duration_s: float
    num_requests: int = 150
    num_clients: int = 16
    # Between the end of one fault and the next one, in the mean, for each tier and for Redis.
    pause_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Report:
    """What came of it. `leaks` are workers that hold something though nobody asks for anything."""

    outcome: Outcome
    faults: Counter[str]
    leaks: list[str]


async def run_session(plan: Plan, config: UpConfig, model: Path, say: Callable[[str], None]) -> Report:
    """Takes the plan's duration and what start, quiet answers and settling take."""
    async with AsyncExitStack() as stack:
        relay_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-chaos-")))
        cluster = LocalCluster(config, model, policy=_RESTARTS, relay_dir=relay_dir)
        relays = {
            name: await stack.enter_async_context(
                Relay(relay_dir / f"{name}.sock", _socket_of(cluster, name))
            )
            for name in worker_names(config)
        }
        await stack.enter_async_context(cluster)
        routers = cluster.router_addresses
        client = await stack.enter_async_context(PacelineClient(",".join(routers)))
        watchers = [await stack.enter_async_context(PacelineClient(address)) for address in routers]
        asked = make_requests(plan.seed, plan.num_requests, _vocab_size(model))
        expected = await quiet_answers(client, asked, plan.seed)
        say(f"{len(expected)} answers are known; now they must not change")
        load = Load(client, expected, plan.seed)
        faults = Faults(cluster, watchers, relays, seed=plan.seed, pause_s=plan.pause_s, say=say)
        await _disturb(load, faults, plan, say)
        leaks = await _leaks(cluster)
        return Report(load.outcome, faults.counts, leaks)


async def _disturb(load: Load, faults: Faults, plan: Plan, say: Callable[[str], None]) -> None:
    async with asyncio.TaskGroup() as group:
        loading = group.create_task(load.run(plan.num_clients))
        hurting = group.create_task(faults.run())
        for _ in range(max(1, round(plan.duration_s / _PROGRESS_S))):
            await asyncio.wait([loading, hurting], timeout=min(_PROGRESS_S, plan.duration_s))
            outcome = load.outcome
            say(
                f"{outcome.num_requests} requests, {outcome.num_migrated} moved, {len(outcome.wrong)} wrong, {len(outcome.lost)} lost"
            )
        # The load goes on until the last fault is healed.
        faults.stop()
        await hurting
        load.stop()


async def _leaks(cluster: LocalCluster) -> list[str]:
    """Workers that are not idle although nobody asks for anything, after a while."""
    channels = cluster.channels()
    try:
        checks = (_leak(channels, name, address) for name, address in cluster.worker_addresses.items())
        return [leak for leak in await asyncio.gather(*checks) if leak]
    finally:
        await channels.aclose()


async def _leak(channels: Channels, name: str, address: str) -> str:
    stub = WorkerServiceStub(channels.get(address))
    info = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=_PROGRESS_S)
    call = stub.WatchLoad(worker_pb2.WatchLoadRequest(), timeout=2 * _SETTLE_S)
    said = ""
    try:
        async with asyncio.timeout(_SETTLE_S):
            async for load in call:
                busy = load.num_running + load.num_waiting + load.num_leases
                if not busy and load.num_free_blocks == info.num_blocks:
                    return ""
                said = f"{name}: {load.num_running} running, {load.num_waiting} waiting, {load.num_leases} leases, "
                said += f"{load.num_free_blocks} of {info.num_blocks} blocks free"
    except TimeoutError:
        return said
    finally:
        call.cancel()
    return said or f"{name} says nothing"


def _socket_of(cluster: LocalCluster, worker: str) -> Callable[[], Path]:
    """Where a worker listens; known once the cluster has started."""
    return lambda: cluster.layout.worker_socket(worker)


def _vocab_size(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"])
