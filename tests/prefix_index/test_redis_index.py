"""What can happen to a Redis, and that it costs a few milliseconds and never an error."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import redis
from redis.asyncio import Redis

from paceline.core.clock import ManualClock
from paceline.core.prefix import WorkerKey
from paceline.core.request import BootEpoch, WorkerId
from paceline.prefix_index.redis_index import RedisPrefixIndex
from tests.prefix_index.blocks import ANNE, ANNE_REBORN, BERT, chain, entries
from tests.prefix_index.conftest import EmbeddedRedis

HASHES = chain(1, 3)
LIVE = f"paceline:live:{ANNE.boot_epoch}"
KEYS = [f"paceline:block:{{{HASHES[0].hex()}}}:{block_hash.hex()}" for block_hash in HASHES]


@pytest.fixture
async def table(embedded_redis: EmbeddedRedis) -> AsyncIterator[Redis]:
    """A client that sees and does what it likes to the table."""
    client = Redis.from_url(embedded_redis.url)
    yield client
    await client.aclose()


async def test_the_key_space_is_as_documented(table: Redis, redis_index: RedisPrefixIndex) -> None:
    """One hash a block, in the slot of its chain's first block, with the worker's epoch, block id and end; a key a life."""
    await redis_index.publish(ANNE, entries(HASHES, first_block=40))
    assert await _blocks(table) == sorted(key.encode() for key in KEYS)
    now_s, _ = await table.time()
    value = await table.hget(KEYS[1], "prefill-0")
    assert isinstance(value, bytes)
    epoch, block_id, end_s = map(int, value.split(b":"))
    assert (epoch, block_id) == (ANNE.boot_epoch, 41)
    assert 3590 < end_s - now_s <= 3600
    await redis_index.renew(ANNE)
    assert await table.get(LIVE) == b"prefill-0"
    assert 10 < await table.ttl(LIVE) <= 15


async def test_every_key_has_a_time_to_live(table: Redis, redis_index: RedisPrefixIndex) -> None:
    """Every key ends by itself an hour after it was last published."""
    await redis_index.publish(ANNE, entries(HASHES))
    for key in KEYS:
        await table.persist(key)
    await redis_index.publish(BERT, entries(HASHES))
    assert all([0 < await table.ttl(key) <= 3600 for key in KEYS])


async def test_the_last_holder_takes_the_key_along(table: Redis, redis_index: RedisPrefixIndex) -> None:
    """A block that nobody holds takes no room."""
    await redis_index.publish(ANNE, entries(HASHES))
    await redis_index.remove(ANNE, entries(HASHES))
    assert await _blocks(table) == []


async def test_each_call_is_one_round_trip(table: Redis, redis_index: RedisPrefixIndex) -> None:
    """Publishing, removing and looking up take one command a chain, whatever their length."""
    await redis_index.lookup(HASHES)
    before = await _num_calls(table)
    long = chain(2, 300)
    await redis_index.publish(ANNE, entries(long))
    assert await redis_index.lookup(long) == {ANNE: 300}
    await redis_index.remove(ANNE, entries(long))
    assert await _num_calls(table) == before + 3


async def test_a_flushed_redis_has_no_entries(table: Redis, redis_index: RedisPrefixIndex) -> None:
    """After FLUSHALL and SCRIPT FLUSH look-ups find nothing, and what is published then is found."""
    await redis_index.publish(ANNE, entries(HASHES))
    await table.flushall()
    await table.script_flush()
    assert await redis_index.lookup(HASHES) == {}
    await announce(redis_index, BERT)
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
    await announce(index, ANNE)
    assert await index.lookup(HASHES) == {ANNE: 3}
    assert [*modes, index.mode] == ["none", "redis"]
    await index.aclose()


async def test_a_hung_redis_costs_the_budget_a_few_times(embedded_redis: EmbeddedRedis) -> None:
    """A server that accepts and never answers is asked three times, then left alone until the pause is over."""
    clock = ManualClock()
    index = RedisPrefixIndex(embedded_redis.url, budget_s=0.05, limit_s=0.05, clock=clock)
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
    await announce(index, ANNE)
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


# -- entries that are over, and lives that are over


async def test_a_life_whose_key_is_gone_holds_nothing(table: Redis, redis_index: RedisPrefixIndex) -> None:
    """Entries of a boot epoch that nobody renews are ignored; those of the others, and of its next life, count."""
    for worker in (ANNE, BERT):
        await redis_index.publish(worker, entries(HASHES))
    assert await redis_index.lookup(HASHES) == {ANNE: 3, BERT: 3}
    await table.delete(LIVE)
    assert await redis_index.lookup(HASHES) == {BERT: 3}
    assert await redis_index.renew(ANNE) == "forgotten"
    assert await redis_index.renew(ANNE) == "known"
    assert await redis_index.lookup(HASHES) == {ANNE: 3, BERT: 3}


async def test_an_entry_that_is_over_is_ignored(table: Redis, redis_index: RedisPrefixIndex) -> None:
    """An entry past its end counts as none, in whichever block it is, though its key lives on."""
    await announce(redis_index, ANNE)
    await announce(redis_index, BERT)
    now_s, _ = await table.time()
    await table.hset(KEYS[0], BERT.worker_id, f"{BERT.boot_epoch}:0:{now_s - 5}")
    await table.hset(KEYS[2], ANNE.worker_id, f"{ANNE.boot_epoch}:2:{now_s - 5}")
    assert await redis_index.lookup(HASHES) == {ANNE: 2}


async def test_a_living_worker_keeps_no_dead_one_in_the_table(
    table: Redis, redis_index: RedisPrefixIndex
) -> None:
    """Whoever publishes a block takes out what is over there, and garbage, and leaves what is not."""
    await announce(redis_index, BERT)
    now_s, _ = await table.time()
    for key in KEYS:
        await table.hset(
            key, mapping={"dead": f"7:1:{now_s - 5}", "garbage": "1:2", "living": f"7:1:{now_s + 5}"}
        )
    await redis_index.publish(ANNE, entries(HASHES))
    for key in KEYS:
        assert set(await table.hkeys(key)) == {b"prefill-0", b"prefill-1", b"living"}


async def test_a_block_changes_its_worker_in_the_middle(table: Redis, redis_index: RedisPrefixIndex) -> None:
    """A worker's blocks count as far as its own life goes: one of an earlier life ends its prefix."""
    await announce(redis_index, ANNE)
    now_s, _ = await table.time()
    await table.hset(KEYS[1], ANNE.worker_id, f"{ANNE_REBORN.boot_epoch}:1:{now_s + 60}")
    assert await redis_index.lookup(HASHES) == {ANNE: 1}


