"""Where workers are by their own words, in a real server."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from paceline.core.prefix import WorkerKey
from paceline.core.request import BootEpoch, WorkerId
from paceline.prefix_index.redis_calls import RedisCalls
from paceline.prefix_index.registration import TTL_S, Registration, Tier, WorkerTable
from paceline.runtime.addresses import is_address
from tests.prefix_index.conftest import EmbeddedRedis
from tests.prefix_index.liar import LIES, LyingRedis
from tests.prefix_index.servers import until, valkey_cluster, watcher_of

KEY = "paceline:workers:prefill"


def said_by(name: str, *, life: int = 1, tier: Tier = "prefill", port: int = 1) -> Registration:
    """What a worker of this name says."""
    key = WorkerKey(WorkerId(name), BootEpoch(life))
    return Registration(tier, f"10.0.0.1:{port}", key, b"\xab" * 16)


async def there(table: WorkerTable, tier: Tier) -> set[str]:
    """The addresses of a tier."""
    addresses = await table.addresses(tier)
    assert addresses is not None
    return set(addresses)


@pytest.fixture
async def table(embedded_redis: EmbeddedRedis) -> AsyncIterator[WorkerTable]:
    """An empty one."""
    table = WorkerTable(RedisCalls(embedded_redis.url, limit_s=20.0))
    yield table
    await table.aclose()


@pytest.fixture
async def server(embedded_redis: EmbeddedRedis) -> AsyncIterator[Redis]:
    """The same server, as others see it."""
    async with Redis.from_url(embedded_redis.url, decode_responses=True) as client:
        yield client


async def test_who_registers_is_found_in_its_tier(table: WorkerTable) -> None:
    """Whoever has registered and not left is there, each tier by itself; at first nobody is."""
    assert await there(table, "prefill") == set()
    assert await table.register(said_by("a", port=1))
    assert await table.register(said_by("b", port=2))
    assert await table.register(said_by("c", port=3, tier="decode"))
    assert await there(table, "prefill") == {"10.0.0.1:1", "10.0.0.1:2"}
    assert await there(table, "decode") == {"10.0.0.1:3"}
    await table.leave(said_by("a", port=1))
    assert await there(table, "prefill") == {"10.0.0.1:2"}


async def test_an_entry_says_who_it_is_and_ends(table: WorkerTable, server: Redis) -> None:
    """Boot epoch, end, fingerprint and name are to be read there; the key ends with its youngest entry."""
    await table.register(said_by("a:b", life=7))
    value = await server.hget(KEY, "10.0.0.1:1")
    epoch, ends, fingerprint, name = str(value).split(":", 3)
    now, _ = await server.time()
    assert (epoch, fingerprint, name) == ("7", "ab" * 16, "a:b")
    assert now <= int(ends) <= now + TTL_S
    assert 0 < await server.ttl(KEY) <= TTL_S


async def test_who_is_silent_is_forgotten_though_others_are_not(table: WorkerTable, server: Redis) -> None:
    """An entry past its end is not named, and the next word of another worker takes it out, with what nobody of ours wrote."""
    now, _ = await server.time()
    await table.register(said_by("a"))
    for field, value in (("10.0.0.9:9", f"1:{now - 1}:ab:gone"), ("10.0.0.8:8", "garbage")):
        await server.hset(KEY, field, value)
    assert await there(table, "prefill") == {"10.0.0.1:1"}
    await table.register(said_by("b", port=2))
    assert set(await server.hkeys(KEY)) == {"10.0.0.1:1", "10.0.0.1:2"}


async def test_a_former_life_does_not_take_the_next_one_away(table: WorkerTable) -> None:
    """A worker that ends slowly leaves after its successor at the same address has come."""
    await table.register(said_by("a", life=1))
    await table.register(said_by("a", life=2))
    await table.leave(said_by("a", life=1))
    assert await there(table, "prefill") == {"10.0.0.1:1"}
    await table.leave(said_by("a", life=2))
    assert await there(table, "prefill") == set()


async def test_what_cannot_be_an_address_is_left_out(table: WorkerTable, server: Redis) -> None:
    """Whatever anybody has put there: gRPC is not asked to make sense of it."""
    now, _ = await server.time()
    for field in ("xds:///evil", "host", "\xff\xfe", "10.0.0.1:99999", "a b:1"):
        await server.hset(KEY, field, f"1:{now + 60}:ab:x")
    await table.register(said_by("a"))
    assert await there(table, "prefill") == {"10.0.0.1:1"}


async def test_a_key_of_another_kind_is_nobody_and_takes_nobody(table: WorkerTable, server: Redis) -> None:
    """It is told that it was not heard, and goes on saying it."""
    await server.set(KEY, "x")
    assert not await table.register(said_by("a"))
    await server.delete(KEY)
    assert await table.register(said_by("a"))


async def test_a_server_that_is_away_says_nothing(table: WorkerTable, embedded_redis: EmbeddedRedis) -> None:
    """That is not the same as nobody; when it is back, empty, whoever says it again is there."""
    await table.register(said_by("a"))
    embedded_redis.kill()
    assert await table.addresses("prefill") is None
    assert not await table.register(said_by("a"))
    await table.leave(said_by("a"))
    embedded_redis.start()
    while not await table.register(said_by("a")):
        pass
    assert await there(table, "prefill") == {"10.0.0.1:1"}


@pytest.mark.parametrize("lie", LIES)
async def test_no_lie_is_taken_for_more_than_addresses(lie: str) -> None:
    """Whatever a server answers, a router hears of addresses or of nothing, and a worker is told that it is not there."""
    liar = LyingRedis()
    liar.workers = {b"anne": b"1"}
    async with liar.listening() as url:
        table = WorkerTable(RedisCalls(url, limit_s=0.2, pause_s=0.0))
        liar.mood = lie
        for _ in range(8):
            addresses = await table.addresses("prefill")
            assert addresses is None or all(map(is_address, addresses))
            await table.register(said_by("a"))
        await table.leave(said_by("a"))
        await table.aclose()


async def test_a_redis_cluster_has_each_tier_in_one_slot(tmp_path: Path) -> None:
    """Every script has one key, so that all of it works there."""
    with valkey_cluster(tmp_path) as ports:
        until(watcher_of(ports[0]), "PING -> True")
        table = WorkerTable(RedisCalls(f"redis+cluster://127.0.0.1:{ports[0]}", limit_s=20.0))
        tiers: tuple[Tier, ...] = ("prefill", "decode")
        for tier in tiers:
            assert await table.register(said_by("a", tier=tier))
            assert await there(table, tier) == {"10.0.0.1:1"}
            await table.leave(said_by("a", tier=tier))
            assert await there(table, tier) == set()
        await table.aclose()
