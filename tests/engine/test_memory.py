"""What a request leaves behind in an engine: nothing."""

import asyncio
import gc
import random
import tracemalloc
from collections.abc import Iterator

import psutil
import pytest

from paceline.core.request import SequenceSpec
from paceline.engine.async_engine import AsyncEngine
from paceline.engine.block_pool import BlockPool
from paceline.engine.conformance.architectures import build_tiny
from paceline.engine.engine import Engine
from paceline.engine.events import Failed, NewTokens
from paceline.engine.model_loader import use_paged_attention
from paceline.engine.model_runner import ModelRunner
from paceline.engine.scheduler import Scheduler
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.sequence import SequenceRole
from paceline.worker.events import EventQueue
from tests.factories import BLOCK_SIZE, make_spec

NUM_WARM_UP, NUM_MORE = 2000, 8000
NUM_AT_ONCE, NUM_BLOCKS = 16, 128
# Not even a pointer of each request may stay: what Python holds is counted, byte by byte.
MAX_KEPT_BYTES = NUM_MORE * 8
# What the process holds is what its allocators make of it: half a kilobyte of each request would be seen.
MAX_GROWTH_BYTES = NUM_MORE * 512


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_memory_stays_flat_over_ten_thousand_requests() -> None:
    """After a warm-up a real model's engine keeps nothing of 8,000 short requests, some of them given up."""
    model = build_tiny("llama")
    runner = ModelRunner(model, use_paged_attention(model, "float32", BLOCK_SIZE), NUM_BLOCKS)
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    scheduler = Scheduler(SchedulerConfig(64, max_num_seqs=NUM_AT_ONCE), pool, runner.memory)
    engine = AsyncEngine(Engine(scheduler, runner))
    specs = random_specs()
    tracemalloc.start()
    engine.start()
    try:
        await serve(engine, specs, NUM_WARM_UP)
        kept_before, resident_before = held_bytes()
        await serve(engine, specs, NUM_MORE)
        kept, resident = held_bytes()
    finally:
        await engine.stop()
        tracemalloc.stop()
    assert kept - kept_before < MAX_KEPT_BYTES
    assert resident - resident_before < MAX_GROWTH_BYTES
    assert (engine.num_sequences, engine._held) == (0, set())
    assert not scheduler._members.families
    assert not (len(scheduler._admission) or scheduler._running or scheduler._members.deadlines)
    assert not scheduler.accounts.services()
    assert pool.num_available == NUM_BLOCKS
    scheduler.check_invariants()


def random_specs() -> Iterator[SequenceSpec]:
    """Short prompts of which some have the same beginning; the cache is full soon and evicts."""
    rng = random.Random(1)
    number = 0
    while True:
        number += 1
        shared = list(range(rng.choice((0, 8))))
        prompt_ids = tuple(shared + [rng.randrange(96) for _ in range(rng.randint(1, 12))])
        yield make_spec(f"r{number}", prompt_ids, max_tokens=rng.randint(1, 4))


async def serve(engine: AsyncEngine, specs: Iterator[SequenceSpec], num_requests: int) -> None:
    """So many requests, a few at once; every twentieth is given up at its first event, and prefills are released."""
    numbers = iter(range(num_requests))

    async def client() -> None:
        """One of those who ask, one request after the other."""
        for number in numbers:
            role = SequenceRole.PREFILL_ONLY if number % 5 == 0 else SequenceRole.GENERATE
            await one_request(engine, next(specs), role, gives_up=number % 20 == 1)

    async with asyncio.TaskGroup() as clients:
        for _ in range(NUM_AT_ONCE):
            clients.create_task(client())


async def one_request(engine: AsyncEngine, spec: SequenceSpec, role: SequenceRole, *, gives_up: bool) -> None:
    """Until its last token."""
    events = EventQueue()
    engine.submit(spec, role, events.put)
    async for event in events:
        assert not isinstance(event, Failed), event.error
        is_end = isinstance(event, NewTokens) and (event.finish_reason or role is SequenceRole.PREFILL_ONLY)
        if is_end or gives_up:
            break
    if gives_up or role is SequenceRole.PREFILL_ONLY:
        engine.release(spec.sequence_id)


def held_bytes() -> tuple[int, int]:
    """What Python's objects take, and what the process takes."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0], psutil.Process().memory_info().rss
