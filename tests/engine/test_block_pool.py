"""The block pool: what is held, what is free, and what free blocks still carry."""

import pytest

from paceline.core.block_hash import BlockHash, chain_root, hash_full_blocks
from paceline.core.kv_layout import BlockId
from paceline.engine.block_pool import BlockPool
from paceline.engine.cached_block import CachedBlock

ROOT = chain_root(b"model", "")
TOKENS = tuple(range(100, 112))  # three blocks of 4


def _publish_chain(
    pool: BlockPool, block_ids: list[BlockId], tokens: tuple[int, ...] = TOKENS, root: BlockHash = ROOT
) -> list[CachedBlock]:
    """Publishes blocks that hold the full blocks of `tokens`."""
    published: list[CachedBlock] = []
    for ordinal, block_hash in enumerate(hash_full_blocks(root, tokens, pool.block_size)[: len(block_ids)]):
        start = ordinal * pool.block_size
        cached = pool.publish(
            block_ids[ordinal],
            block_hash,
            root,
            published[-1] if published else None,
            tokens[start : start + pool.block_size],
            checksum=ordinal,
        )
        assert cached is not None
        published.append(cached)
    return published


def _lookup(pool: BlockPool, tokens: tuple[int, ...] = TOKENS, root: BlockHash = ROOT) -> list[CachedBlock]:
    return pool.lookup(root, hash_full_blocks(root, tokens, pool.block_size), tokens)


def test_blocks_are_taken_and_given_back() -> None:
    """Allocated blocks are distinct and not free; after release all are free again."""
    pool = BlockPool(4, 4)
    taken = pool.allocate(3)
    assert len(set(taken)) == 3
    assert pool.num_available == 1
    pool.check_invariants([taken])
    pool.release(taken)
    assert pool.num_available == 4
    pool.check_invariants([])


def test_a_block_is_not_released_twice() -> None:
    """Giving back what is not held is a bug, and it is not let through."""
    pool = BlockPool(2, 4)
    taken = pool.allocate(1)
    pool.release(taken)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(taken)


def test_there_is_no_allocation_without_room() -> None:
    """Asking for more than is free is a bug of the caller; asking for exactly that works."""
    pool = BlockPool(2, 4)
    with pytest.raises(AssertionError, match="without room"):
        pool.allocate(3)
    assert len(pool.allocate(2)) == 2


def test_a_published_prefix_is_found_up_to_the_first_difference() -> None:
    """The same tokens hit in full; a prompt that differs in its second block hits one block; another none."""
    pool = BlockPool(8, 4)
    published = _publish_chain(pool, pool.allocate(3))
    assert _lookup(pool) == published
    assert _lookup(pool, (*TOKENS[:7], 0, *TOKENS[8:])) == published[:1]
    assert _lookup(pool, (0, *TOKENS[1:])) == []


def test_what_was_not_published_is_not_found() -> None:
    """A block that is held, even with the right tokens in it, is no hit before it is published."""
    pool = BlockPool(8, 4)
    block_ids = pool.allocate(3)
    assert _lookup(pool) == []
    _publish_chain(pool, block_ids[:1])
    assert [block.block_id for block in _lookup(pool)] == block_ids[:1]


def test_another_root_finds_nothing() -> None:
    """The same tokens under another scope miss; under the same scope they hit."""
    pool = BlockPool(8, 4)
    _publish_chain(pool, pool.allocate(3))
    assert _lookup(pool, root=chain_root(b"model", "other")) == []
    assert len(_lookup(pool)) == 3


def test_a_released_block_stays_cached_until_its_memory_is_needed() -> None:
    """Free cached blocks hit, and are taken only after every block that carries nothing."""
    pool = BlockPool(4, 4)
    block_ids = pool.allocate(2)
    _publish_chain(pool, block_ids)
    pool.release(block_ids)
    others = pool.allocate(2)
    assert not set(others) & set(block_ids)
    assert len(_lookup(pool)) == 2
    pool.allocate(1)
    assert len(_lookup(pool)) == 1
    assert pool.stats().num_evictions == 1


def test_a_block_that_carries_nothing_is_reused_first() -> None:
    """Released after a cached one, it is taken before it all the same: there is nothing in it to lose."""
    pool = BlockPool(2, 4)
    cached, empty = pool.allocate(1), pool.allocate(1)
    _publish_chain(pool, cached, TOKENS[:4])
    pool.release(cached)
    pool.release(empty)
    assert pool.allocate(1) == empty
    assert len(_lookup(pool)) == 1


