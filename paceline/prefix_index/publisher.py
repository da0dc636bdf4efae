"""Carries what an engine's cache gains and loses to the prefix table, without ever making the engine wait.

It also knows all that the cache holds, and says so again and again: entries end by themselves, and a table may forget.
"""

import asyncio
import itertools
from dataclasses import dataclass
from typing import TypeVar

from paceline.core.block_hash import BlockHash
from paceline.core.prefix import PrefixChanges, PrefixEntry, WorkerKey
from paceline.prefix_index.index import PrefixIndex

K = TypeVar("K")

_TICK_S = 1.0
# A third of what a boot epoch's key lives.
_TICKS_A_RENEWAL = 5


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """Blocks that the cache holds, and how many changes wait now.

    Since the start: removals that found no room, and blocks that were published again.
    """

    num_held: int
    num_pending: int
    num_dropped: int
    num_refreshed: int


class PrefixPublisher:
    """Publishes for one worker, from its event loop. Of several changes to one block only the last travels.

    What did not get through is sent again. `refresh_forever` belongs to it: it publishes every block again within
    `refresh_s` seconds, and all of them when the table has forgotten them, at most `max_refreshes` a second.
    """

    def __init__(
        self,
        index: PrefixIndex,
        worker: WorkerKey,
        *,
        max_pending: int = 65_536,
        max_batch: int = 256,
        refresh_s: float = 1200.0,
        max_refreshes: int = 5_000,
    ) -> None:
        self._index = index
        self._worker = worker
        self._max_pending = max_pending
        self._max_batch = max_batch
        self._refresh_s = refresh_s
        self._max_refreshes = max_refreshes
        # What the cache holds is in one of these two: to be published, or published, the longest ago first.
        self._unpublished: dict[BlockHash, PrefixEntry] = {}
        self._published: dict[BlockHash, PrefixEntry] = {}
        # Of these nothing is held. A removal leaves other entries alone, so it does not matter which travels first.
        self._evicted: dict[PrefixEntry, None] = {}
        self._flushing: asyncio.Task[None] | None = None
        self._is_closed = False
        # The table did not answer: who tries again is `refresh_forever`, not every step.
        self._is_away = False
        # How many of the published are to be published again by now, on their round; and as soon as may be.
        self._num_rolling = 0.0
        self._num_owed = 0
        self._num_dropped = self._num_refreshed = 0

    def offer(self, changes: PrefixChanges) -> None:
        """Takes the changes of one step; a task sends them, together with what is offered meanwhile."""
        if self._is_closed:
            return
        for entry in changes.published:
            self._evicted.pop(entry, None)
            self._published.pop(entry.block_hash, None)
            self._unpublished[entry.block_hash] = entry
        for entry in changes.evicted:
            self._note_evicted(entry)
        if not self._is_away:
            self._start_flush()

    async def refresh_forever(self) -> None:
        """Says that the worker lives, publishes again what is due, and tries again what did not get through."""
        for tick in itertools.count():
            if self._is_away or tick % _TICKS_A_RENEWAL == 0:
                await self._renew()
            if not self._is_away:
                self._note_due()
            self._start_flush()
            await asyncio.sleep(_TICK_S)

    async def aclose(self, *, timeout_s: float = 1.0) -> None:
        """Sends what is pending unless that takes longer than `timeout_s`; later offers go nowhere."""
        self._is_closed = True
        if self._flushing is not None:
            await asyncio.wait({self._flushing}, timeout=timeout_s)
            self._flushing.cancel()

    def stats(self) -> PublisherStats:
        """What is held, what waits, what was lost for want of room."""
        num_held = len(self._unpublished) + len(self._published)
        return PublisherStats(num_held, self._num_pending, self._num_dropped, self._num_refreshed)

    @property
    def _num_pending(self) -> int:
        return len(self._unpublished) + len(self._evicted)

    def _note_evicted(self, entry: PrefixEntry) -> None:
        for held in (self._unpublished, self._published):
            if held.get(entry.block_hash) == entry:
                del held[entry.block_hash]
        self._owe_removal(entry)

    def _owe_removal(self, entry: PrefixEntry) -> None:
        # What is held is bounded by the cache; this is not, and what is left out here ends by itself.
        if len(self._evicted) < self._max_pending:
            self._evicted[entry] = None
        else:
            self._num_dropped += 1

    async def _renew(self) -> None:
        renewal = await self._index.renew(self._worker)
        self._is_away = renewal == "failed"
        if renewal == "forgotten":
            self._num_owed = len(self._published)

    def _note_due(self) -> None:
        """As many as go round in time, or more if the table has forgotten them."""
        self._num_rolling += len(self._published) * _TICK_S / self._refresh_s
        due = _take(self._published, min(self._max_refreshes, max(int(self._num_rolling), self._num_owed)))
        self._unpublished.update((entry.block_hash, entry) for entry in due)
        self._num_rolling = max(0.0, self._num_rolling - len(due))
        self._num_owed = max(0, self._num_owed - len(due)) if due else 0
        self._num_refreshed += len(due)

    def _start_flush(self) -> None:
        if self._num_pending and (self._flushing is None or self._flushing.done()):
            self._flushing = asyncio.create_task(self._flush())

    async def _flush(self) -> None:
        while self._num_pending:
            self._is_away = not (await self._publish_some() and await self._remove_some())
            if self._is_away:
                return

    async def _publish_some(self) -> bool:
        batch = _take(self._unpublished, self._max_batch)
        self._published.update((entry.block_hash, entry) for entry in batch)
        if await self._index.publish(self._worker, batch):
            return True
        for entry in batch:
            # Unless it was evicted meanwhile.
            if self._published.get(entry.block_hash) == entry:
                del self._published[entry.block_hash]
                self._unpublished[entry.block_hash] = entry
        return False

    async def _remove_some(self) -> bool:
        batch = list(itertools.islice(self._evicted, self._max_batch))
        for entry in batch:
            del self._evicted[entry]
        if await self._index.remove(self._worker, batch):
            return True
        for entry in batch:
            if not self._holds(entry):
                self._owe_removal(entry)
        return False

    def _holds(self, entry: PrefixEntry) -> bool:
        return entry in (self._unpublished.get(entry.block_hash), self._published.get(entry.block_hash))


def _take(entries: dict[K, PrefixEntry], max_entries: int) -> list[PrefixEntry]:
    """The oldest entries, which are no longer in there then."""
    # Not one by one: to find the first key of a dict costs a look at every one that was deleted before it.
    return [entries.pop(key) for key in list(itertools.islice(entries, max_entries))]
