"""Carries what an engine's cache gains and loses to the prefix table, without ever making the engine wait."""

import asyncio
from dataclasses import dataclass
from typing import TypeVar

from paceline.core.block_hash import BlockHash
from paceline.core.prefix import PrefixChanges, PrefixEntry, WorkerKey
from paceline.prefix_index.index import PrefixIndex

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """`num_pending` changes wait now; `num_dropped` found no room since the start."""

    num_pending: int
    num_dropped: int


class PrefixPublisher:
    """Publishes for one worker, from its event loop. Of several changes to one block only the last travels."""

    def __init__(
        self, index: PrefixIndex, worker: WorkerKey, *, max_pending: int = 65_536, max_batch: int = 512
    ) -> None:
        self._index = index
        self._worker = worker
        self._max_pending = max_pending
        self._max_batch = max_batch
        # No entry is in both, and a removal leaves other entries alone: so it does not matter which travels first.
        self._published: dict[BlockHash, PrefixEntry] = {}
        self._evicted: dict[PrefixEntry, PrefixEntry] = {}
        self._flushing: asyncio.Task[None] | None = None
        self._is_closed = False
        self._num_dropped = 0

    def offer(self, changes: PrefixChanges) -> None:
        """Takes the changes of one step; a task sends them, together with what is offered meanwhile."""
        if self._is_closed:
            return
        for entry in changes.published:
            self._note_published(entry)
        for entry in changes.evicted:
            self._note_evicted(entry)
        if self._num_pending and (self._flushing is None or self._flushing.done()):
            self._flushing = asyncio.create_task(self._flush())

    async def aclose(self, *, timeout_s: float = 1.0) -> None:
        """Sends what is pending unless that takes longer than `timeout_s`; later offers go nowhere."""
        self._is_closed = True
        if self._flushing is not None:
            await asyncio.wait({self._flushing}, timeout=timeout_s)
            self._flushing.cancel()

    def stats(self) -> PublisherStats:
        """What waits, and what was lost for want of room."""
        return PublisherStats(self._num_pending, self._num_dropped)

    @property
    def _num_pending(self) -> int:
        return len(self._published) + len(self._evicted)

    def _note_published(self, entry: PrefixEntry) -> None:
        self._evicted.pop(entry, None)
        if self._has_room():
            self._published[entry.block_hash] = entry

    def _note_evicted(self, entry: PrefixEntry) -> None:
        if self._published.get(entry.block_hash) == entry:
            del self._published[entry.block_hash]
        if self._has_room():
            self._evicted[entry] = entry

    def _has_room(self) -> bool:
        has_room = self._num_pending < self._max_pending
        self._num_dropped += not has_room
        return has_room

    async def _flush(self) -> None:
        while self._num_pending:
            await self._index.publish(self._worker, _take(self._published, self._max_batch))
            await self._index.remove(self._worker, _take(self._evicted, self._max_batch))


def _take(changes: dict[K, PrefixEntry], max_entries: int) -> list[PrefixEntry]:
    """The oldest changes, which are no longer pending then."""
    return [changes.pop(next(iter(changes))) for _ in range(min(max_entries, len(changes)))]
