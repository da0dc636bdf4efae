"""A slot and a request's rate, asked together: whoever is refused for one has taken nothing of the other."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from paceline.core.clock import ManualClock
from paceline.core.errors import QueueFullError, RateLimitedError
from paceline.prefix_index.redis_calls import RedisCalls
from router.admission import AdmissionController, Door
from router.config import RouterConfig
from router.rate_limit import Rate, RedisRateLimiter
from router.server import _counters
from router.slots import RedisSlots
from router.tenants import Tenant
from router.turnstile import Turnstile
from tests.prefix_index.conftest import EmbeddedRedis
from tests.prefix_index.servers import valkey_cluster
from tests.worker.bench import until

# Slow enough that nothing drains while a test runs, however busy the machine is.
RATE = Rate(per_minute=6, burst=3)
BUCKET = "requests:{acme}"


def turnstile_at(url: str, num_routers: int = 2) -> Turnstile:
    """A router's, with a budget that a busy machine does not use up."""
    clock = ManualClock()
    calls = RedisCalls(url, limit_s=20.0, clock=clock)
    slots = RedisSlots(calls, budget_s=20.0, num_routers=num_routers, clock=clock)
    limiter = RedisRateLimiter(calls, budget_s=20.0, num_routers=num_routers, clock=clock)
    return Turnstile(calls, slots, limiter, 20.0)


def admission_behind(turnstile: Turnstile) -> AdmissionController:
    """Of a router that has both, and room for all."""
    return AdmissionController(Door(9), turnstile.limiter, turnstile.slots, turnstile)


@pytest.fixture
async def turnstile(embedded_redis: EmbeddedRedis) -> AsyncIterator[Turnstile]:
    """In front of a real server."""
    made = turnstile_at(embedded_redis.url)
    yield made
    await made.limiter.aclose()


async def entered(turnstile: Turnstile, most: int = 9) -> bool:
    """Whether a request was let in by its rate; it leaves at once."""
    async with turnstile.enter("acme", most, BUCKET, RATE) as grant:
        assert grant.is_shared
        return grant.wait_us == 0


async def test_both_are_counted_for_all_routers(turnstile: Turnstile, embedded_redis: EmbeddedRedis) -> None:
    """A slot that one router holds, and a request that it let in, are there for another one, which asks for each by itself."""
    other = turnstile_at(embedded_redis.url)
    async with turnstile.enter("acme", 1, BUCKET, RATE) as grant:
        assert (grant.wait_us, grant.is_shared) == (0, True)
        with pytest.raises(QueueFullError):
            await other.slots.hold("acme", 1).__aenter__()
        assert (await other.limiter.take(BUCKET, RATE, 2)).wait_us == 0
        assert (await other.limiter.take(BUCKET, RATE, 1)).wait_us > 0
    await other.limiter.aclose()


async def test_whoever_finds_no_slot_has_taken_nothing_of_the_rate(turnstile: Turnstile) -> None:
    """However often it asks: the burst is there for those who are let in."""
    async with turnstile.slots.hold("acme", 1):
        for _ in range(10):
            with pytest.raises(QueueFullError):
                await entered(turnstile, most=1)
    assert [await entered(turnstile) for _ in range(4)] == [True, True, True, False]


async def test_whoever_finds_no_room_after_a_flush_has_taken_nothing_of_the_rate(
    turnstile: Turnstile, embedded_redis: EmbeddedRedis
) -> None:
    """Redis knows of no slot any more and would let it in; this router knows of its own."""
    async with turnstile.slots.hold("acme", 1):
        async with Redis.from_url(embedded_redis.url) as redis:
            await redis.flushall()
        for _ in range(4):
            with pytest.raises(QueueFullError):
                await entered(turnstile, most=1)
            await turnstile.limiter.settled()
    assert [await entered(turnstile) for _ in range(4)] == [True, True, True, False]


async def test_whoever_comes_too_fast_keeps_no_slot(turnstile: Turnstile) -> None:
    """The tenant's only slot is free again at once, and the wait is the rate's."""
    tenant = Tenant("acme", requests=Rate(6, 1), max_concurrent=1)
    admission = admission_behind(turnstile)
    async with admission.admit(tenant, 0):
        pass
    for _ in range(3):
        with pytest.raises(RateLimitedError) as caught:
            await admission.admit(tenant, 0).__aenter__()
        assert caught.value.retry_after_s == pytest.approx(10.0, abs=1.0)
    async with turnstile.slots.hold("acme", 1):
        pass


