"""Which blocks of a sequence a hand-over of its known tokens moves: block after block, each KV group's that needs it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.core.block_hash import BlockHash, group_hash
from paceline.core.kv_layout import BlockId
from paceline.core.ticket import ReadyBlock
from paceline.engine.group_table import GroupTable


class _Place(NamedTuple):
    ordinal: int
    group: int


class Places:
    """Those that tokens behind the known ones see. Both sides of a hand-over have the same ones, in the same order."""

    def __init__(self, tables: Sequence[GroupTable] = (), num_tokens: int = 0, block_size: int = 1) -> None:
        self._tables = tables
        num_blocks = -(-num_tokens // block_size)
        self._places = sorted(
            _Place(ordinal, table.index)
            for table in tables
            for ordinal in table.group.blocks_seen(num_tokens, num_blocks, block_size)
        )

    def __len__(self) -> int:
        return len(self._places)

    def ids(self) -> tuple[BlockId, ...]:
        """The blocks."""
        return tuple(self._id_at(place) for place in self._places)

    def num_before(self, ordinal: int) -> int:
        """How many of them lie before the block at `ordinal`."""
        return sum(place.ordinal < ordinal for place in self._places)

    def hashes(self, block_hashes: Sequence[BlockHash]) -> tuple[BlockHash, ...]:
        """The names of those that are full; a partial last one of each group has none."""
        full = [place for place in self._places if place.ordinal < len(block_hashes)]
        return tuple(group_hash(block_hashes[place.ordinal], place.group) for place in full)

    def ready(
        self, num_known: int, checksum: Callable[[BlockId], int], *, is_complete: bool
    ) -> tuple[ReadyBlock, ...]:
        """Those behind the first `num_known` that have their content; all of them once all tokens are computed."""
        ready = []
        for place in self._places[num_known:]:
            checksums = self._tables[place.group].checksums
            if place.ordinal >= len(checksums) and not is_complete:
                break
            block_id = self._id_at(place)
            is_full = place.ordinal < len(checksums)
            ready.append(ReadyBlock(block_id, checksums[place.ordinal] if is_full else checksum(block_id)))
        return tuple(ready)

    def _id_at(self, place: _Place) -> BlockId:
        block_id = self._tables[place.group].block_ids[place.ordinal]
        assert block_id is not None, "what a hand-over needs is never let go"
        return block_id
