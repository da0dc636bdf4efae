"""A full block that the prefix cache has found a name for, and when two of them hold the same tokens."""

from collections.abc import Sequence

from msgspec import Struct

from paceline.core.block_hash import BlockHash, group_hash
from paceline.core.kv_layout import BlockId
from paceline.core.prefix import PrefixEntry


class CachedBlock(Struct, frozen=True, eq=False):
    """A full block in the prefix cache.

    `parent` is the very block that it follows, not its hash: a hit is a hit only along the chain of the objects that
    matched, so a colliding hash can never join two prefixes. In a KV group with a window the blocks that it follows
    may have been freed long ago, or never have been here (`block_id` is None); then their objects only bear witness
    of the tokens.
    """

    block_id: BlockId | None
    group: int
    block_hash: BlockHash
    root: BlockHash
    parent: "CachedBlock | None"
    token_ids: tuple[int, ...]
    head_hash: BlockHash
    checksum: int

    @property
    def held_id(self) -> BlockId:
        """Where it is."""
        assert self.block_id is not None, "a witness is nowhere"
        return self.block_id

    def entry(self) -> PrefixEntry:
        """What the prefix table says about it."""
        return PrefixEntry(self.block_hash, self.head_hash, self.held_id)


def witness(
    group: int, block_hash: BlockHash, root: BlockHash, parent: CachedBlock | None, token_ids: Sequence[int]
) -> CachedBlock:
    """Stands for a full block that is not here, so that others can follow it."""
    name = group_hash(block_hash, group)
    head_hash = parent.head_hash if parent else name
    return CachedBlock(None, group, name, root, parent, tuple(token_ids), head_hash, 0)


def is_same(
    cached: CachedBlock, root: BlockHash, parent: CachedBlock | None, token_ids: Sequence[int]
) -> bool:
    """Whether it holds these tokens behind this very parent."""
    return cached.root == root and cached.parent is parent and cached.token_ids == tuple(token_ids)


def is_same_by_tokens(
    cached: CachedBlock, root: BlockHash, parent: CachedBlock | None, token_ids: Sequence[int]
) -> bool:
    """Whether it holds these tokens behind the tokens of this parent and its parents, in whichever objects."""
    if cached.root != root or cached.token_ids != tuple(token_ids):
        return False
    ours, theirs = parent, cached.parent
    while ours is not theirs:
        if ours is None or theirs is None or ours.token_ids != theirs.token_ids:
            return False
        ours, theirs = ours.parent, theirs.parent
    return True
