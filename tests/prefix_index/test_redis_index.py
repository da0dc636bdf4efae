"""What can happen to a Redis, and that it costs a few milliseconds and never an error."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from redis.asyncio import Redis

from paceline.core.clock import ManualClock
from paceline.core.prefix import WorkerKey
from paceline.core.request import BootEpoch, WorkerId
from paceline.prefix_index.redis_index import RedisPrefixIndex
from tests.prefix_index.blocks import ANNE, BERT, chain, entries
from tests.prefix_index.conftest import EmbeddedRedis

HASHES = chain(1, 3)
KEYS = [f"paceline:block:{{{HASHES[0].hex()}}}:{block_hash.hex()}" for block_hash in HASHES]


@pytest.fixture
async def redis(embedded_redis: EmbeddedRedis) -> AsyncIterator[Redis]:
    """A client that sees and does what it likes to the table."""
    client = Redis.from_url(embedded_redis.url)
    yield client
    await client.aclose()


async def test_the_key_space_is_as_documented(redis: Redis, redis_index: RedisPrefixIndex) -> None:
    """One hash a block, in the slot of its chain's first block, with the worker's epoch and block id."""
    await redis_index.publish(ANNE, entries(HASHES, first_block=40))
    assert sorted(await redis.keys()) == sorted(key.encode() for key in KEYS)
    assert await redis.hgetall(KEYS[1]) == {b"prefill-0": b"%d:41" % ANNE.boot_epoch}


async def test_every_key_has_a_time_to_live(redis: Redis, redis_index: RedisPrefixIndex) -> None:
    """Every key ends by itself an hour after it was last published."""
    await redis_index.publish(ANNE, entries(HASHES))
    for key in KEYS:
        await redis.persist(key)
    await redis_index.publish(BERT, entries(HASHES))
    assert all([0 < await redis.ttl(key) <= 3600 for key in KEYS])


async def test_the_last_holder_takes_the_key_along(redis: Redis, redis_index: RedisPrefixIndex) -> None:
    """A block that nobody holds takes no room."""
    await redis_index.publish(ANNE, entries(HASHES))
    await redis_index.remove(ANNE, entries(HASHES))
    assert await redis.dbsize() == 0


async def test_each_call_is_one_round_trip(redis: Redis, redis_index: RedisPrefixIndex) -> None:
    """Publishing, removing and looking up take one command a chain, whatever their length."""
    await redis_index.lookup(HASHES)
    before = await _num_calls(redis)
    long = chain(2, 300)
    await redis_index.publish(ANNE, entries(long))
    assert await redis_index.lookup(long) == {ANNE: 300}
    await redis_index.remove(ANNE, entries(long))
    assert await _num_calls(redis) == before + 3


async def test_a_flushed_redis_has_no_entries(redis: Redis, redis_index: RedisPrefixIndex) -> None:
    """After FLUSHALL and SCRIPT FLUSH look-ups find nothing, and what is published then is found."""
    await redis_index.publish(ANNE, entries(HASHES))
    await redis.flushall()
    await redis.script_flush()
    assert await redis_index.lookup(HASHES) == {}
    await redis_index.publish(BERT, entries(HASHES))
    assert await redis_index.lookup(HASHES) == {BERT: 3}
    assert redis_index.stats().num_failures == 0


async def test_a_killed_redis_costs_answers_and_no_error(
    embedded_redis: EmbeddedRedis, redis_index: RedisPrefixIndex
) -> None:
    """Without a server look-ups are empty and changes are dropped, counted; the mode says so."""
    await redis_index.publish(ANNE, entries(HASHES))
    embedded_redis.kill()
    for _ in range(3):
        assert await redis_index.lookup(HASHES) == {}
    await redis_index.publish(ANNE, entries(HASHES))
    await redis_index.remove(ANNE, entries(HASHES))
    stats = redis_index.stats()
    assert (stats.num_failures, stats.num_skipped, stats.num_lost_entries) == (3, 2, 6)
    assert redis_index.mode == "none"


async def test_a_redis_that_comes_back_is_used_again(embedded_redis: EmbeddedRedis) -> None:
    """After a restart the first trial finds the new server, however many old connections were open."""
    clock = ManualClock()
    index = RedisPrefixIndex(embedded_redis.url, budget_s=5.0, pause_s=1.0, clock=clock)
    await asyncio.gather(*(index.lookup(HASHES) for _ in range(10)))
    embedded_redis.kill()
    for _ in range(5):
        await index.lookup(HASHES)
    modes = [index.mode]
    embedded_redis.start()
    clock.advance(1.0)
    await index.publish(ANNE, entries(HASHES))
    assert await index.lookup(HASHES) == {ANNE: 3}
    assert [*modes, index.mode] == ["none", "redis"]
    await index.aclose()


async def test_a_hung_redis_costs_the_budget_a_few_times(embedded_redis: EmbeddedRedis) -> None:
    """A server that accepts and never answers is asked three times, then left alone until the pause is over."""
    clock = ManualClock()
    index = RedisPrefixIndex(embedded_redis.url, budget_s=0.05, clock=clock)
    embedded_redis.pause()
    for _ in range(100):
        assert await index.lookup(HASHES) == {}
        await index.publish(ANNE, entries(HASHES))
    assert (index.stats().num_failures, index.stats().num_skipped) == (3, 197)
    await index.aclose()
    embedded_redis.resume()


async def test_an_answer_that_came_too_late_is_nobody_elses(embedded_redis: EmbeddedRedis) -> None:
    """After a time-out the connection is dropped, so that no later call reads the earlier one's answer."""
    index = RedisPrefixIndex(embedded_redis.url, budget_s=0.2)
    await index.publish(ANNE, entries(HASHES))
    embedded_redis.pause()
    assert await index.lookup(HASHES) == {}
    embedded_redis.resume()
    assert await index.lookup(chain(2, 3)) == {}
    assert await index.lookup(HASHES) == {ANNE: 3}
    await index.aclose()


