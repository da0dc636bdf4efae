"""The engine's changes reach the table, without the engine ever waiting for it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.block_hash import BlockHash
from paceline.core.prefix import PrefixChanges, PrefixEntry, WorkerKey
from paceline.prefix_index.index import Renewal
from paceline.prefix_index.memory_index import MemoryPrefixIndex
from paceline.prefix_index.publisher import PrefixPublisher
from tests.prefix_index.blocks import ANNE, chain, entries
from tests.virtual_time import in_virtual_time


class GatedIndex(MemoryPrefixIndex):
    """A table whose calls wait at a gate, and are written down."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.batch_sizes: list[int] = []

    async def publish(self, worker: WorkerKey, entries: Sequence[PrefixEntry]) -> bool:
        """Waits, then publishes."""
        await self.gate.wait()
        self.batch_sizes.append(len(entries))
        return await super().publish(worker, entries)


async def test_what_is_offered_is_published() -> None:
    """Published blocks are found, and evicted ones are not, once the publisher has closed."""
    index = MemoryPrefixIndex()
    publisher = PrefixPublisher(index, ANNE)
    hashes = chain(1, 4)
    publisher.offer(PrefixChanges(published=tuple(entries(hashes))))
    publisher.offer(PrefixChanges(evicted=tuple(entries(hashes)[3:])))
    await publisher.aclose()
    assert await index.lookup(hashes) == {ANNE: 3}


async def test_offers_during_a_flush_travel_together() -> None:
    """While one batch is on its way the next ones gather into one."""
    index = GatedIndex()
    publisher = PrefixPublisher(index, ANNE)
    for entry in entries(chain(1, 10)):
        publisher.offer(PrefixChanges(published=(entry,)))
        await asyncio.sleep(0)
    index.gate.set()
    await publisher.aclose()
    assert index.batch_sizes == [1, 9]


async def test_a_batch_is_bounded() -> None:
    """A step with very many changes goes in several calls, each within the table's time budget."""
    index = GatedIndex()
    index.gate.set()
    publisher = PrefixPublisher(index, ANNE, max_batch=4)
    publisher.offer(PrefixChanges(published=tuple(entries(chain(1, 10)))))
    await publisher.aclose()
    assert index.batch_sizes == [4, 4, 2]


async def test_what_waits_is_bounded() -> None:
    """Removals that a table does not take cost a bounded amount of memory; what finds no room is counted."""
    publisher = PrefixPublisher(GatedIndex(), ANNE, max_pending=5)
    publisher.offer(PrefixChanges(published=tuple(entries(chain(1, 8)))))
    publisher.offer(PrefixChanges(evicted=tuple(entries(chain(1, 8)))))
    assert (publisher.stats().num_pending, publisher.stats().num_dropped) == (5, 3)
    await publisher.aclose(timeout_s=0)


async def test_closing_does_not_wait_for_a_table_that_hangs() -> None:
    """A worker that shuts down gives the table a moment, and leaves no task behind."""
    publisher = PrefixPublisher(GatedIndex(), ANNE)
    publisher.offer(PrefixChanges(published=tuple(entries(chain(1, 2)))))
    await publisher.aclose(timeout_s=0.01)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_after_closing_offers_go_nowhere() -> None:
    """A publisher that has closed starts no new task."""
    index = MemoryPrefixIndex()
    publisher = PrefixPublisher(index, ANNE)
    await publisher.aclose()
    publisher.offer(PrefixChanges(published=tuple(entries(chain(1, 2)))))
    assert publisher.stats().num_pending == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


