"""Owns the KV blocks of one worker: which are held, which are free, and which still carry a cached prefix.

It knows block ids, hashes and tokens; the memory itself is the KV cache's.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.core.block_hash import BlockHash
from paceline.core.kv_layout import BlockId
from paceline.core.prefix import PrefixChanges, PrefixEntry


@dataclass(frozen=True, slots=True, eq=False)
class CachedBlock:
    """A full block in the prefix cache.

    `parent` is the very block that it follows, not its hash: a hit is a hit only along the chain of the objects that
    matched, so a colliding hash can never join two prefixes.
    """

    block_id: BlockId
    block_hash: BlockHash
    root: BlockHash
    parent: "CachedBlock | None"
    token_ids: tuple[int, ...]
    head_hash: BlockHash
    checksum: int

    def entry(self) -> PrefixEntry:
        """What the prefix table says about it."""
        return PrefixEntry(self.block_hash, self.head_hash, self.block_id)


@dataclass(frozen=True, slots=True)
class BlockPoolStats:
    """A picture of the pool."""

    num_blocks: int
    num_free: int
    num_cached: int
    num_hits: int
    num_evictions: int
    num_collisions: int


class BlockPool:
    """Every block is either held (reference count above 0) or free; a free one may still be cached.

    Free blocks are taken in the order of their release, those without cached content first:

        free   [ never cached ... | cached, oldest release ............... newest release ]
                 allocate() takes from here ->
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_refs = [0] * num_blocks
        self._free: OrderedDict[BlockId, None] = OrderedDict((BlockId(i), None) for i in range(num_blocks))
        self._by_hash: dict[BlockHash, CachedBlock] = {}
        self._by_block: dict[BlockId, CachedBlock] = {}
        # Whether each entry that changed is in the cache now; the last change counts.
        self._changed: dict[PrefixEntry, bool] = {}
        self._num_hits = self._num_evictions = self._num_collisions = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def lookup(
        self, root: BlockHash, hashes: Sequence[BlockHash], token_ids: Sequence[int]
    ) -> list[CachedBlock]:
        """The longest cached prefix of `token_ids`, whose full blocks have `hashes`. Takes no reference."""
        found: list[CachedBlock] = []
        for ordinal, block_hash in enumerate(hashes):
            cached = self._by_hash.get(block_hash)
            if cached is None:
                break
            start = ordinal * self.block_size
            parent = found[-1] if found else None
            if not _same(cached, root, parent, token_ids[start : start + self.block_size]):
                self._num_collisions += not self._is_stray(cached)
                break
            found.append(cached)
        return found

    def num_free_after(self, cached: Sequence[CachedBlock]) -> int:
        """How many blocks would be free if `cached` were acquired."""
        return len(self._free) - sum(self._num_refs[block.block_id] == 0 for block in cached)

    def acquire(self, cached: Sequence[CachedBlock]) -> list[BlockId]:
        """Takes a reference on each cached block."""
        for block in cached:
            if self._num_refs[block.block_id] == 0:
                del self._free[block.block_id]
            self._num_refs[block.block_id] += 1
        self._num_hits += len(cached)
        return [block.block_id for block in cached]

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Takes free blocks, evicting what they cached. The caller has checked `num_free`."""
        assert num_blocks <= len(self._free), "allocate() without room"
        return [self._take_free() for _ in range(num_blocks)]

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Gives references back. The last block of a chain is freed first, so that prefixes outlive their tails."""
        for block_id in reversed(block_ids):
            assert self._num_refs[block_id] > 0, f"block {block_id} is released more often than it was taken"
            self._num_refs[block_id] -= 1
            if self._num_refs[block_id] == 0:
                self._free[block_id] = None
                # Without cached content there is nothing to lose: reuse it first.
                self._free.move_to_end(block_id, last=block_id in self._by_block)

    def publish(
        self,
        block_id: BlockId,
        block_hash: BlockHash,
        root: BlockHash,
        parent: CachedBlock | None,
        token_ids: Sequence[int],
        checksum: int,
    ) -> CachedBlock | None:
        """Makes a computed, full block findable.

        Returns the cached block with this content, which is another one if it was there first. None on a hash collision
        or when the parent has been evicted, after which nothing that follows this block may be published either.
        """
        if parent is not None and not self._is_cached(parent):
            return None
        present = self._by_hash.get(block_hash)
        if present is not None:
            if _same(present, root, parent, token_ids):
                return present
            if not self._is_stray(present):
                self._num_collisions += 1
                return None
            self._forget(present)
        head_hash = parent.head_hash if parent else block_hash
        cached = CachedBlock(block_id, block_hash, root, parent, tuple(token_ids), head_hash, checksum)
        self._by_hash[block_hash] = self._by_block[block_id] = cached
        self._changed[cached.entry()] = True
        return cached

    def take_changes(self) -> PrefixChanges:
        """What the cache gained and lost since the last call."""
        changed, self._changed = self._changed, {}
        published = tuple(entry for entry, is_cached in changed.items() if is_cached)
        evicted = tuple(entry for entry, is_cached in changed.items() if not is_cached)
        return PrefixChanges(published, evicted)

    def stats(self) -> BlockPoolStats:
        """A picture of now."""
        return BlockPoolStats(
            num_blocks=self.num_blocks,
            num_free=len(self._free),
            num_cached=len(self._by_block),
            num_hits=self._num_hits,
            num_evictions=self._num_evictions,
            num_collisions=self._num_collisions,
        )

    def check_invariants(self, block_tables: Iterable[Sequence[BlockId]]) -> None:
        """Every block is free, or has exactly as many references as block tables hold it."""
        held = Counter(block_id for table in block_tables for block_id in table)
        for block_id, num_refs in enumerate(self._num_refs):
            assert num_refs == held[BlockId(block_id)], f"block {block_id}: {num_refs} references, not {held}"
            assert (num_refs == 0) == (BlockId(block_id) in self._free), f"block {block_id} is free and held"
        assert len(self._by_hash) == len(self._by_block)
        assert all(self._is_cached(cached) for cached in self._by_block.values())

    def _is_cached(self, cached: CachedBlock) -> bool:
        return self._by_hash.get(cached.block_hash) is cached

    def _is_stray(self, cached: CachedBlock) -> bool:
        """Whether nobody can find it any more, since the block that it follows was evicted before it.

        That happens when two sequences computed one prompt, and the one that published the beginning left first.
        """
        return cached.parent is not None and not self._is_cached(cached.parent)

    def _forget(self, cached: CachedBlock) -> None:
        del self._by_hash[cached.block_hash], self._by_block[cached.block_id]
        self._changed[cached.entry()] = False

    def _take_free(self) -> BlockId:
        block_id, _ = self._free.popitem(last=False)
        cached = self._by_block.get(block_id)
        if cached is not None:
            self._forget(cached)
            self._num_evictions += 1
        self._num_refs[block_id] = 1
        return block_id


def _same(cached: CachedBlock, root: BlockHash, parent: CachedBlock | None, token_ids: Sequence[int]) -> bool:
    return cached.root == root and cached.parent is parent and cached.token_ids == tuple(token_ids)