async def test_a_cancelled_call_leaves_the_table_usable(redis_index: RedisPrefixIndex) -> None:
    """A look-up that is cancelled midway is no failure, and the next one gets its own answer."""
    await redis_index.publish(ANNE, entries(HASHES))
    for num_steps in range(8):
        lookup = asyncio.create_task(redis_index.lookup(chain(2, 3)))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        lookup.cancel()
        await asyncio.wait({lookup})
        assert await redis_index.lookup(HASHES) == {ANNE: 3}
    assert redis_index.stats().num_failures == 0


GARBAGE = [
    b"",
    b"nonsense",
    b"1",
    b"1:",
    b":1",
    b"-1:2",
    b"1:2:3",
    b"1:2\n",
    b"\xff\xfe",
    b"9" * 1000 + b":1",
]


@pytest.mark.parametrize("value", GARBAGE)
async def test_a_garbage_value_is_counted_and_ignored(
    redis: Redis, redis_index: RedisPrefixIndex, value: bytes
) -> None:
    """What no worker of ours wrote says nothing, and does not hide what ours wrote beside it."""
    await redis_index.publish(ANNE, entries(HASHES))
    await redis.hset(KEYS[0], "stranger", value)
    assert await redis_index.lookup(HASHES) == {ANNE: 3}
    assert redis_index.stats().num_garbage == 1
    assert redis_index.mode == "redis"


async def test_a_field_that_is_not_text_is_somebody_we_do_not_know(
    redis: Redis, redis_index: RedisPrefixIndex
) -> None:
    """A worker id of odd bytes names no worker of ours."""
    await redis_index.publish(ANNE, entries(HASHES))
    await redis.hset(KEYS[0], b"\xff\x00", b"1:2")
    found = await redis_index.lookup(HASHES)
    assert found.pop(ANNE) == 3
    assert BERT not in found


