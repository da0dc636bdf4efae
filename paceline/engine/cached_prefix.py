"""Finds how much of a sequence is cached: as far as every KV group still has what the next token sees."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.block_hash import BlockHash
from paceline.engine.block_pool import BlockPool
from paceline.engine.cached_block import CachedBlock


@dataclass(frozen=True, slots=True)
class TokenChain:
    """What names the blocks of a sequence. `block_hashes` is empty for one that stays out of the cache."""

    root: BlockHash
    block_hashes: Sequence[BlockHash]
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The first `num_blocks` full blocks are cached: in each group, in order, those of them that are needed."""

    num_blocks: int
    by_group: tuple[tuple[CachedBlock, ...], ...]


def find_prefix(
    pool: BlockPool, chain: TokenChain, max_blocks: int, next_position: int | None = None
) -> CachedPrefix:
    """The longest cached prefix, of at most `max_blocks` blocks. Takes no reference.

    `next_position` is where computing goes on when the rest comes from outside; None: right behind the prefix.
    """
    hashes = chain.block_hashes[:max_blocks]
    whole = {
        index: pool.lookup(chain.root, hashes, chain.token_ids, index)
        for index, group in enumerate(pool.groups)
        if not group.is_windowed
    }
    num_blocks = min((len(found) for found in whole.values()), default=len(hashes))
    windows = [_Window(pool, chain, index) for index in range(len(pool.groups)) if index not in whole]
    while (fewer := _shortest(windows, num_blocks, next_position)) < num_blocks:
        num_blocks = fewer
    by_window = {window.index: window.found(num_blocks, next_position) for window in windows}
    by_group = (whole.get(index, by_window.get(index, []))[:num_blocks] for index in range(len(pool.groups)))
    return CachedPrefix(num_blocks, tuple(map(tuple, by_group)))


def _shortest(windows: "list[_Window]", num_blocks: int, next_position: int | None) -> int:
    """How much of a prefix of `num_blocks` is left by the first group that misses one of its blocks."""
    for window in windows:
        # If one is missing then every longer prefix, up to this one, misses it too.
        for ordinal in reversed(window.needed(num_blocks, next_position)):
            if window.find(ordinal) is None:
                return ordinal
    return num_blocks


class _Window:
    """What one group with a window has of a sequence; each block is looked for once."""

    def __init__(self, pool: BlockPool, chain: TokenChain, index: int) -> None:
        self.index = index
        self._pool = pool
        self._chain = chain
        self._known: dict[int, CachedBlock | None] = {}

    def find(self, ordinal: int) -> CachedBlock | None:
        """The block at `ordinal`, if it is cached."""
        if ordinal not in self._known:
            self._known[ordinal] = self._pool.find(
                self._chain.root,
                self._chain.block_hashes[ordinal],
                self._chain.token_ids,
                ordinal,
                self.index,
                child=self._known.get(ordinal + 1),
            )
        return self._known[ordinal]

    def needed(self, num_blocks: int, next_position: int | None) -> list[int]:
        """Which of the first `num_blocks` blocks are seen from `next_position`, or from right behind them."""
        size = self._pool.block_size
        position = num_blocks * size if next_position is None else next_position
        return self._pool.groups[self.index].blocks_seen(position, num_blocks, size)

    def found(self, num_blocks: int, next_position: int | None) -> list[CachedBlock]:
        """Those, all of which have been found."""
        found = (self.find(ordinal) for ordinal in self.needed(num_blocks, next_position))
        return [block for block in found if block is not None]
