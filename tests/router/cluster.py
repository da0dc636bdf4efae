"""A router's inside on scripted workers: registry, index, dispatcher."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from paceline.core.clock import ManualClock
from paceline.core.request import SequenceSpec
from paceline.prefix_index.memory_index import MemoryPrefixIndex
from paceline.runtime.channels import Channels
from paceline.v1 import inference_pb2
from router.config import RouterConfig
from router.dispatcher import Dispatcher
from router.job import DispatchEvent, Job, Tokens
from router.timeline import RequestTimeline
from router.workers import WorkerRegistry
from tests.router.scripted_workers import ScriptedWorker

PREFILL, DECODE = inference_pb2.WORKER_ROLE_PREFILL, inference_pb2.WORKER_ROLE_DECODE


class ScriptedCluster:
    """Two tiers, and a dispatcher that sees them."""

    def __init__(self, num_prefill: int, num_decode: int, **settings: object) -> None:
        self.prefill = [ScriptedWorker(f"prefill-{n}", PREFILL) for n in range(num_prefill)]
        self.decode = [ScriptedWorker(f"decode-{n}", DECODE) for n in range(num_decode)]
        self.channels = Channels()
        self.index = MemoryPrefixIndex()
        self.clock = ManualClock(1000.0)
        self._settings = {"disaggregate": "always", "max_buffered_events": 50} | settings
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns once the registry sees everybody."""
        for worker in self.workers:
            await worker.start()
        self.config = RouterConfig(
            model="scripted",
            prefill=",".join(worker.address for worker in self.prefill),
            decode=",".join(worker.address for worker in self.decode),
            **self._settings,  # type: ignore[arg-type] # each name has its field's type
        )
        self.registry = WorkerRegistry(self.channels, self.config.max_buffered_events)
        self.dispatcher = Dispatcher(self.config, self.registry, self.index, self.channels, clock=self.clock)
        for worker in self.workers:
            self.watch(worker.address, worker.info.role)
        await self.until_seen(*self.workers)

    def watch(self, address: str, role: inference_pb2.WorkerRole) -> None:
        """Follows one more worker."""
        self._watching.append(asyncio.create_task(self.registry.watch(address, role)))

    async def stop(self) -> None:
        """Nothing is left running."""
        for watch in self._watching:
            watch.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self.channels.aclose()
        for worker in self.workers:
            await worker.stop()

    @property
    def workers(self) -> list[ScriptedWorker]:
        """Both tiers."""
        return self.prefill + self.decode

    def seen(self) -> set[tuple[str, int]]:
        """Name and life of each worker that the registry sees."""
        views = self.registry.views(PREFILL) + self.registry.views(DECODE)
        return {(view.key.worker_id, view.key.boot_epoch) for view in views}

    async def until_seen(self, *workers: ScriptedWorker) -> None:
        """Waits until exactly these workers, in their present lives, are seen."""
        wanted = {(worker.info.worker_id, worker.info.boot_epoch) for worker in workers}
        async with asyncio.timeout(10):
            while True:
                changed = self.registry.changed
                if self.seen() == wanted:
                    return
                await changed.wait()

    def job(self, spec: SequenceSpec, *, deadline_s: float | None = None) -> Job:
        """A request on its way."""
        return Job(spec, deadline_s, RequestTimeline(self.clock))

    async def run(self, job: Job) -> list[DispatchEvent]:
        """All events of a request."""
        events: list[DispatchEvent] = []
        async with asyncio.timeout(20), aclosing(self.dispatcher.run(job)) as running:
            async for event in running:
                events.append(event)  # noqa: PERF401 - kept also when it fails
        return events


@asynccontextmanager
async def scripted_cluster(
    num_prefill: int = 1, num_decode: int = 1, **settings: object
) -> AsyncIterator[ScriptedCluster]:
    """A cluster of scripted workers, stopped in the end."""
    cluster = ScriptedCluster(num_prefill, num_decode, **settings)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()


def token_ids(events: list[DispatchEvent]) -> tuple[int, ...]:
    """The output."""
    return tuple(token for event in events if isinstance(event, Tokens) for token in event.token_ids)
