"""What a router keeps of the prompts that it has seen: nothing."""

import asyncio
import gc
import os
import tracemalloc
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, redirect_stdout
from pathlib import Path

import psutil
import pytest

from paceline.core.request import SequenceSpec
from paceline.v1 import generation_pb2, inference_pb2
from router.admission import AdmissionController, Door
from router.cache_scopes import CacheScopes
from router.dispatcher import Dispatcher
from router.gate import Gate
from router.intake import Intake
from router.job import DispatchEvent, Job, Placed
from router.placement import Route
from router.rate_limit import LocalRateLimiter
from router.service import InferenceServicer
from router.slots import LocalSlots
from router.tenants import Tenants
from router.tokenizer import Tokenizer
from tests.router.cluster import ScriptedCluster, scripted_cluster
from tests.router.whole import Call
from tests.tiny_model import VOCAB_SIZE


class Desk:
    """A router's whole way from a message to the choice of workers, which hear of nothing."""

    def __init__(self, cluster: ScriptedCluster, tokenizer: Tokenizer) -> None:
        config, registry, index = cluster.config, cluster.registry, cluster.index
        gate = Gate(config.bounds, config.placement_rules, registry, index)
        self.admission = AdmissionController(Door(10), LocalRateLimiter(), LocalSlots())
        self._service = InferenceServicer(
            Intake(config, tokenizer, registry, CacheScopes(b"0123456789abcdef"), gate),
            registry,
            index,
            self.admission,
            Placing(config, registry, index, cluster.channels),
            Tenants(""),
            max_unread_s=30.0,
        )

    async def take(self, first: int, last: int) -> None:
        """Requests with these numbers, each with a prompt of its own, and each left once it has its workers."""
        for number in range(first, last):
            with pytest.raises(asyncio.CancelledError):
                await self._service.Generate(_request(number), Leaver())  # type: ignore[arg-type] # all that is asked of a context


class Placing(Dispatcher):
    """It chooses workers, and asks nothing of them."""

    async def _on_route(
        self, job: Job, spec: SequenceSpec, route: Route, placed: Placed
    ) -> AsyncGenerator[DispatchEvent, None]:
        yield placed
        await asyncio.sleep(0)


class Leaver(Call):
    """A client that goes with the first word."""

    async def write(self, message: inference_pb2.GenerateResponse) -> None:
        """The request is placed."""
        assert message.HasField("accepted")
        await asyncio.sleep(0)
        raise asyncio.CancelledError


def _request(number: int) -> bytes:
    """No other one begins with the same block; every tenth one is text."""
    if number % 10 == 0:
        return inference_pb2.GenerateRequest(
            text=f"{number} is a number, and so is its word"
        ).SerializeToString()
    digits = (number // VOCAB_SIZE**place % VOCAB_SIZE for place in range(4))
    ids = generation_pb2.TokenIds(ids=[*digits, *range(60)])
    return inference_pb2.GenerateRequest(token_ids=ids).SerializeToString()


@asynccontextmanager
async def desk(tokenizer: Tokenizer) -> AsyncIterator[Desk]:
    """Two workers of each tier."""
    async with scripted_cluster(2, 2, disaggregate="auto") as cluster:
        reporting = asyncio.create_task(_report_forever(cluster))
        yield Desk(cluster, tokenizer)
        reporting.cancel()


async def _report_forever(cluster: ScriptedCluster) -> None:
    """So that nobody takes the workers for frozen."""
    for number in range(1_000_000):
        for worker in cluster.workers:
            worker.report(num_steps=number)
        await asyncio.sleep(1)


async def test_distinct_prompts_leave_nothing_in_a_router(byte_level: Tokenizer) -> None:
    """From the door to placement: of two thousand more not an entry each is kept in anything."""
    async with desk(byte_level) as router:
        await router.take(0, 500)
        tracemalloc.start()
        try:
            await router.take(500, 600)
            before = _num_bytes()
            await router.take(600, 2600)
            grown = _num_bytes() - before
        finally:
            tracemalloc.stop()
    # The event loop keeps up to a hundred timers that were cancelled.
    assert grown < 2000 * 32
    assert router.admission.stats().num_active == 0


def _num_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.fixture
def nowhere() -> Iterator[None]:
    """Where a million lines of the log go, which would be kept for the report of a failure."""
    with Path(os.devnull).open("w") as file, redirect_stdout(file):
        yield


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_a_million_distinct_prompts_leave_nothing_in_a_router(
    byte_level: Tokenizer, nowhere: None
) -> None:
    """After a hundred thousand, which fill the tokenizer's own cache of words, nine hundred thousand more add two bytes each at most."""
    async with desk(byte_level) as router:
        await router.take(0, 100_000)
        before = psutil.Process().memory_info().rss
        await router.take(100_000, 1_000_000)
        grown = psutil.Process().memory_info().rss - before
    assert grown < 2 << 20