@pytest.mark.parametrize("command", ["SET", "LPUSH", "SADD"])
async def test_a_key_of_another_type_ends_the_prefix(
    redis: Redis, redis_index: RedisPrefixIndex, command: str
) -> None:
    """A key that somebody made a string, list or set is no entry, to any call."""
    await redis_index.publish(ANNE, entries(HASHES))
    await redis.delete(KEYS[1])
    await redis.eval("redis.call(ARGV[1], KEYS[1], 'x')", 1, KEYS[1], command)
    assert await redis_index.lookup(HASHES) == {ANNE: 1}
    await redis_index.publish(BERT, entries(HASHES))
    await redis_index.remove(BERT, entries(HASHES)[2:])
    assert await redis_index.lookup(HASHES) == {ANNE: 1, BERT: 1}
    assert redis_index.stats().num_failures == 0


async def test_a_full_redis_loses_entries_and_nothing_else(
    redis: Redis, redis_index: RedisPrefixIndex
) -> None:
    """A server without memory left is no error to the caller."""
    await redis.config_set("maxmemory-policy", "noeviction")
    await redis.config_set("maxmemory", "1")
    await redis_index.publish(ANNE, entries(HASHES))
    await redis_index.remove(ANNE, entries(HASHES))
    await redis.config_set("maxmemory", "0")
    assert await redis_index.lookup(HASHES) == {}


ANSWERS = [
    b"*-1\r\n",
    b"$-1\r\n",
    b":7\r\n",
    b"+OK\r\n",
    b"-ERR broken\r\n",
    b"$3\r\nabc\r\n",
    b"*1\r\n:3\r\n",
    b"*1\r\n*1\r\n$1\r\na\r\n",
    b"*1\r\n*2\r\n:1\r\n:2\r\n",
    b"*1\r\n*2\r\n$-1\r\n*0\r\n",
    b"*2\r\n*0\r\n*2\r\n$1\r\na\r\n$3\r\n1:2\r\n",
    b"$abc\r\n",
    b"*abc\r\n",
    b"%1\r\n+a\r\n+b\r\n",
    b"GARBAGE\r\n",
    b"\x00\xff\xfe\r\n",
    b"*" + b"9" * 30 + b"\r\n",
    b"",
]


@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_server_that_lies_costs_answers_and_no_error(
    tmp_path_factory: pytest.TempPathFactory, answer: bytes
) -> None:
    """Whatever comes back, of whatever form, a look-up gives nothing and a change is dropped."""
    path = tmp_path_factory.mktemp("liar") / "liar.sock"
    async with await asyncio.start_unix_server(_liar(answer), path):
        index = RedisPrefixIndex(f"unix://{path}", budget_s=0.2)
        assert await index.lookup(HASHES) == {}
        await index.publish(ANNE, entries(HASHES))
        await index.remove(ANNE, entries(HASHES))
        await index.aclose()


async def test_a_server_that_tells_too_much_is_cut_short(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A look-up never gives a worker more blocks than were asked for."""
    path = tmp_path_factory.mktemp("liar") / "liar.sock"
    answer = b"*5\r\n" + 5 * b"*2\r\n$1\r\na\r\n$3\r\n1:2\r\n"
    async with await asyncio.start_unix_server(_liar(answer), path):
        index = RedisPrefixIndex(f"unix://{path}", budget_s=5.0)
        assert await index.lookup(HASHES) == {WorkerKey(WorkerId("a"), BootEpoch(1)): 3}
        await index.aclose()


async def test_nobody_at_the_address_is_no_error(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A table that was never there looks like an empty one, in mode "none"."""
    index = RedisPrefixIndex(f"unix://{tmp_path_factory.mktemp('none')}/none.sock")
    for _ in range(4):
        assert await index.lookup(HASHES) == {}
        await index.publish(ANNE, entries(HASHES))
    assert index.mode == "none"
    await index.aclose()


async def _num_calls(redis: Redis) -> int:
    """Scripts run so far."""
    stats = await redis.info("commandstats")
    return int(stats.get("cmdstat_eval", {"calls": 0})["calls"])


def _liar(answer: bytes) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """A server that answers whatever it reads in one way, and says nothing after it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            writer.write(answer)
        writer.close()

    return serve
