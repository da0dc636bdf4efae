"""The prefix table in Redis: shared by all processes, and no more than a hint that may be slow, gone or wrong.

    paceline:block:{<hash of the chain's first block>}:<hash of the block>    hash: worker id -> "<boot epoch>:<block id>:<end>"
    paceline:live:<boot epoch>                                                string: worker id

The braces put a chain into one slot of a Redis Cluster, so that one script can walk it. An entry ends at `end`, its key
with the last of its entries; a boot epoch's key lives for seconds. Nothing newer than Redis 7.0 is needed.
"""

import re
from collections.abc import Iterable, Sequence
from functools import partial

from paceline.core.block_hash import BlockHash
from paceline.core.clock import Clock, monotonic
from paceline.core.prefix import PrefixEntry, WorkerKey
from paceline.core.request import BootEpoch, WorkerId
from paceline.prefix_index import scripts
from paceline.prefix_index.index import IndexMode, IndexStats, Renewal
from paceline.prefix_index.redis_calls import NoAnswer, RedisCalls

_BLOCK = "paceline:block:"
_LIVE = "paceline:live:"
# A worker renews it every few seconds (paceline/prefix_index/publisher.py).
_LIVE_S = 15
_EPOCH = re.compile(rb"[0-9]{1,20}")


class RedisPrefixIndex:
    """The table at a URL of one of the forms of `paceline/prefix_index/redis_url.py`.

    Each call is one round trip. A look-up waits `budget_s` for it, any other call `limit_s`. What fails or is late is given up,
    and counted; after a few failures the breaker keeps further calls from waiting at all. Raises ConfigError for a bad URL.
    """

    def __init__(
        self,
        url: str,
        *,
        ttl_s: int = 3600,
        budget_s: float = 0.005,
        limit_s: float = 1.0,
        pause_s: float = 1.0,
        clock: Clock = monotonic,
    ) -> None:
        self._limit_s = max(limit_s, budget_s)
        self._calls = RedisCalls(url, limit_s=self._limit_s, pause_s=pause_s, clock=clock)
        # A script of a cluster may read the keys of its own slot alone.
        self._live_prefix = "" if self._calls.client.is_cluster else _LIVE
        self._ttl_s = ttl_s
        self._budget_s = budget_s
        self._num_lookups = 0
        self._num_lost_entries = self._num_refused_entries = self._num_garbage = 0

    @property
    def mode(self) -> IndexMode:
        """What the last calls say: "none" while the breaker holds further ones back."""
        return "none" if self._calls.is_away else "redis"

    async def publish(self, worker: WorkerKey, entries: Sequence[PrefixEntry]) -> bool:
        """The worker holds these blocks now."""
        return await self._change(worker, entries, scripts.PUBLISH, self._ttl_s)

    async def remove(self, worker: WorkerKey, entries: Sequence[PrefixEntry]) -> bool:
        """The worker holds these blocks no more."""
        return await self._change(worker, entries, scripts.REMOVE)

    async def renew(self, worker: WorkerKey) -> Renewal:
        """The worker lives for `_LIVE_S` seconds more."""
        key = f"{_LIVE}{worker.boot_epoch}"
        call = partial(self._calls.client.commands.set, key, worker.worker_id, ex=_LIVE_S, get=True)
        reply = await self._calls.answer(call, self._limit_s)
        if isinstance(reply, NoAnswer):
            return "failed"
        return "known" if reply == worker.worker_id.encode() else "forgotten"

    async def lookup(self, hashes: Sequence[BlockHash]) -> dict[WorkerKey, int]:
        """How many leading blocks each worker holds; nobody any when Redis has no answer in time."""
        if not hashes:
            return {}
        self._num_lookups += 1
        keys = _keys(hashes[0], hashes)
        call = partial(self._calls.run_script, scripts.LOOKUP, keys, [self._live_prefix])
        reply = await self._calls.answer(call, self._budget_s)
        return {} if isinstance(reply, NoAnswer) else self._holders(reply, len(hashes))

    async def aclose(self) -> None:
        """Gives up what is under way, and closes the connections."""
        await self._calls.aclose()

    def stats(self) -> IndexStats:
        """What happened so far."""
        calls = self._calls.stats()
        return IndexStats(
            num_lookups=self._num_lookups,
            num_failures=calls.num_failures,
            num_late=calls.num_late,
            num_skipped=calls.num_skipped,
            num_lost_entries=self._num_lost_entries,
            num_refused_entries=self._num_refused_entries,
            num_garbage=self._num_garbage,
        )

    async def _change(
        self, worker: WorkerKey, entries: Sequence[PrefixEntry], script: str, *arguments: int
    ) -> bool:
        """Runs the script once for each chain, all in one round trip."""
        if not entries:
            return True
        reply = await self._calls.answer(
            partial(self._run, worker, entries, script, arguments), self._limit_s
        )
        if isinstance(reply, NoAnswer):
            self._num_lost_entries += len(entries)
            return False
        counts = reply if isinstance(reply, list) else []
        self._num_refused_entries += sum(count for count in counts if isinstance(count, int) and count > 0)
        return True

    async def _run(
        self, worker: WorkerKey, entries: Sequence[PrefixEntry], script: str, arguments: tuple[int, ...]
    ) -> object:
        pipeline = self._calls.client.commands.pipeline(transaction=False)
        for chain in _chains(entries):
            keys = _keys(chain[0].head_hash, [entry.block_hash for entry in chain])
            values = [f"{worker.boot_epoch}:{entry.block_id}" for entry in chain]
            pipeline.execute_command("EVAL", script, len(keys), *keys, worker.worker_id, *arguments, *values)
        return await pipeline.execute()

    def _holders(self, reply: object, num_asked: int) -> dict[WorkerKey, int]:
        """Who holds how much; what no worker of ours wrote is counted and left out."""
        if not isinstance(reply, list) or len(reply) % 3 != 1 or not isinstance(reply[0], int):
            self._num_garbage += 1
            return {}
        self._num_garbage += max(0, reply[0])
        holders: dict[WorkerKey, int] = {}
        for worker_id, epoch, num_blocks in zip(reply[1::3], reply[2::3], reply[3::3], strict=True):
            if _is_entry(worker_id, epoch, num_blocks, num_asked):
                key = WorkerKey(WorkerId(worker_id.decode(errors="replace")), BootEpoch(int(epoch)))
                holders[key] = num_blocks
            else:
                self._num_garbage += 1
        return holders


def _chains(entries: Iterable[PrefixEntry]) -> Iterable[list[PrefixEntry]]:
    chains: dict[BlockHash, list[PrefixEntry]] = {}
    for entry in entries:
        chains.setdefault(entry.head_hash, []).append(entry)
    return chains.values()


def _keys(head_hash: BlockHash, hashes: Sequence[BlockHash]) -> list[bytes]:
    prefix = f"{_BLOCK}{{{head_hash.hex()}}}:"
    return [(prefix + block_hash.hex()).encode() for block_hash in hashes]


def _is_entry(worker_id: object, epoch: object, num_blocks: object, num_asked: int) -> bool:
    return (
        isinstance(worker_id, bytes)
        and isinstance(epoch, bytes)
        and _EPOCH.fullmatch(epoch) is not None
        and isinstance(num_blocks, int)
        and 0 < num_blocks <= num_asked
    )
