"""The engine's changes reach the table, without the engine ever waiting for it."""

import asyncio
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.block_hash import BlockHash
from paceline.core.prefix import PrefixChanges, PrefixEntry, WorkerKey
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

    async def publish(self, worker: WorkerKey, entries: Sequence[PrefixEntry]) -> None:
        """Waits, then publishes."""
        await self.gate.wait()
        self.batch_sizes.append(len(entries))
        await super().publish(worker, entries)


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
    """A table that hangs costs a bounded amount of memory; what finds no room is counted."""
    index = GatedIndex()
    publisher = PrefixPublisher(index, ANNE, max_pending=5)
    publisher.offer(PrefixChanges(published=tuple(entries(chain(1, 8)))))
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
