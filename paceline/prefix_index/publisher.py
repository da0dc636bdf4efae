"""Carries what an engine's cache gains and loses to the prefix table, without ever making the engine wait."""

import asyncio
from dataclasses import dataclass

from paceline.core.block_hash import BlockHash
from paceline.core.prefix import PrefixChanges, PrefixEntry, WorkerKey
from paceline.prefix_index.index import PrefixIndex


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
        # No block is in both.
        self._published: dict[BlockHash, PrefixEntry] = {}
        self._evicted: dict[BlockHash, PrefixEntry] = {}
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
        self._evicted.pop(entry.block_hash, None)
        self._note(self._published, entry)

    def _note_evicted(self, entry: PrefixEntry) -> None:
        published = self._published.get(entry.block_hash)
        if published is not None and published.block_id != entry.block_id:
            # The hash has moved to another block, and publishing that overwrites this one.
            return
        self._published.pop(entry.block_hash, None)
        self._note(self._evicted, entry)

    def _note(self, changes: dict[BlockHash, PrefixEntry], entry: PrefixEntry) -> None:
        if self._num_pending >= self._max_pending:
            self._num_dropped += 1
        else:
            changes[entry.block_hash] = entry

    async def _flush(self) -> None:
        while self._num_pending:
            await self._index.publish(self._worker, _take(self._published, self._max_batch))
            await self._index.remove(self._worker, _take(self._evicted, self._max_batch))


def _take(changes: dict[BlockHash, PrefixEntry], max_entries: int) -> list[PrefixEntry]:
    """The oldest changes, which are no longer pending then."""
    return [changes.pop(next(iter(changes))) for _ in range(min(max_entries, len(changes)))]
