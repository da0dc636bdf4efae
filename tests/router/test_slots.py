"""Slots of a tenant: shared by routers, leased, and fewer while Redis is away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from redis.asyncio import Redis

from paceline.core.clock import ManualClock
from paceline.core.errors import QueueFullError
from paceline.prefix_index.redis_calls import RedisCalls
from router.slots import LEASE_S, LocalSlots, RedisSlots, Slots
from tests.prefix_index.conftest import EmbeddedRedis

KEY = "paceline:slots:{acme}"


def slots_of(server: EmbeddedRedis, clock: ManualClock) -> RedisSlots:
    """A router's, with a budget that a busy machine does not use up; two routers share what there is."""
    calls = RedisCalls(server.url, limit_s=20.0, clock=clock)
    return RedisSlots(calls, budget_s=20.0, num_routers=2, clock=clock)


@pytest.fixture
async def table(embedded_redis: EmbeddedRedis) -> AsyncIterator[Redis]:
    """A client of the server."""
    async with Redis.from_url(embedded_redis.url) as client:
        yield client


@pytest.fixture
async def routers(embedded_redis: EmbeddedRedis) -> AsyncIterator[list[RedisSlots]]:
    """Two of them, on one clock."""
    made = [slots_of(embedded_redis, ManualClock()) for _ in range(2)]
    yield made
    for router in made:
        await router._calls.aclose()


async def num_free(slots: Slots, most: int = 3) -> int:
    """How many slots can be had now; they are let go again."""
    async with AsyncExitStack() as held:
        for num in range(most + 1):
            try:
                await held.enter_async_context(slots.hold("acme", most))
            except QueueFullError:
                return num
    raise AssertionError("more are held than there may be")


async def test_routers_share_the_slots(routers: list[RedisSlots]) -> None:
    """What one holds the other cannot have, until it is let go; of 64 who come at once exactly so many are let in."""
    one, two = routers
    async with one.hold("acme", 3), two.hold("acme", 3):
        assert await num_free(two) == 1
        await two.tell(with_held=False)
        assert await num_free(one) == 1
        async with one.hold("other", 1):
            pass
    for router in routers:
        await router.tell(with_held=False)
    leave, num_in = asyncio.Event(), 0

    async def come(router: RedisSlots) -> bool:
        """Whether it is let in; it stays until all have come."""
        nonlocal num_in
        try:
            async with router.hold("acme", 5):
                num_in += 1
                await leave.wait()
        except QueueFullError:
            return False
        return True

    coming = [asyncio.create_task(come(routers[n % 2])) for n in range(64)]
    refused = 0
    for done in asyncio.as_completed(coming):
        refused += not await done
        if refused == 59:
            leave.set()
    assert (num_in, refused) == (5, 59)


async def test_one_request_after_the_other_is_never_refused(routers: list[RedisSlots]) -> None:
    """A tenant with one slot has it again at once at the router that it was at, whether or not Redis has heard that it is free."""
    for _ in range(5):
        assert await num_free(routers[0], 1) == 1
    async with routers[0].hold("acme", 1):
        assert await num_free(routers[0], 1) == 0
    assert await num_free(routers[0], 1) == 1


async def test_what_a_lost_router_held_comes_back(routers: list[RedisSlots], table: Redis) -> None:
    """A lease ends unless it is renewed; the key goes with the last one."""
    lost, other = routers
    async with lost.hold("acme", 1):
        assert await num_free(other, 1) == 0
        assert 0 < await table.ttl(KEY) <= LEASE_S
        await expire(table)
        assert await num_free(other, 1) == 1


async def test_a_router_that_lives_keeps_what_it_holds(routers: list[RedisSlots], table: Redis) -> None:
    """A round renews the leases, and puts them back where the server has lost them; what was let go stays let go."""
    one, other = routers
    async with one.hold("acme", 2):
        async with one.hold("acme", 2):
            await expire(table)
        await one.tell(with_held=True)
        assert await num_free(other, 2) == 1
        await other.tell(with_held=False)
        await table.flushall()
        assert await num_free(other, 2) == 2
        await other.tell(with_held=False)
        await one.tell(with_held=True)
        assert await num_free(other, 2) == 1


