"""The prefix table in Redis: shared by all processes, and no more than a hint that may be slow, gone or wrong.

One hash a block:

    paceline:block:{<hash of the chain's first block>}:<hash of the block>    worker id -> "<boot epoch>:<block id>"

The braces put a chain into one slot of a Redis Cluster, so that one script can walk it. Each key has a TTL.
Nothing newer than Redis 7.0 is needed.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from paceline.core.block_hash import BlockHash
from paceline.core.clock import Clock, monotonic
from paceline.core.prefix import PrefixEntry, WorkerKey
from paceline.core.request import BootEpoch, WorkerId
from paceline.prefix_index.breaker import CircuitBreaker
from paceline.prefix_index.index import IndexMode, IndexStats
from paceline.prefix_index.matching import leading_blocks

# KEYS: blocks of one chain. ARGV: worker id, TTL in seconds, a value for each key.
_PUBLISH = """
for i, key in ipairs(KEYS) do
  redis.pcall('HSET', key, ARGV[1], ARGV[i + 2])
  redis.pcall('EXPIRE', key, ARGV[2])
end
"""

# KEYS: blocks of one chain. ARGV: worker id, a value for each key. What was published since has another value, and
# stays.
_REMOVE = """
for i, key in ipairs(KEYS) do
  if redis.pcall('HGET', key, ARGV[1]) == ARGV[i + 1] then redis.pcall('HDEL', key, ARGV[1]) end
end
"""

# KEYS: a chain from its first block. Gives the fields of each key up to the first that has none: after it nobody
# can have a leading block.
_LOOKUP = """
local found = {}
for i, key in ipairs(KEYS) do
  local fields = redis.pcall('HGETALL', key)
  if #fields == 0 then break end
  found[i] = fields
end
return found
"""

_VALUE = re.compile(rb"([0-9]{1,20}):[0-9]{1,10}")
_MAX_CONNECTIONS = 16


class RedisPrefixIndex:
    """The table at a `redis://`, `rediss://` or `unix://` URL.

    Each call is one round trip within `budget_s`. What fails is given up, and counted; after a few failures the
    breaker keeps further calls from waiting at all.
    """

    def __init__(
        self,
        url: str,
        *,
        ttl_s: int = 3600,
        budget_s: float = 0.02,
        pause_s: float = 1.0,
        clock: Clock = monotonic,
    ) -> None:
        self._redis = _connect(url, budget_s)
        self._ttl_s = ttl_s
        self._budget_s = budget_s
        self._breaker = CircuitBreaker(pause_s=pause_s, clock=clock)
        self._num_lookups = 0
        self._num_failures = 0
        self._num_skipped = 0
        self._num_lost_entries = 0
        self._num_garbage = 0

    @property
    def mode(self) -> IndexMode:
        """What the last calls say: "none" while the breaker holds further ones back."""
        return "none" if self._breaker.is_open else "redis"

    async def publish(self, worker: WorkerKey, entries: Sequence[PrefixEntry]) -> None:
        """The worker holds these blocks now."""
        await self._change(worker, entries, _PUBLISH, self._ttl_s)

    async def remove(self, worker: WorkerKey, entries: Sequence[PrefixEntry]) -> None:
        """The worker holds these blocks no more."""
        await self._change(worker, entries, _REMOVE)

    async def lookup(self, hashes: Sequence[BlockHash]) -> dict[WorkerKey, int]:
        """How many leading blocks each worker holds; nobody any when Redis has no answer."""
        if not hashes:
            return {}
        self._num_lookups += 1
        keys = [_key(hashes[0], block_hash) for block_hash in hashes]
        reply = await self._within_budget(partial(self._redis.eval, _LOOKUP, len(keys), *keys))
        if reply is None:
            return {}
        blocks = reply if isinstance(reply, list) else [reply]
        return leading_blocks(self._holders(fields) for fields in blocks[: len(hashes)])

    async def aclose(self) -> None:
        """Closes the connections."""
        with suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(self._budget_s):
                await self._redis.aclose(close_connection_pool=True)

    def stats(self) -> IndexStats:
        """What happened so far."""
        return IndexStats(
            num_lookups=self._num_lookups,
            num_failures=self._num_failures,
            num_skipped=self._num_skipped,
            num_lost_entries=self._num_lost_entries,
            num_garbage=self._num_garbage,
        )

    async def _change(
        self, worker: WorkerKey, entries: Sequence[PrefixEntry], script: str, *arguments: int
    ) -> None:
        """Runs the script once for each chain, all in one round trip."""
        if not entries:
            return
        pipeline = self._redis.pipeline(transaction=False)
        for chain in _chains(entries):
            keys = [_key(entry.head_hash, entry.block_hash) for entry in chain]
            values = [f"{worker.boot_epoch}:{entry.block_id}" for entry in chain]
            pipeline.eval(script, len(keys), *keys, worker.worker_id, *arguments, *values)
        if await self._within_budget(pipeline.execute) is None:
            self._num_lost_entries += len(entries)

    async def _within_budget(self, call: Callable[[], Awaitable[object]]) -> object | None:
        """What Redis answers; None when it is not asked, fails, or takes too long."""
        if not self._breaker.allows_call():
            self._num_skipped += 1
            return None
        try:
            async with asyncio.timeout(self._budget_s):
                reply = await call()
        except Exception:  # noqa: BLE001 (whatever a broken server makes the client raise: it is only a hint)
            self._num_failures += 1
            self._breaker.record_failure()
            return None
        self._breaker.record_success()
        return reply

    def _holders(self, fields: object) -> set[WorkerKey]:
        """Who holds the block with these fields; what no worker of ours wrote is counted and left out."""
        if not isinstance(fields, list) or len(fields) % 2:
            self._num_garbage += 1
            return set()
        holders = [_holder(*pair) for pair in zip(fields[::2], fields[1::2], strict=True)]
        self._num_garbage += holders.count(None)
        return {holder for holder in holders if holder is not None}


def _connect(url: str, budget_s: float) -> Redis:
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=_MAX_CONNECTIONS,
        timeout=budget_s,
        socket_timeout=budget_s,
        socket_connect_timeout=budget_s,
        # By default the client tries again with back-off, long past any budget.
        retry=Retry(NoBackoff(), 0),
        # Nothing is said before the first command: a new connection costs no round trip of its own.
        protocol=2,
        driver_info=None,
    )
    return Redis(connection_pool=pool)


def _chains(entries: Iterable[PrefixEntry]) -> Iterable[list[PrefixEntry]]:
    chains: dict[BlockHash, list[PrefixEntry]] = {}
    for entry in entries:
        chains.setdefault(entry.head_hash, []).append(entry)
    return chains.values()


def _key(head_hash: BlockHash, block_hash: BlockHash) -> str:
    return f"paceline:block:{{{head_hash.hex()}}}:{block_hash.hex()}"


def _holder(worker_id: object, value: object) -> WorkerKey | None:
    if not isinstance(worker_id, bytes) or not isinstance(value, bytes):
        return None
    match = _VALUE.fullmatch(value)
    if match is None:
        return None
    return WorkerKey(WorkerId(worker_id.decode(errors="replace")), BootEpoch(int(match[1])))