def test_prefixes_outlive_their_tails() -> None:
    """Of one released chain the last block is evicted first, so that what is left can still be found."""
    pool = BlockPool(3, 4)
    block_ids = pool.allocate(3)
    published = _publish_chain(pool, block_ids)
    pool.release(block_ids)
    for num_left in (2, 1, 0):
        pool.allocate(1)
        assert _lookup(pool) == published[:num_left]


def test_the_prefix_released_longest_ago_is_evicted_first() -> None:
    """Least recently used goes first, where a hit counts as use."""
    pool = BlockPool(3, 4)
    prompts = [(n,) * 4 for n in range(3)]
    chains = [_publish_chain(pool, pool.allocate(1), prompt)[0] for prompt in prompts]
    for chain in chains:
        pool.release([chain.held_id])
    pool.release(pool.acquire(_lookup(pool, prompts[0])))
    pool.allocate(2)
    assert [bool(_lookup(pool, prompt)) for prompt in prompts] == [True, False, False]


def test_a_held_block_is_never_evicted() -> None:
    """A hit keeps its block and its content while others take everything else."""
    pool = BlockPool(4, 4)
    block_ids = pool.allocate(3)
    published = _publish_chain(pool, block_ids)
    pool.release(block_ids)
    held = pool.acquire(published[:1])
    taken = pool.allocate(pool.num_available)
    assert not set(taken) & set(held)
    assert _lookup(pool) == published[:1]
    pool.check_invariants([held, taken])


def test_a_shared_block_is_free_only_after_its_last_holder() -> None:
    """Two holders are two references."""
    pool = BlockPool(1, 4)
    block_ids = pool.allocate(1)
    again = pool.acquire(_publish_chain(pool, block_ids))
    assert again == block_ids
    pool.release(block_ids)
    assert pool.num_available == 0
    pool.release(again)
    assert pool.num_available == 1


def test_room_is_foretold_exactly() -> None:
    """`num_available_after` counts the hits that are free now, and no others."""
    pool = BlockPool(6, 4)
    block_ids = pool.allocate(3)
    published = _publish_chain(pool, block_ids)
    pool.release(block_ids[1:])
    foretold = pool.num_available_after(published)
    pool.acquire(published)
    assert foretold == pool.num_available == 3


def test_the_first_publisher_of_a_prefix_keeps_it() -> None:
    """Two copies of one block are no collision: the second publisher gets the first one's entry."""
    pool = BlockPool(4, 4)
    first = _publish_chain(pool, pool.allocate(2), TOKENS[:8])
    second = _publish_chain(pool, pool.allocate(2), TOKENS[:8])
    assert second == first
    assert pool.stats().num_collisions == 0


def test_a_colliding_hash_joins_no_two_prefixes() -> None:
    """Tokens are compared: a hash that is another's is counted, found by nobody, and published by nobody."""
    pool = BlockPool(4, 4)
    same = BlockHash(b"same")
    mine = pool.publish(pool.allocate(1)[0], same, ROOT, None, (1, 2, 3, 4), 0)
    assert pool.lookup(ROOT, [same], (1, 2, 3, 4)) == [mine]
    assert pool.lookup(ROOT, [same], (5, 6, 7, 8)) == []
    assert pool.publish(pool.allocate(1)[0], same, ROOT, None, (5, 6, 7, 8), 0) is None
    assert pool.stats().num_collisions == 2


def test_the_same_tokens_after_another_prefix_are_another_block() -> None:
    """With a hash that knows no parent, the chain itself still tells two places apart."""
    pool = BlockPool(8, 4)
    hashes = [BlockHash(b"a"), BlockHash(b"b")]
    parents = [
        pool.publish(pool.allocate(1)[0], block_hash, ROOT, None, (n,) * 4, 0)
        for n, block_hash in enumerate(hashes)
    ]
    child = pool.publish(pool.allocate(1)[0], BlockHash(b"c"), ROOT, parents[0], (9,) * 4, 0)
    assert pool.lookup(ROOT, [hashes[0], BlockHash(b"c")], (0,) * 4 + (9,) * 4) == [parents[0], child]
    assert pool.lookup(ROOT, [hashes[1], BlockHash(b"c")], (1,) * 4 + (9,) * 4) == [parents[1]]