async def expire(table: Redis) -> None:
    """The clock of the server cannot be moved, but ends can: all leases are over."""
    for slot in await table.zrange(KEY, 0, -1):
        assert isinstance(slot, bytes)
        await table.zadd(KEY, {slot: 1})


async def test_the_keeper_lets_go_at_once_and_renews_in_time(
    embedded_redis: EmbeddedRedis, table: Redis
) -> None:
    """By itself: a slot is free once its block is left, and the clock decides when leases are renewed."""
    clock = ManualClock()
    slots = slots_of(embedded_redis, clock)
    keeping = asyncio.create_task(slots.keep())
    async with asyncio.timeout(20):
        async with slots.hold("acme", 1):
            await table.delete(KEY)
            clock.advance(LEASE_S)
            # The keeper sleeps by the loop's clock; a slot that is let go wakes it, and it sees what is due.
            async with slots.hold("other", 1):
                pass
            while not await table.exists(KEY):  # noqa: ASYNC110 - there is no event: it is the server's
                await asyncio.sleep(0)
        while await table.exists(KEY):  # noqa: ASYNC110
            await asyncio.sleep(0)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await slots._calls.aclose()


async def test_without_redis_each_router_has_its_share(embedded_redis: EmbeddedRedis) -> None:
    """Half of the slots for each of two, and one at least; a slot that Redis gave before counts."""
    slots = slots_of(embedded_redis, ManualClock())
    async with slots.hold("acme", 4):
        embedded_redis.kill()
        assert await num_free(slots, 4) == 1
        assert await num_free(slots, 6) == 2
    assert await num_free(slots, 1) == 1
    await slots.aclose()
    await slots._calls.aclose()


async def test_a_slot_comes_back_however_its_block_ends(routers: list[RedisSlots]) -> None:
    """After an exception, and after a cancel."""
    for slots in (LocalSlots(), routers[0]):
        with pytest.raises(ValueError, match="a bug"):
            async with slots.hold("acme", 1):
                raise ValueError("a bug")
        await routers[0].tell(with_held=False)
        assert await num_free(slots, 1) == 1


async def test_an_emptied_server_gives_no_router_more_than_there_is(
    routers: list[RedisSlots], table: Redis
) -> None:
    """It has forgotten what is held; the router that holds it has not."""
    one, _ = routers
    async with one.hold("acme", 3), one.hold("acme", 3):
        await table.flushall()
        assert await num_free(one) == 1
    await one.tell(with_held=False)
    assert await num_free(one) == 3


async def test_what_redis_did_not_hear_of_is_told_again(
    routers: list[RedisSlots], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant's only slot, let go while Redis is away for a moment, is there for the next one at once, and soon at other routers."""
    one, two = routers
    async with one.hold("acme", 1):
        pass
    with monkeypatch.context() as away:
        away.setattr(one._calls, "run_script", _fails)
        await one.tell(with_held=False)
    async with one.hold("acme", 1):
        pass
    await one.tell(with_held=True)
    async with two.hold("acme", 1):
        pass


async def test_what_redis_does_not_hear_of_for_long_is_forgotten(
    routers: list[RedisSlots], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases end there by themselves, and a router that remembered all would grow."""
    one = routers[0]
    monkeypatch.setattr(one._calls, "run_script", _fails)
    most = 0
    for number in range(5000):
        async with one.hold("acme", 1):
            pass
        if number % 100 == 0:
            await one.tell(with_held=False)
            most = max(most, *map(len, one._released.values()), 0)
    assert 0 < most < 2000


async def _fails(*_: object) -> object:
    """Redis is away."""
    raise ConnectionError
