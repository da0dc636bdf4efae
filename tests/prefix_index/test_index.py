"""What every prefix table promises, in Redis and in memory alike."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.block_hash import BlockHash
from paceline.core.prefix import WorkerKey
from paceline.core.request import BootEpoch, WorkerId
from paceline.prefix_index.index import PrefixIndex
from paceline.prefix_index.matching import leading_blocks
from paceline.prefix_index.memory_index import MemoryPrefixIndex
from tests.prefix_index.blocks import ANNE, ANNE_REBORN, BERT, chain, entries


@pytest.fixture(params=["memory", "redis"])
def index(request: pytest.FixtureRequest) -> PrefixIndex:
    """Every table; a test that takes it is a promise that each of them keeps."""
    if request.param == "memory":
        return MemoryPrefixIndex()
    redis_index: PrefixIndex = request.getfixturevalue("redis_index")
    return redis_index


async def test_a_published_chain_is_found(index: PrefixIndex) -> None:
    """A look-up says how many leading blocks each worker holds, and leaves out who holds none."""
    hashes = chain(1, 4)
    await index.publish(ANNE, entries(hashes))
    await index.publish(BERT, entries(hashes[:2]))
    assert await index.lookup(hashes) == {ANNE: 4, BERT: 2}
    assert await index.lookup(hashes[:1]) == {ANNE: 1, BERT: 1}
    assert await index.lookup(chain(2, 4)) == {}
    assert await index.lookup([]) == {}


async def test_two_prompts_share_what_they_have_in_common(index: PrefixIndex) -> None:
    """A longer prompt finds the blocks of a shorter one that it begins with."""
    hashes = chain(1, 6)
    await index.publish(ANNE, entries(hashes[:3]))
    assert await index.lookup(hashes) == {ANNE: 3}


async def test_blocks_count_only_up_to_the_first_gap(index: PrefixIndex) -> None:
    """What comes after a block that a worker lacks is of no use."""
    hashes = chain(1, 4)
    held = entries(hashes)
    await index.publish(ANNE, [held[0], held[2], held[3]])
    await index.publish(BERT, held[1:])
    assert await index.lookup(hashes) == {ANNE: 1}


async def test_a_removed_block_is_not_found(index: PrefixIndex) -> None:
    """An evicted block ends the worker's prefix; other workers keep theirs."""
    hashes = chain(1, 3)
    for worker in (ANNE, BERT):
        await index.publish(worker, entries(hashes))
    await index.remove(ANNE, entries(hashes)[1:2])
    assert await index.lookup(hashes) == {ANNE: 1, BERT: 3}


async def test_a_late_removal_leaves_what_was_published_since(index: PrefixIndex) -> None:
    """A removal counts only for the same block in the same life of the worker."""
    hashes = chain(1, 2)
    await index.publish(ANNE, entries(hashes, first_block=10))
    await index.remove(ANNE, entries(hashes, first_block=20))
    await index.remove(ANNE_REBORN, entries(hashes, first_block=10))
    await index.remove(BERT, entries(hashes, first_block=10))
    assert await index.lookup(hashes) == {ANNE: 2}


async def test_a_restarted_worker_is_another_one(index: PrefixIndex) -> None:
    """Entries carry the boot epoch, so that those of a former life are told apart; the new life overwrites them."""
    hashes = chain(1, 3)
    await index.publish(ANNE, entries(hashes))
    await index.publish(ANNE_REBORN, entries(hashes[:1]))
    assert await index.lookup(hashes) == {ANNE_REBORN: 1}


async def test_several_chains_are_published_at_once(index: PrefixIndex) -> None:
    """One batch may hold blocks of many prompts."""
    one, two = chain(1, 2), chain(2, 3)
    batch = [*entries(one), *entries(two, first_block=10)]
    await index.publish(ANNE, batch)
    assert await index.lookup(one) == {ANNE: 2}
    assert await index.lookup(two) == {ANNE: 3}
    await index.remove(ANNE, batch)
    assert await index.lookup(one) == {}
    assert await index.lookup(two) == {}


async def test_an_empty_batch_is_harmless(index: PrefixIndex) -> None:
    """Nothing to publish or to remove costs nothing."""
    assert await index.publish(ANNE, [])
    assert await index.remove(ANNE, [])
    assert index.stats().num_failures == 0


async def test_removing_what_never_was_is_harmless(index: PrefixIndex) -> None:
    """A removal of unknown blocks changes nothing."""
    await index.remove(ANNE, entries(chain(1, 2)))
    assert await index.lookup(chain(1, 2)) == {}


async def test_a_long_prompt_is_looked_up_at_once(index: PrefixIndex) -> None:
    """Five hundred blocks are one call."""
    hashes = chain(1, 500)
    await index.publish(ANNE, entries(hashes))
    assert await index.lookup(hashes) == {ANNE: 500}


async def test_many_holders_are_told_apart(index: PrefixIndex) -> None:
    """Each of many workers is given what it holds, from one block to all of them."""
    hashes = chain(1, 40)
    workers = {WorkerKey(WorkerId(f"w{number}"), BootEpoch(number)): number for number in range(1, 41)}
    for worker, num_blocks in workers.items():
        await index.renew(worker)
        await index.publish(worker, entries(hashes[:num_blocks]))
    assert await index.lookup(hashes) == workers
    assert await index.lookup(hashes[:7]) == {worker: min(7, number) for worker, number in workers.items()}
    assert await index.lookup(hashes[:1]) == dict.fromkeys(workers, 1)


WORKERS = st.integers(0, 3).map(lambda number: WorkerKey(WorkerId(f"w{number}"), BootEpoch(number)))


@given(st.lists(st.sets(WORKERS), max_size=6))
def test_the_leading_blocks_are_those_before_the_first_gap(holders: list[set[WorkerKey]]) -> None:
    """For each worker the count is the length of its longest run from the first block."""
    expected: dict[WorkerKey, int] = {}
    for worker in set().union(*holders):
        run = next((index for index, here in enumerate(holders) if worker not in here), len(holders))
        if run:
            expected[worker] = run
    assert leading_blocks(holders) == expected


async def test_the_memory_table_forgets_what_is_removed() -> None:
    """An empty entry takes no room."""
    index = MemoryPrefixIndex()
    hashes: tuple[BlockHash, ...] = chain(1, 3)
    await index.publish(ANNE, entries(hashes))
    await index.remove(ANNE, entries(hashes))
    assert index._holders == {}
    assert index.mode == "none"