async def announce(index: RedisPrefixIndex, worker: WorkerKey) -> None:
    """A living worker with all blocks."""
    await index.renew(worker)
    await index.publish(worker, entries(HASHES))


# -- a Redis that is late, gone, flushed


async def test_a_late_answer_costs_the_budget_and_not_the_connection(embedded_redis: EmbeddedRedis) -> None:
    """A look-up that misses its budget counts as late; what it asked is read all the same, by nobody."""
    index = RedisPrefixIndex(embedded_redis.url, budget_s=0.05, limit_s=60.0)
    await announce(index, ANNE)
    embedded_redis.pause()
    assert await index.lookup(HASHES) == {}
    assert (index.stats().num_late, index.stats().num_failures) == (1, 1)
    embedded_redis.resume()
    await asyncio.wait(index._calls.under_way)
    async with Redis.from_url(embedded_redis.url) as table:
        before = int((await table.info("stats"))["total_connections_received"])
        # However late this machine makes it: it is one connection.
        await index.lookup(HASHES)
        assert int((await table.info("stats"))["total_connections_received"]) == before
    await index.aclose()


def test_what_arrived_while_we_were_busy_is_in_time(embedded_redis: EmbeddedRedis) -> None:
    """That our own event loop stood still until the budget was over is not held against the server."""
    with asyncio.Runner(loop_factory=StandstillLoop) as runner:
        runner.run(_answered_during_a_standstill(embedded_redis.url))


class StandstillLoop(asyncio.SelectorEventLoop):
    """A real loop, whose time can jump as if something had blocked it."""

    lost_s = 0.0

    def time(self) -> float:
        """Real time, and the jumps."""
        return super().time() + self.lost_s


async def _answered_during_a_standstill(url: str) -> None:
    index, loop = RedisPrefixIndex(url, budget_s=30.0, limit_s=600.0), asyncio.get_running_loop()
    assert isinstance(loop, StandstillLoop)
    await announce(index, ANNE)
    with redis.Redis.from_url(url) as watcher:
        before = _num_evals(watcher.info("commandstats"))
        lookup = asyncio.create_task(index.lookup(HASHES))
        while _num_evals(watcher.info("commandstats")) == before:  # noqa: ASYNC110 - there is no event: it is the server's
            await asyncio.sleep(0)
        # What is answered after the script's answer was written.
        watcher.ping()
    loop.lost_s = 60.0
    assert await lookup == {ANNE: 3}
    await index.aclose()


GARBAGE = [
    b"",
    b"nonsense",
    b"1",
    b"1:",
    b":1",
    b"-1:2",
    b"1:2:3:4",
    b"1:2\n",
    b"\xff\xfe",
    b"9" * 1000 + b":1",
]


@pytest.mark.parametrize("value", GARBAGE)
async def test_a_garbage_value_is_counted_and_ignored(
    table: Redis, redis_index: RedisPrefixIndex, value: bytes
) -> None:
    """What no worker of ours wrote says nothing, and does not hide what ours wrote beside it."""
    await redis_index.publish(ANNE, entries(HASHES))
    await table.hset(KEYS[0], "stranger", value)
    assert await redis_index.lookup(HASHES) == {ANNE: 3}
    assert redis_index.stats().num_garbage == 1
    assert redis_index.mode == "redis"


async def test_a_field_that_is_not_text_is_somebody_we_do_not_know(
    table: Redis, redis_index: RedisPrefixIndex
) -> None:
    """A worker id of odd bytes names no worker of ours."""
    await redis_index.publish(ANNE, entries(HASHES))
    await table.hset(KEYS[0], b"\xff\x00", b"1:2")
    found = await redis_index.lookup(HASHES)
    assert found.pop(ANNE) == 3
    assert BERT not in found


