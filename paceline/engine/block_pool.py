"""Owns the KV blocks of one worker: which are held, which are free, and which still carry a cached prefix.

It knows block ids, hashes and tokens; the memory itself is the KV cache's.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, KeysView, Sequence
from dataclasses import dataclass

from paceline.core.block_hash import BlockHash, group_hash
from paceline.core.kv_layout import BlockId, KVGroup
from paceline.core.prefix import PrefixChanges
from paceline.engine.cached_block import CachedBlock, is_same, is_same_by_tokens


@dataclass(frozen=True, slots=True)
class BlockPoolStats:
    """A picture of the pool. `num_hits` counts blocks of the first KV group."""

    num_blocks: int
    num_free: int
    num_pledged: int
    num_cached: int
    num_hits: int
    num_evictions: int
    num_collisions: int


class BlockPool:
    """Every block is either held (reference count above 0) or free; a free one may still be cached.

    Free blocks are taken in the order of their release, those without cached content first:

        free   [ never cached ... | cached, oldest release ............... newest release ]
                 allocate() takes from here ->

    A table of a KV group with a window lets go of blocks in front and takes others behind, all its life. So that there
    is one whenever it needs one, room is pledged to it: as many blocks as it ever holds at once. What is pledged is
    not available to others, whether it is held now or not.

        all blocks   [ held by groups without a window | pledged to tables with one | available ]
    """

    def __init__(self, num_blocks: int, block_size: int, groups: Sequence[KVGroup] = (KVGroup(),)) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = tuple(groups)
        self._is_windowed = [group.is_windowed for group in self.groups]
        # A sequence has one table, all of which every later token sees: there is one KV group, without a window.
        self.is_whole = self._is_windowed == [False]
        self._num_refs = [0] * num_blocks
        self._free: OrderedDict[BlockId, None] = OrderedDict((BlockId(i), None) for i in range(num_blocks))
        # Held blocks of groups with a window, and how many blocks are pledged to those groups.
        self._windowed: set[BlockId] = set()
        self._num_pledged = 0
        self._by_hash: dict[BlockHash, CachedBlock] = {}
        self._by_block: dict[BlockId, CachedBlock] = {}
        # Whether each block that changed is in the cache now, in the order in which they came.
        self._changed: dict[CachedBlock, bool] = {}
        self._num_hits = self._num_evictions = self._num_collisions = 0

    @property
    def num_available(self) -> int:
        """Blocks that nobody holds and that are pledged to nobody."""
        num_held_whole = self.num_blocks - len(self._free) - len(self._windowed)
        return self.num_blocks - num_held_whole - self._num_pledged

    def pledge(self, num_blocks: int) -> None:
        """Sets room aside for tables of groups with a window, or gives it back. The caller has checked the room."""
        assert 0 <= num_blocks <= self.num_available or -self._num_pledged <= num_blocks < 0
        self._num_pledged += num_blocks

    def lookup(
        self, root: BlockHash, hashes: Sequence[BlockHash], token_ids: Sequence[int], group: int = 0
    ) -> list[CachedBlock]:
        """The longest cached prefix of `token_ids` in a group without a window. Takes no reference.

        `hashes` are those of the full blocks.
        """
        found: list[CachedBlock] = []
        for ordinal, block_hash in enumerate(hashes):
            cached = self._by_hash.get(group_hash(block_hash, group))
            if cached is None:
                break
            parent = found[-1] if found else None
            if not is_same(cached, root, parent, self._tokens_of(token_ids, ordinal)):
                self._num_collisions += not self._is_stray(cached)
                break
            found.append(cached)
        return found

    def find(
        self,
        root: BlockHash,
        block_hash: BlockHash,
        token_ids: Sequence[int],
        ordinal: int,
        group: int,
        child: CachedBlock | None,
    ) -> CachedBlock | None:
        """The block at `ordinal` of `token_ids` in a group with a window, whether or not those before it are here.

        `child` is what was found at the next ordinal, if anything was.
        """
        cached = self._by_hash.get(group_hash(block_hash, group))
        if cached is None or (child is not None and child.parent is cached):
            return cached
        each: CachedBlock | None = cached
        for position in range(ordinal, -1, -1):
            if each is None or each.root != root or each.token_ids != self._tokens_of(token_ids, position):
                self._num_collisions += 1
                return None
            each = each.parent
        return cached

    def num_available_after(self, cached: Sequence[CachedBlock]) -> int:
        """How many blocks would be available if `cached`, of groups without a window, were acquired."""
        return self.num_available - sum(
            self._num_refs[block.held_id] == 0 for block in cached if not self._is_windowed[block.group]
        )

    def num_exclusive(self, block_ids: Iterable[BlockId]) -> int:
        """How many of some held blocks have one holder only."""
        return [self._num_refs[block_id] for block_id in block_ids].count(1)

    def num_freed(self, block_ids: Iterable[BlockId]) -> int:
        """How many come free when so many references are given up, several of one block among them."""
        return sum(self._num_refs[block_id] == number for block_id, number in Counter(block_ids).items())

    @property
    def names(self) -> KeysView[BlockHash]:
        """Hashes under which blocks are cached, those of the first group as they are; a block may be another's of the same hash."""
        return self._by_hash.keys()

    def acquire(self, cached: Sequence[CachedBlock]) -> list[BlockId]:
        """Takes a reference on each cached block."""
        for block in cached:
            block_id = block.held_id
            if self._num_refs[block_id] == 0:
                del self._free[block_id]
                self._note_held(block_id, block.group)
            self._num_refs[block_id] += 1
            self._num_hits += block.group == 0
        return [block.held_id for block in cached]

    def share(self, block_ids: Sequence[BlockId]) -> None:
        """Takes one more reference on each of some held blocks."""
        for block_id in block_ids:
            assert self._num_refs[block_id] > 0, "only a held block can be shared"
            self._num_refs[block_id] += 1

    def allocate(self, num_blocks: int, group: int = 0) -> list[BlockId]:
        """Takes free blocks, evicting what they cached. The caller has checked that there is room."""
        assert num_blocks <= len(self._free), "allocate() without room"
        block_ids = [self._take_free()] if num_blocks == 1 else [self._take_free() for _ in range(num_blocks)]
        if self._is_windowed[group]:
            self._windowed.update(block_ids)
        return block_ids

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Gives references back. The last block of a chain is freed first, so that prefixes outlive their tails."""
        for block_id in reversed(block_ids):
            assert self._num_refs[block_id] > 0, f"block {block_id} is released more often than it was taken"
            self._num_refs[block_id] -= 1
            if self._num_refs[block_id] == 0:
                self._windowed.discard(block_id)
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
        group: int = 0,
    ) -> CachedBlock | None:
        """Makes a computed, full block findable.

        Returns the cached block with this content, which is another one if it was there first. None on a hash collision
        or, in a group without a window, when the parent has been evicted; after that nothing that follows this block may be
        published either.
        """
        by_hash = self._by_hash
        if parent is not None and not self._can_be_followed(parent):
            return None
        name = group_hash(block_hash, group) if group else block_hash
        present = by_hash.get(name)
        if present is not None:
            if is_same(present, root, parent, token_ids) or (
                self._is_windowed[group] and is_same_by_tokens(present, root, parent, token_ids)
            ):
                return present
            if not self._is_stray(present):
                self._num_collisions += 1
                return None
            self._forget(present)
        head_hash = parent.head_hash if parent else name
        cached = CachedBlock(block_id, group, name, root, parent, tuple(token_ids), head_hash, checksum)
        by_hash[name] = self._by_block[block_id] = cached
        # Others hear of the first group's blocks: they are those of the widest view.
        if group == 0:
            self._changed[cached] = True
        return cached

    def take_changes(self) -> PrefixChanges:
        """What the cache gained and lost since the last call."""
        # Two blocks may have the same entry, one after the other; the last change counts.
        changed = {cached.entry(): is_cached for cached, is_cached in self._changed.items()}
        self._changed = {}
        published = tuple(entry for entry, is_cached in changed.items() if is_cached)
        evicted = tuple(entry for entry, is_cached in changed.items() if not is_cached)
        return PrefixChanges(published, evicted)

    def stats(self) -> BlockPoolStats:
        """A picture of now."""
        return BlockPoolStats(
            num_blocks=self.num_blocks,
            num_free=len(self._free),
            num_pledged=self._num_pledged,
            num_cached=len(self._by_block),
            num_hits=self._num_hits,
            num_evictions=self._num_evictions,
            num_collisions=self._num_collisions,
        )

    def check_invariants(self, block_tables: Iterable[Sequence[BlockId]], num_pledged: int = 0) -> None:
        """Every block is free, or has exactly as many references as block tables hold it; pledges add up."""
        held = Counter(block_id for table in block_tables for block_id in table)
        for block_id, num_refs in enumerate(self._num_refs):
            assert num_refs == held[BlockId(block_id)], f"block {block_id}: {num_refs} references, not {held}"
            assert (num_refs == 0) == (BlockId(block_id) in self._free), f"block {block_id} is free and held"
        assert len(self._by_hash) == len(self._by_block)
        assert all(self._is_cached(cached) for cached in self._by_block.values())
        assert self._num_pledged == num_pledged, f"{self._num_pledged} blocks are pledged, not {num_pledged}"
        assert not self._windowed & self._free.keys(), "a free block belongs to a group"
        assert 0 <= self.num_available <= len(self._free), "more is pledged than there is"

    def _tokens_of(self, token_ids: Sequence[int], ordinal: int) -> tuple[int, ...]:
        return tuple(token_ids[ordinal * self.block_size : (ordinal + 1) * self.block_size])

    def _is_cached(self, cached: CachedBlock) -> bool:
        return self._by_hash.get(cached.block_hash) is cached

    def _can_be_followed(self, parent: CachedBlock) -> bool:
        return self._is_windowed[parent.group] or self._is_cached(parent)

    def _is_stray(self, cached: CachedBlock) -> bool:
        """Whether nobody can find it any more, since the block that it follows was evicted before it.

        That happens when two sequences computed one prompt, and the one that published the beginning left first.
        """
        return cached.parent is not None and not self._can_be_followed(cached.parent)

    def _forget(self, cached: CachedBlock) -> None:
        del self._by_hash[cached.block_hash], self._by_block[cached.held_id]
        if cached.group == 0:
            self._changed[cached] = False

    def _note_held(self, block_id: BlockId, group: int) -> None:
        if self._is_windowed[group]:
            self._windowed.add(block_id)

    def _take_free(self) -> BlockId:
        block_id, _ = self._free.popitem(last=False)
        cached = self._by_block.get(block_id)
        if cached is not None:
            self._forget(cached)
            self._num_evictions += 1
        self._num_refs[block_id] = 1
        return block_id