def _orphan(pool: BlockPool) -> None:
    """Leaves the second block of TOKENS cached and held while the first one is evicted.

    So it comes about: two sequences compute one prompt; one publishes the first block, the other the second, and only
    the other is still there when memory runs out.
    """
    first, other = pool.allocate(1), pool.allocate(2)
    parents = _publish_chain(pool, first, TOKENS[:4])
    _publish_chain(pool, other, TOKENS[:8])
    pool.release(first)
    taken = pool.allocate(pool.num_available)
    assert parents[0].block_id in taken
    pool.release(taken)


def test_a_block_whose_prefix_was_evicted_is_no_collision() -> None:
    """When the prefix comes back it meets its old continuation: that is a miss, and takes its place again."""
    pool = BlockPool(8, 4)
    _orphan(pool)
    block_ids = pool.allocate(3)
    published = _publish_chain(pool, block_ids)
    assert [block.block_id for block in published] == block_ids
    assert _lookup(pool) == published
    assert pool.stats().num_collisions == 0


def test_a_lookup_past_an_evicted_prefix_is_a_miss() -> None:
    """A continuation without its prefix is not found, and not counted as a collision either."""
    pool = BlockPool(8, 4)
    _orphan(pool)
    assert _lookup(pool) == []
    again = _publish_chain(pool, pool.allocate(1), TOKENS[:4])
    assert _lookup(pool) == again
    assert pool.stats().num_collisions == 0


def test_nothing_is_published_behind_an_evicted_prefix() -> None:
    """A block that nobody could find takes no place in the table and is not announced."""
    pool = BlockPool(4, 4)
    block_ids = pool.allocate(1)
    parent = _publish_chain(pool, block_ids, TOKENS[:4])[0]
    pool.release(block_ids)
    taken = pool.allocate(4)
    pool.take_changes()
    hashes = hash_full_blocks(ROOT, TOKENS, 4)
    assert pool.publish(taken[0], hashes[1], ROOT, parent, TOKENS[4:8], 0) is None
    assert pool.take_changes().published == ()
    assert pool.stats().num_collisions == 0


def test_changes_are_told_once_and_only_the_last_of_each() -> None:
    """Published and evicted entries come with the next call; what came and went in between is told as gone."""
    pool = BlockPool(2, 4)
    block_ids = pool.allocate(2)
    published = _publish_chain(pool, block_ids)
    changes = pool.take_changes()
    assert changes.published == tuple(block.entry() for block in published)
    assert changes.evicted == ()
    pool.release(block_ids)
    pool.release(pool.allocate(2))
    assert set(pool.take_changes().evicted) == {block.entry() for block in published}
    assert pool.take_changes() == ((), ())


def test_a_block_that_comes_back_is_told_as_published() -> None:
    """Evicted and published again under the same id within one step: it is there."""
    pool = BlockPool(1, 4)
    block_ids = pool.allocate(1)
    entry = _publish_chain(pool, block_ids)[0].entry()
    pool.take_changes()
    pool.release(block_ids)
    assert _publish_chain(pool, pool.allocate(1))[0].entry() == entry
    assert pool.take_changes() == ((entry,), ())


def test_every_entry_names_the_first_block_of_its_chain() -> None:
    """The head's hash is what the prefix table groups by."""
    pool = BlockPool(4, 4)
    published = _publish_chain(pool, pool.allocate(3))
    assert {block.entry().head_hash for block in published} == {published[0].block_hash}


def test_stats_are_a_picture_of_now() -> None:
    """Free, cached, hits and evictions are counted as they happen."""
    pool = BlockPool(4, 4)
    block_ids = pool.allocate(3)
    pool.acquire(_publish_chain(pool, block_ids))
    stats = pool.stats()
    assert (stats.num_blocks, stats.num_free, stats.num_cached) == (4, 1, 3)
    assert (stats.num_hits, stats.num_evictions, stats.num_collisions) == (3, 0, 0)


@pytest.mark.parametrize(
    "tables",
    [[], [[0], [0]], [[0, 1]]],
    ids=["leaked", "held-twice", "held-but-free"],
)
def test_broken_books_are_noticed(tables: list[list[int]]) -> None:
    """The check fails for a block that nobody holds, for one held too often, and for one that is free."""
    pool = BlockPool(4, 4)
    taken = pool.allocate(1)
    pool.check_invariants([taken])
    with pytest.raises(AssertionError):
        pool.check_invariants([[BlockId(block_id) for block_id in table] for table in tables])
