"""The placement policies on a real 2P2D cluster: processes, Redis, hand-overs and load reports, with fake runners for the model.

Every step of a fake runner takes the same time, so that prompts cost by the steps that they take, and a worker's load is its steps.
"""

import asyncio
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.simulator.real_cluster import run_on_cluster
from benchmarks.simulator.records import RequestRecord
from benchmarks.simulator.trace import Trace
from paceline.client import PacelineClient
from paceline.launcher.cluster import LocalCluster
from paceline.launcher.config import UpConfig
from paceline.runtime.channels import Channels
from paceline.v1 import worker_pb2
from paceline.v1.worker_pb2_grpc import WorkerServiceStub
from router.policies import PlacementPolicy

# A cold prompt takes some five steps of prefill, a cached one a single step; the beginnings do not all fit into one cache.
_SETTINGS = {"fake_step_ms": "20", "max_num_batched_tokens": "128", "num_blocks": "512"}


def run_real(
    policy: PlacementPolicy, trace: Trace, model: Path, prefix_pull: str
) -> tuple[list[RequestRecord], Mapping[str, int]]:
    """What came of each request, and the steps that each worker took. Of `model` only the tokenizer is used."""
    return asyncio.run(_run(policy, trace, model, prefix_pull))


async def _run(
    policy: PlacementPolicy, trace: Trace, model: Path, prefix_pull: str
) -> tuple[list[RequestRecord], Mapping[str, int]]:
    vocab_size = int(json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "paceline.toml"
        settings = "".join(f"{name} = {value}\n" for name, value in _SETTINGS.items())
        settings += f'prefix_pull = "{prefix_pull}"\n'
        file.write_text("".join(f"[{tier}]\n{settings}" for tier in ("prefill", "decode")))
        config = UpConfig(config=str(file), topology="2P2D", runner="fake", placement=policy, port=0)
        async with LocalCluster(config, model) as local, PacelineClient(local.address) as client:
            before = await _steps(local)
            records = await run_on_cluster(trace, client, vocab_size)
            after = await _steps(local)
    return records, {worker: after[worker] - before[worker] for worker in after}


async def _steps(local: LocalCluster) -> dict[str, int]:
    """How many steps each worker has taken."""
    channels = local.channels()
    try:
        return {
            worker: await _steps_of(channels, address) for worker, address in local.worker_addresses.items()
        }
    finally:
        await channels.aclose()


async def _steps_of(channels: Channels, address: str) -> int:
    call = WorkerServiceStub(channels.get(address)).WatchLoad(worker_pb2.WatchLoadRequest())
    try:
        async for load in call:
            return int(load.num_steps)
        return 0
    finally:
        call.cancel()
