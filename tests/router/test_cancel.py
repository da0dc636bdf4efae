"""A client may leave at any moment: wherever its request waits just then, nothing of it is left on any tier."""

import asyncio
import types
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from paceline.core.errors import KvLostError
from paceline.core.request import SequenceSpec
from paceline.prefix_index.redis_calls import RedisCalls
from paceline.prefix_index.redis_index import RedisPrefixIndex
from paceline.v1 import decode_pb2, generation_pb2, inference_pb2
from router.hash_ring import HashRing, prompt_key
from router.rate_limit import MINUTE_US, RedisRateLimiter
from router.slots import RedisSlots
from router.tenants import new_key
from router.tokenizer import Tokenizer
from router.turnstile import Turnstile
from tests.factories import make_spec
from tests.prefix_index.conftest import EmbeddedRedis
from tests.router.scripted_workers import ScriptedWorker, decode_started, failed, prefill_that
from tests.router.whole import Books, Call, WholeRouter, whole_router
from tests.worker.bench import output_of, until

GONE = KvLostError("gone")
TEXT = "Once upon a time there was a small model"
# Far more waits than any request has here.
_ENOUGH = 500
# What was let go is told in the background: within so many round trips it has been.
_LOOKS = 5000


async def _leave_everywhere(
    router: WholeRouter, raw: bytes, *metadata: tuple[str, str]
) -> AsyncIterator[int]:
    """The same request again and again, each left at a later wait than the one before, and the last one not at all.

    Gives how often so far, each time that nothing of it is left.
    """
    num_tasks = await _num_tasks_between(router, raw, metadata)
    before = sum(router.service.stats().num_ended.values())
    for number in range(_ENOUGH):
        has_left = await asyncio.create_task(_left_at(router.generate(raw, Call(metadata)), number))
        await router.until_idle()
        await until(lambda: len(asyncio.all_tasks()) <= num_tasks)
        assert sum(router.service.stats().num_ended.values()) == before + number + 1
        yield number + 1
        if not has_left:
            assert router.service.stats().num_ended["cancelled"] == number
            return
    raise AssertionError("a request without an end")


async def _num_tasks_between(router: WholeRouter, raw: bytes, metadata: tuple[tuple[str, str], ...]) -> int:
    """How many tasks there are when a request has come and gone: those of streams and of what goes on in the background."""
    await router.generate(raw, Call(metadata))
    await router.until_idle()
    counts = []
    for _ in range(100):
        await asyncio.sleep(0)
        counts.append(len(asyncio.all_tasks()))
    return min(counts)


@types.coroutine
def _left_at(body: Coroutine[Any, Any, None], number: int) -> Generator[Any, Any, bool]:
    """Runs a handler, and cancels its task in the wait with this number, as gRPC does when a client leaves.

    False when it does not wait so often.
    """
    num_waits, go_on, argument = 0, body.send, None
    while True:
        try:
            awaited = go_on(argument)
        except StopIteration:
            return False
        except asyncio.CancelledError:
            return True
        if num_waits == number:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        num_waits += 1
        try:
            go_on, argument = body.send, (yield awaited)
        except asyncio.CancelledError as error:
            go_on, argument = body.throw, error


def _request(*, max_tokens: int = 12, stop_token_ids: Sequence[int] = (), **fields: Any) -> bytes:
    stopping = generation_pb2.StopConditions(
        max_tokens=max_tokens, ignore_eos=True, stop_token_ids=stop_token_ids
    )
    sampling = generation_pb2.SamplingParams(temperature=0)
    return inference_pb2.GenerateRequest(stopping=stopping, sampling=sampling, **fields).SerializeToString()


@pytest.mark.parametrize("num_candidates", [1, 2])
@pytest.mark.parametrize("disaggregate", ["always", "never"])
async def test_a_client_may_leave_wherever_its_request_waits(
    tiny_tokenizer_dir: Path, byte_level: Tokenizer, disaggregate: str, num_candidates: int
) -> None:
    """From the door to the last token: blocks, leases, places, counts and tasks are back, and each request ended once."""
    raw = _request(text=TEXT, n=num_candidates)
    async with whole_router(tiny_tokenizer_dir, byte_level, disaggregate=disaggregate) as router:
        num_times = [number async for number in _leave_everywhere(router, raw)]
    assert len(num_times) > 4