@pytest.mark.parametrize("command", ["SET", "LPUSH", "SADD"])
async def test_a_key_of_another_type_ends_the_prefix(
    table: Redis, redis_index: RedisPrefixIndex, command: str
) -> None:
    """A key that somebody made a string, list or set is no entry, to any call."""
    await redis_index.publish(ANNE, entries(HASHES))
    await table.delete(KEYS[1])
    await table.eval("redis.call(ARGV[1], KEYS[1], 'x')", 1, KEYS[1], command)
    assert await redis_index.lookup(HASHES) == {ANNE: 1}
    await redis_index.publish(BERT, entries(HASHES))
    await redis_index.remove(BERT, entries(HASHES)[2:])
    assert await redis_index.lookup(HASHES) == {ANNE: 1, BERT: 1}
    assert redis_index.stats().num_failures == 0


async def test_a_full_redis_loses_entries_and_nothing_else(
    table: Redis, redis_index: RedisPrefixIndex
) -> None:
    """A server without memory left is no error to the caller."""
    await table.config_set("maxmemory-policy", "noeviction")
    await table.config_set("maxmemory", "1")
    await redis_index.publish(ANNE, entries(HASHES))
    await redis_index.remove(ANNE, entries(HASHES))
    await table.config_set("maxmemory", "0")
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
    b"*4\r\n:0\r\n:1\r\n$1\r\n2\r\n:3\r\n",
    b"*4\r\n:0\r\n$1\r\na\r\n$1\r\n2\r\n:4\r\n",
    b"*4\r\n:0\r\n$1\r\na\r\n$1\r\n2\r\n:-1\r\n",
    b"*4\r\n:0\r\n$1\r\na\r\n$1\r\nx\r\n:1\r\n",
    b"*4\r\n:0\r\n$1\r\na\r\n$-1\r\n*0\r\n",
    b"*5\r\n:0\r\n$1\r\na\r\n$1\r\n2\r\n:1\r\n:1\r\n",
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
        index = RedisPrefixIndex(f"unix://{path}", budget_s=0.2, limit_s=0.2)
        assert await index.lookup(HASHES) == {}
        await index.publish(ANNE, entries(HASHES))
        await index.remove(ANNE, entries(HASHES))
        await index.aclose()


async def test_what_is_well_formed_among_garbage_counts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A holder that could be one of ours is taken as a hint, whatever else the answer holds."""
    path = tmp_path_factory.mktemp("liar") / "liar.sock"
    answer = b"*7\r\n:2\r\n$1\r\na\r\n$1\r\n1\r\n:3\r\n$1\r\nb\r\n$1\r\n1\r\n:4\r\n"
    async with await asyncio.start_unix_server(_liar(answer), path):
        index = RedisPrefixIndex(f"unix://{path}", budget_s=5.0)
        assert await index.lookup(HASHES) == {WorkerKey(WorkerId("a"), BootEpoch(1)): 3}
        assert index.stats().num_garbage == 3
        await index.aclose()


HUGE = [
    b"$2000000000\r\n" + b"x" * 100,
    b"*2000000000\r\n" + b":1\r\n" * 100_000,
    b"*1\r\n" * 50_000,
    b"$-2\r\n",
    b"+" + b"x" * 200_000,
]


@pytest.mark.parametrize("answer", HUGE, ids=["string", "list", "nested", "negative", "line"])
async def test_a_huge_answer_is_given_up_before_it_is_read(
    tmp_path_factory: pytest.TempPathFactory, answer: bytes
) -> None:
    """A server that announces gigabytes is cut off at once: it is not waited for, and nothing is kept."""
    path = tmp_path_factory.mktemp("liar") / "liar.sock"
    async with await asyncio.start_unix_server(_liar(answer), path):
        # Whoever read on would wait for the rest, and the test would hang.
        index = RedisPrefixIndex(f"unix://{path}", budget_s=1000.0)
        assert await index.lookup(HASHES) == {}
        assert (index.stats().num_failures, index.stats().num_late) == (1, 0)
        await index.aclose()


async def test_nobody_at_the_address_is_no_error(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A table that was never there looks like an empty one, in mode "none"."""
    index = RedisPrefixIndex(f"unix://{tmp_path_factory.mktemp('none')}/none.sock")
    for _ in range(4):
        assert await index.lookup(HASHES) == {}
        await index.publish(ANNE, entries(HASHES))
    assert index.mode == "none"
    await index.aclose()


async def _blocks(table: Redis) -> list[bytes | str]:
    """The keys of blocks."""
    return sorted(await table.keys("paceline:block:*"))


async def _num_calls(client: Redis) -> int:
    """Scripts run so far."""
    return _num_evals(await client.info("commandstats"))


def _num_evals(stats: Any) -> int:
    return int(stats.get("cmdstat_eval", {"calls": 0})["calls"])


def _liar(answer: bytes) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """A server that answers whatever it reads in one way, and says nothing after it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            writer.write(answer)
        writer.close()

    return serve
