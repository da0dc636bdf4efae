"""Host memory for the KV of preempted sequences: who has how much of it. The bytes are copied by whoever owns the blocks."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from paceline.core.kv_layout import BlockId

# A block's content outside of the pool; what it is, its saver knows.
SavedBlock = Any


class BlockSaver(Protocol):
    """Copies blocks out of the pool and back; a pool on a device does so without waiting, in the order of its other work."""

    def save(self, block_id: BlockId) -> SavedBlock:
        """What the block holds now."""
        ...

    def restore(self, saved: SavedBlock, block_id: BlockId) -> None:
        """Makes the block hold it again."""
        ...


class SavedPlace(NamedTuple):
    """A saved block of one sequence, and its place in the sequence's tables."""

    group: int
    ordinal: int
    content: SavedBlock


class SwapSpace:
    """So many blocks and no more."""

    def __init__(self, max_blocks: int, saver: BlockSaver) -> None:
        self._saver = saver
        self.num_free = max_blocks

    def save(self, places: Sequence[tuple[int, int, BlockId]]) -> list[SavedPlace]:
        """Copies out the blocks at (group, ordinal). The caller has checked that there is room."""
        assert len(places) <= self.num_free, "save() without room"
        self.num_free -= len(places)
        return [SavedPlace(group, ordinal, self._saver.save(block_id)) for group, ordinal, block_id in places]

    def restore(self, saved: SavedPlace, block_id: BlockId) -> None:
        """Copies one back; it still counts until it is dropped."""
        self._saver.restore(saved.content, block_id)

    def drop(self, saved: list[SavedPlace]) -> None:
        """Forgets them."""
        self.num_free += len(saved)
        saved.clear()