@pytest.mark.parametrize("tier", ["prefill", "decode"])
async def test_a_client_may_leave_while_its_request_moves(
    tiny_tokenizer_dir: Path, byte_level: Tokenizer, tier: str
) -> None:
    """Every first attempt is lost: also what the second one holds, and what is between the two, is given back."""
    mode = {"prefill": "always", "decode": "never"}[tier]
    names = (f"{tier}-0", f"{tier}-lost")
    token_ids = next(
        ids for ids in _prompts() if next(HashRing.of(names).walk(prompt_key(ids, ""))) == names[1]
    )
    raw = _request(token_ids=generation_pb2.TokenIds(ids=token_ids))
    async with whole_router(tiny_tokenizer_dir, byte_level, disaggregate=mode, scripted=names[1:]) as router:
        lost = router.scripted[names[1]]
        lost.prefill_scripts.extend([prefill_that(then=GONE)] * _ENOUGH)
        lost.decode_scripts.extend([_decode_that_is_lost] * _ENOUGH)
        num_times = [number async for number in _leave_everywhere(router, raw)]
        assert len(lost.prefills) + len(lost.submits) > len(num_times) // 2
    assert len(num_times) > 4


async def _decode_that_is_lost(
    worker: ScriptedWorker, spec: SequenceSpec, has_ticket: bool
) -> AsyncGenerator[decode_pb2.SequenceEvent, None]:
    """Begins, and is lost."""
    yield decode_started()
    yield failed(GONE)


def _prompts() -> Iterator[tuple[int, ...]]:
    for first in range(100):
        yield (first, *range(20, 30))


# -- what tenants have in Redis


@asynccontextmanager
async def _books(server: EmbeddedRedis) -> AsyncIterator[Books]:
    """All in Redis, with budgets that a busy machine does not use up."""
    calls = RedisCalls(server.url, limit_s=20.0)
    limiter = RedisRateLimiter(calls, budget_s=20.0, num_routers=1)
    slots = RedisSlots(calls, budget_s=20.0, num_routers=1)
    index = RedisPrefixIndex(server.url, budget_s=20.0)
    keeping = asyncio.create_task(slots.keep())
    try:
        yield Books(limiter, slots, index, Turnstile(calls, slots, limiter, 20.0))
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await index.aclose()
        await limiter.aclose()


async def test_whoever_leaves_keeps_no_slot_and_no_tokens(
    tiny_tokenizer_dir: Path, byte_level: Tokenizer, embedded_redis: EmbeddedRedis, tmp_path: Path
) -> None:
    """A tenant that may have one request under way pays for its prompt and what it got, wherever it left, and can come again."""
    key, digest = new_key()
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(
        f'[tenants.acme]\nkey_hashes = ["{digest}"]\nmax_concurrent = 1\nrequests_per_minute = 1\n'
        "burst_requests = 1000\ntokens_per_minute = 1\nburst_tokens = 100000\n"
    )
    prompt_ids = tuple(byte_level.encode(TEXT))
    # Of the eighty tokens that it may have there are five or six.
    last = output_of(make_spec(prompt_ids=prompt_ids, max_tokens=5, ignore_eos=True))[-1]
    raw = _request(text=TEXT, max_tokens=80, stop_token_ids=[last])
    most = len(prompt_ids) + 6
    async with (
        _books(embedded_redis) as books,
        Redis.from_url(embedded_redis.url) as redis,
        whole_router(tiny_tokenizer_dir, byte_level, books=books, tenants=str(tenants)) as router,
    ):
        charged = most
        async for _ in _leave_everywhere(router, raw, ("authorization", f"Bearer {key}")):
            await _until_let_go(redis)
            charged = await _charged(redis, charged + most)


async def _until_let_go(redis: Redis) -> None:
    for _ in range(_LOOKS):
        if not await redis.zcard("paceline:slots:{acme}"):
            return
    raise AssertionError("a slot is still held")


async def _charged(redis: Redis, most: int) -> int:
    """What is in the tenant's bucket, which drains by one a minute, once that is no more than it may be."""
    for _ in range(_LOOKS):
        if (num_tokens := await _num_tokens(redis)) <= most:
            return num_tokens
    raise AssertionError(f"more than {most} tokens are charged")


async def _num_tokens(redis: Redis) -> int:
    value = await redis.get("paceline:rate:tokens:{acme}")
    return round(int(str(value, "ascii").partition(":")[0]) / MINUTE_US) if isinstance(value, bytes) else 0