class MoodyIndex(MemoryPrefixIndex):
    """A table that can be away, can be emptied, and says what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.heard: list[int] = []
        self._known: set[WorkerKey] = set()

    async def publish(self, worker: WorkerKey, entries: Sequence[PrefixEntry]) -> bool:
        """Unless it is away."""
        await asyncio.sleep(0)
        if self.is_away:
            return False
        self.heard.append(len(entries))
        return await super().publish(worker, entries)

    async def remove(self, worker: WorkerKey, entries: Sequence[PrefixEntry]) -> bool:
        """Unless it is away."""
        await asyncio.sleep(0)
        return not self.is_away and await super().remove(worker, entries)

    async def renew(self, worker: WorkerKey) -> Renewal:
        """Whether it knew the worker."""
        if self.is_away:
            return "failed"
        known: Renewal = "known" if worker in self._known else "forgotten"
        self._known.add(worker)
        return known

    def flush(self) -> None:
        """Empty, as after FLUSHALL or a restart."""
        self._holders.clear()
        self._known.clear()


@asynccontextmanager
async def refreshing(index: MoodyIndex, **options: Any) -> AsyncIterator[PrefixPublisher]:
    """A publisher that is at work."""
    publisher = PrefixPublisher(index, ANNE, **options)
    refresh = asyncio.create_task(publisher.refresh_forever())
    yield publisher
    refresh.cancel()
    await publisher.aclose()


@in_virtual_time
async def test_what_was_published_while_the_table_was_away_is_published_when_it_is_back() -> None:
    """Blocks gained and lost during an outage are told within two seconds after it."""
    index = MoodyIndex()
    async with refreshing(index) as publisher:
        old, new = chain(1, 4), chain(2, 4)
        publisher.offer(PrefixChanges(published=tuple(entries(old))))
        await asyncio.sleep(1)
        index.is_away = True
        publisher.offer(PrefixChanges(published=tuple(entries(new)), evicted=tuple(entries(old)[2:])))
        await asyncio.sleep(100)
        assert publisher.stats().num_pending == 6
        index.is_away = False
        await asyncio.sleep(2)
        assert publisher.stats().num_pending == 0
        assert await index.lookup(old) == {ANNE: 2}
        assert await index.lookup(new) == {ANNE: 4}


@in_virtual_time
async def test_a_table_that_forgot_is_told_everything_again() -> None:
    """After a flush all that the cache holds is published again, at a bounded pace; what was evicted is not."""
    index, hashes = MoodyIndex(), chain(1, 100)
    async with refreshing(index, max_refreshes=10) as publisher:
        publisher.offer(PrefixChanges(published=tuple(entries(hashes))))
        await asyncio.sleep(1)
        publisher.offer(PrefixChanges(evicted=tuple(entries(hashes)[90:])))
        await asyncio.sleep(1)
        index.flush()
        index.heard.clear()
        await asyncio.sleep(20)
        assert await index.lookup(hashes) == {ANNE: 90}
        assert index.heard[:9] == [10] * 9
        assert publisher.stats().num_refreshed >= 90


@in_virtual_time
async def test_every_block_is_published_again_before_its_entry_ends() -> None:
    """Within the refresh time every block is published once more, evenly, and nothing is published for nothing."""
    index = MoodyIndex()
    async with refreshing(index, refresh_s=100.0) as publisher:
        publisher.offer(PrefixChanges(published=tuple(entries(chain(1, 1000)))))
        await asyncio.sleep(10)
        # Empty, but the table says that it still knows the worker.
        index._holders.clear()
        index.heard.clear()
        await asyncio.sleep(101)
        assert await index.lookup(chain(1, 1000)) == {ANNE: 1000}
        assert max(index.heard) == 10
        assert 1000 <= sum(index.heard) <= 1020


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 1), st.sampled_from(["ok", "away", "flush"])), max_size=20
    ),
    st.integers(1, 3),
)
@settings(max_examples=200)
@in_virtual_time
async def test_whatever_happens_to_the_table_it_ends_with_what_the_worker_holds(
    steps: list[tuple[int, int, str]], max_batch: int
) -> None:
    """Through outages and flushes at any moment, a table that is well for a while has each held block, and no other."""
    index, held = MoodyIndex(), dict[BlockHash, PrefixEntry]()
    async with refreshing(index, max_batch=max_batch) as publisher:
        for block, turns, mood in steps:
            index.is_away = mood == "away"
            if mood == "flush":
                index.flush()
            (entry,) = _entry(chain(block, 1), len(held) + 10 * turns)
            gone = held.pop(entry.block_hash, None)
            if gone is None:
                held[entry.block_hash] = entry
            publisher.offer(PrefixChanges(evicted=(gone,)) if gone else PrefixChanges(published=(entry,)))
            await asyncio.sleep(0.6 * turns)
        index.is_away = False
        await asyncio.sleep(10)
        assert publisher.stats().num_pending == 0
        assert publisher.stats().num_held == len(held)
        for block in range(4):
            (block_hash,) = chain(block, 1)
            assert await index.lookup([block_hash]) == ({ANNE: 1} if block_hash in held else {})


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=8), st.integers(1, 2))
@settings(max_examples=300)
@in_virtual_time
async def test_coalescing_ends_with_what_the_worker_holds(
    steps: list[tuple[int, bool]], max_batch: int
) -> None:
    """Wherever the flushes fall, in the end the table has each block that was not evicted, and no other."""
    index = MemoryPrefixIndex()
    publisher = PrefixPublisher(index, ANNE, max_batch=max_batch)
    hashes = chain(1, 1)
    held: tuple[PrefixEntry, ...] = ()
    for block_id, with_pause in steps:
        changes = PrefixChanges(evicted=held) if held else PrefixChanges(_entry(hashes, block_id))
        held = changes.published
        publisher.offer(changes)
        if with_pause:
            await asyncio.sleep(0)
    await publisher.aclose()
    assert await index.lookup(hashes) == ({ANNE: 1} if held else {})
    # What is held can be removed, so it is there under its own block id.
    await index.remove(ANNE, held)
    assert await index.lookup(hashes) == {}


def _entry(hashes: Sequence[BlockHash], block_id: int) -> tuple[PrefixEntry, ...]:
    return tuple(entries(hashes, first_block=block_id))
