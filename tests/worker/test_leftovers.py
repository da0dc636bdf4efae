"""A router and two workers in one process: when requests have ended, nothing that belonged to one of them is left."""

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtransfer.leases import Lease
from paceline.core.request import SequenceId, SequenceSpec
from paceline.core.ticket import KvTicket
from paceline.engine.sequence import Sequence
from paceline.prefix_index.memory_index import MemoryPrefixIndex
from paceline.runtime.channels import Channels
from paceline.worker.worker import Worker
from router.config import RouterConfig
from router.decode_handle import DecodeHandle
from router.dispatcher import Dispatcher
from router.job import Job, Tokens
from router.timeline import RequestTimeline
from router.workers import WorkerRegistry
from tests.factories import make_spec
from tests.worker.bench import DECODE, PREFILL, output_of, require_empty, serving_worker, until

pytestmark = pytest.mark.thorough

# What a request is made of, in router, engine and hand-over: whatever map kept one of them would keep all it refers to.
OF_A_REQUEST = (Job, DecodeHandle, Lease, KvTicket, Sequence, SequenceId, SequenceSpec)


@dataclass(frozen=True)
class System:
    """A dispatcher, and the workers that it sees."""

    dispatcher: Dispatcher
    workers: tuple[Worker, ...]

    async def settle(self) -> None:
        """Returns when nobody has anything to do any more; the workers' blocks are free then."""
        await until(lambda: not self.dispatcher._lease_release._tasks)
        await until(lambda: all(worker.is_idle for worker in self.workers))
        for worker in self.workers:
            await require_empty(worker)


@asynccontextmanager
async def running_system(directory: Path) -> AsyncIterator[System]:
    """A prefill and a decode worker and a dispatcher."""
    async with (
        serving_worker(directory, "prefill-0", PREFILL) as prefill,
        serving_worker(directory, "decode-0", DECODE) as decode,
    ):
        config = RouterConfig(
            model=str(directory), prefill=prefill.address, decode=decode.address, disaggregate="always"
        )
        channels = Channels()
        registry = WorkerRegistry(channels, config.max_buffered_events)
        workers = ((prefill.address, PREFILL), (decode.address, DECODE))
        watching = [asyncio.create_task(registry.watch(*worker)) for worker in workers]
        await until(lambda: len(registry.views(PREFILL) + registry.views(DECODE)) == 2)
        yield System(Dispatcher(config, registry, MemoryPrefixIndex(), channels), (prefill, decode))
        for watch in watching:
            watch.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await channels.aclose()


def random_specs(num_requests: int) -> Iterator[SequenceSpec]:
    """Short prompts and outputs."""
    rng = random.Random(1)
    for number in range(num_requests):
        prompt_ids = tuple(rng.randrange(3, 400) for _ in range(rng.randint(1, 40)))
        yield make_spec(f"r{number}", prompt_ids, max_tokens=rng.randint(1, 6))


async def serve(dispatcher: Dispatcher, num_requests: int) -> None:
    """So many requests, a few at once; the client of every tenth leaves, each after another event."""
    specs = enumerate(random_specs(num_requests))

    async def client() -> None:
        """One of those who ask, one request after the other."""
        for number, spec in specs:
            await one_request(dispatcher, spec, leaves_after=number % 7 + 1 if number % 10 == 0 else None)

    async with asyncio.TaskGroup() as clients:
        for _ in range(8):
            clients.create_task(client())


async def one_request(dispatcher: Dispatcher, spec: SequenceSpec, *, leaves_after: int | None) -> None:
    """To its end, or until the client leaves after some events."""
    tokens: list[int] = []
    async with aclosing(dispatcher.run(Job(spec, None, RequestTimeline()))) as events:
        num_events = 0
        async for event in events:
            num_events += 1
            if num_events == leaves_after:
                return
            if isinstance(event, Tokens):
                tokens += event.token_ids
    assert tuple(tokens) == output_of(spec)


def left_over() -> dict[str, int]:
    """How many objects of each kind there are."""
    gc.collect()
    alive = [type(each) for each in gc.get_objects()]
    return {kind.__name__: alive.count(kind) for kind in OF_A_REQUEST}


@pytest.mark.parametrize(
    "num_requests", [200, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
async def test_nothing_of_a_request_is_left(tiny_tokenizer_dir: Path, num_requests: int) -> None:
    """Served to the end or left by its client at any event: no object of a request outlives it."""
    async with running_system(tiny_tokenizer_dir) as system:
        await serve(system.dispatcher, 1)
        await system.settle()
        before = left_over()
        await serve(system.dispatcher, num_requests)
        await system.settle()
        assert left_over() == before
