"""When a router says that it takes requests: whether it is alive is another question."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.runtime.channels import Channels
from paceline.runtime.server import GrpcServer
from router.config import RouterConfig
from router.discovery import Discovery
from router.server import report_readiness
from router.service import SERVICE_NAME
from router.worker_sources import StaticSource
from router.workers import WorkerRegistry
from tests.router.cluster import DECODE, PREFILL
from tests.router.scripted_workers import ScriptedWorker
from tests.worker.bench import until

READY, NOT_READY = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Door:
    """What a router says of itself at its address."""

    def __init__(self, channel: grpc.aio.Channel, registry: WorkerRegistry) -> None:
        self.registry = registry
        stub: Any = health_pb2_grpc.HealthStub(channel)
        self._stub = stub
        self._ready = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))

    async def says(self) -> int:
        """The next thing that it says of whether it is ready."""
        async with asyncio.timeout(5):
            return int((await self._ready.read()).status)

    async def now(self, service: str) -> int:
        """What it says when it is asked."""
        return int((await self._stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


@asynccontextmanager
async def door(tmp_path: Path, disaggregate: str, *workers: ScriptedWorker) -> AsyncIterator[Door]:
    """A router that is told of these workers, whether or not they are there."""
    names = {
        tier: ",".join(worker.address for worker in workers if worker.info.role == role)
        for tier, role in (("prefill", PREFILL), ("decode", DECODE))
    }
    address, channels = f"unix:{tmp_path / 'router'}", Channels()
    config = RouterConfig(
        model="m", disaggregate=disaggregate, prefill=names["prefill"], decode=names["decode"]
    )
    registry = WorkerRegistry(channels, 10)
    sources = {
        PREFILL: [StaticSource(frozenset(place.address for place in config.prefill_places))],
        DECODE: [StaticSource(frozenset(place.address for place in config.decode_places))],
    }
    server, discovery = GrpcServer(address), Discovery(registry, sources)
    await server.start([SERVICE_NAME])
    discovery.start()
    reporting = asyncio.create_task(report_readiness(config, server, registry, discovery))
    try:
        yield Door(channels.get(address), registry)
    finally:
        reporting.cancel()
        await discovery.aclose()
        await channels.aclose()
        await server.stop(grace_s=0)


@pytest.fixture
async def tiers() -> AsyncIterator[tuple[ScriptedWorker, ScriptedWorker]]:
    """A prefill and a decode worker that have had an address, and are away."""
    workers = ScriptedWorker("prefill-0", PREFILL), ScriptedWorker("decode-0", DECODE)
    for worker in workers:
        await worker.start()
        await worker.stop()
    yield workers
    for worker in workers:
        await worker.stop()


async def test_a_router_is_ready_once_everybody_was_there(
    tmp_path: Path, tiers: tuple[ScriptedWorker, ScriptedWorker]
) -> None:
    """With one of two tiers it is not, with both it is; it is alive all the time."""
    prefill, decode = tiers
    async with door(tmp_path, "auto", prefill, decode) as router:
        assert await router.says() == NOT_READY
        await decode.start()
        await until(lambda: bool(router.registry.views(DECODE)))
        assert (await router.now(SERVICE_NAME), await router.now("liveness")) == (NOT_READY, READY)
        await prefill.start()
        assert await router.says() == READY


@pytest.mark.parametrize(("disaggregate", "needs_prefill"), [("auto", False), ("always", True)])
async def test_a_router_is_ready_while_requests_can_be_placed(
    tmp_path: Path, tiers: tuple[ScriptedWorker, ScriptedWorker], disaggregate: str, needs_prefill: bool
) -> None:
    """Without a decode worker never, without a prefill worker only where decode workers may compute prompts; alive in either case."""
    prefill, decode = tiers
    for worker in tiers:
        await worker.start()
    async with door(tmp_path, disaggregate, prefill, decode) as router:
        while await router.says() != READY:
            pass
        if needs_prefill:
            await prefill.stop()
            assert await router.says() == NOT_READY
            await prefill.start()
            assert await router.says() == READY
        else:
            await prefill.stop()
        await decode.stop()
        assert await router.says() == NOT_READY
        assert await router.now("liveness") == READY
        await decode.restart()
        assert await router.says() == READY
