"""A cluster of real processes for tests, and ways to look at it from outside."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from paceline.client import PacelineClient
from paceline.core.request import SamplingParams
from paceline.engine.fake import fake_next_token
from paceline.launcher.cluster import LocalCluster
from paceline.launcher.commands import worker_command
from paceline.launcher.config import UpConfig
from paceline.launcher.probes import serving
from paceline.launcher.process import ManagedProcess, ProcessSpec
from paceline.launcher.supervisor import RestartPolicy
from paceline.runtime.channels import Channels
from paceline.v1 import inference_pb2, worker_pb2
from paceline.v1.worker_pb2_grpc import WorkerServiceStub

GREEDY = SamplingParams(temperature=0)
# Long waits mean that something hangs; a test that passes never gets near it.
PATIENCE_S = 60.0


class Cluster:
    """A running cluster, a client of it, and a view into its workers."""

    def __init__(
        self, local: LocalCluster, client: PacelineClient, channels: Channels, said: asyncio.Queue[str]
    ) -> None:
        self.local = local
        self._said = said
        self.client = client
        self._channels = channels

    @property
    def address(self) -> str:
        """The router's."""
        return self.local.address

    async def load(self, worker: str) -> worker_pb2.WatchLoadResponse:
        """A worker's load report of now."""
        async for load in self._watch(worker):
            return load
        raise AssertionError(f"{worker} reports no load")

    async def until(self, worker: str, holds: Callable[[worker_pb2.WatchLoadResponse], bool]) -> None:
        """Returns when the worker reports a load for which `holds`."""
        async with asyncio.timeout(PATIENCE_S):
            async for load in self._watch(worker):
                if holds(load):
                    return

    async def until_idle(self) -> None:
        """Returns when no worker holds anything of anybody: each pool is back at its baseline."""
        for worker in self.local.worker_addresses:
            await self.until(worker, is_idle)

    async def obituary(self, name: str) -> str:
        """What the launcher says about a process once that has ended."""
        async with asyncio.timeout(PATIENCE_S):
            if name == "router":
                return str(await self.local.until_lost())
            while True:
                said = await self._said.get()
                if said.startswith((f"{name} exited", f"{name} was killed")):
                    return said

    def logs(self) -> str:
        """Everything that any process has logged."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.local.log_dir.iterdir()))

    async def _watch(self, worker: str) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        stub = WorkerServiceStub(self._channels.get(self.local.worker_addresses[worker]))
        call = stub.WatchLoad(worker_pb2.WatchLoadRequest(), wait_for_ready=True)
        try:
            async for load in call:
                yield load
        finally:
            call.cancel()


@asynccontextmanager
async def another_worker(cluster: Cluster, name: str, *flags: str) -> AsyncIterator[ManagedProcess]:
    """A decode worker that nobody had been told of, beside those of a running cluster: its name is the next one."""
    layout, shape = cluster.local.layout, cluster.local.layout.config.shape
    one_more = replace(shape, num_decode=shape.num_decode + 1)
    layout = replace(layout, config=replace(layout.config, topology=str(one_more)))
    command = (*worker_command(layout, name), *flags)
    spec = ProcessSpec(name, command, serving(layout.worker_address(name)))
    process = await ManagedProcess.start(spec, layout.log_dir)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await spec.ready():  # noqa: ASYNC110 - another process has no event to wait for
                await asyncio.sleep(0.05)
        yield process
    finally:
        await process.kill()


def is_idle(load: worker_pb2.WatchLoadResponse) -> bool:
    """Whether a worker holds no sequence, no lease and no block."""
    busy = load.num_running + load.num_waiting + load.num_leases
    return busy == 0 and load.num_free_blocks == NUM_BLOCKS


# Small, so that pressure is normal; every test cluster has pools of this size.
NUM_BLOCKS = 640


@asynccontextmanager
async def running_cluster(
    tmp_dir: Path, model: Path, *, sections: dict[str, dict[str, Any]] | None = None, **options: Any
) -> AsyncIterator[Cluster]:
    """A cluster whose processes are restarted never; `sections` go into its config file."""
    # Leases that hold for an hour: one that nobody gives back is not forgotten by the end of a test.
    merged: dict[str, dict[str, Any]] = {
        # What tests show of the table must not hang on how busy the machine is.
        "router": {"lookup_budget_s": 2.0},
        "prefill": {"num_blocks": NUM_BLOCKS, "lease_ttl_s": 3600},
        "decode": {"num_blocks": NUM_BLOCKS},
    }
    for section, settings in (sections or {}).items():
        merged[section] = merged.get(section, {}) | settings
    config_file = tmp_dir / "paceline.toml"
    config_file.write_text(_toml(merged))
    config = UpConfig(config=str(config_file), port=0, **options)
    said: asyncio.Queue[str] = asyncio.Queue()
    local = LocalCluster(config, model, say=said.put_nowait, policy=RestartPolicy(max_attempts=0))
    async with local, PacelineClient(local.address) as client:
        channels = local.channels()
        try:
            yield Cluster(local, client, channels, said)
        finally:
            await channels.aclose()


def _toml(sections: dict[str, dict[str, Any]]) -> str:
    lines: list[str] = []
    for section, settings in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    return "\n".join(lines)


def fake_tokens(
    prompt_ids: tuple[int, ...],
    num_tokens: int,
    vocab_size: int,
    eos: int | None,
    *,
    sampling: SamplingParams = GREEDY,
    candidate: int = 0,
) -> tuple[int, ...]:
    """The oracle of the fake runner: its output, greedy by default, up to and with the end-of-sequence token."""
    output: list[int] = []
    while len(output) < num_tokens and (not output or output[-1] != eos):
        known = prompt_ids + tuple(output)
        output.append(fake_next_token(known, sampling, vocab_size, candidate=candidate))
    return tuple(output)


def random_prompts(seed: int, count: int, longest: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Token lists of 1 to `longest` tokens; some share their beginning."""
    rng = random.Random(seed)
    shared = tuple(rng.randrange(vocab_size) for _ in range(longest // 2))
    prompts = []
    for _ in range(count):
        own = tuple(rng.randrange(vocab_size) for _ in range(rng.randint(1, longest // 2)))
        prompts.append(shared[: rng.choice((0, 0, len(shared)))] + own)
    return prompts


def events_of(responses: list[inference_pb2.GenerateResponse]) -> list[str]:
    """Which events a stream had, in order."""
    return [response.WhichOneof("event") or "" for response in responses]


def raw_generate(channel: grpc.aio.Channel) -> Any:
    """InferenceService.Generate for bytes that may be anything."""
    return channel.unary_stream("/paceline.v1.InferenceService/Generate")