async def test_a_tenant_has_the_bounds_that_are_set_and_no_others(turnstile: Turnstile) -> None:
    """A slot and no rate, a rate and no slots, or neither."""
    admission = admission_behind(turnstile)
    async with admission.admit(Tenant("acme", max_concurrent=1), 0):
        with pytest.raises(QueueFullError):
            await admission.admit(Tenant("acme", max_concurrent=1), 0).__aenter__()
        rated = Tenant("acme", requests=Rate(6, 1))
        async with admission.admit(rated, 0):
            with pytest.raises(RateLimitedError):
                await admission.admit(rated, 0).__aenter__()
        async with admission.admit(Tenant("acme"), 0):
            pass


async def test_a_request_that_was_not_served_is_given_back(turnstile: Turnstile) -> None:
    """As if it had been counted by itself: the only one of the burst is there for the next."""
    admission, tenant = admission_behind(turnstile), Tenant("acme", requests=Rate(6, 1), max_concurrent=2)
    for _ in range(2):
        async with admission.admit(tenant, 0) as visit:
            visit.give_request_back()
        await turnstile.limiter.settled()
    async with admission.admit(tenant, 0):
        with pytest.raises(RateLimitedError):
            await admission.admit(tenant, 0).__aenter__()


async def test_without_redis_a_router_has_its_share_of_both(
    turnstile: Turnstile, embedded_redis: EmbeddedRedis
) -> None:
    """Of two routers each lets in half of the slots; its rate is the stricter local one, and one request fits at once."""
    embedded_redis.kill()
    async with turnstile.enter("acme", 2, BUCKET, RATE) as grant:
        assert (grant.wait_us, grant.is_shared) == (0, False)
        with pytest.raises(QueueFullError):
            await turnstile.enter("acme", 2, BUCKET, RATE).__aenter__()
    async with turnstile.enter("acme", 2, BUCKET, RATE) as grant:
        # Three a minute are its share.
        assert grant.wait_us == 20_000_000


async def test_whoever_leaves_while_it_asks_has_taken_nothing(
    turnstile: Turnstile, embedded_redis: EmbeddedRedis
) -> None:
    """Redis lets two in after they have gone: their slots and requests come back. It refuses two more, of which nothing does."""
    complaints = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    assert await entered(turnstile)
    embedded_redis.pause()
    leaving = [asyncio.create_task(entered(turnstile)) for _ in range(4)]
    await until(lambda: len(turnstile.calls.under_way) == 4)
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    embedded_redis.resume()
    await until(lambda: not turnstile.calls.under_way)
    await turnstile.limiter.settled()
    async with turnstile.slots.hold("acme", 1):
        assert [await entered(turnstile) for _ in range(3)] == [True, True, False]
    assert complaints == []


@pytest.mark.parametrize("lie", ["1", "{}", "{1}", "{1, 'x'}", "{'x', 'y'}"])
async def test_an_answer_that_cannot_be_is_none(
    turnstile: Turnstile, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    """The router decides itself, by its share."""
    monkeypatch.setattr("router.turnstile.ENTER", f"return {lie}")
    async with turnstile.enter("acme", 2, BUCKET, RATE) as grant:
        assert (grant.wait_us, grant.is_shared) == (0, False)


async def test_a_router_asks_for_both_together_where_redis_has_them(
    embedded_redis: EmbeddedRedis, tmp_path: Path
) -> None:
    """With tenants and a Redis; without either there is nothing to ask."""
    known = RouterConfig(model="m", prefill="127.0.0.1:1", decode="127.0.0.1:2", redis=embedded_redis.url)
    limited = replace(known, tenants=str(tmp_path / "tenants.toml"))
    async with _counters(limited) as (limiter, slots, both):
        assert both is not None
        assert (both.limiter, both.slots) == (limiter, slots)
    for config in (known, replace(limited, redis="")):
        async with _counters(config) as (_, _, both):
            assert both is None


@pytest.mark.thorough
async def test_one_node_of_a_redis_cluster_counts_both(tmp_path: Path) -> None:
    """A tenant's slots and its buckets have one hash slot, or the step would be refused."""
    with valkey_cluster(tmp_path) as ports:
        turnstile = turnstile_at(f"redis+cluster://127.0.0.1:{ports[0]}")
        for tenant in ("acme", "other", "third"):
            async with turnstile.enter(tenant, 1, f"requests:{{{tenant}}}", RATE) as grant:
                assert (grant.wait_us, grant.is_shared) == (0, True)
        await turnstile.limiter.aclose()
