"""The blocks of one sequence in one KV group. What changes it is paceline/engine/block_tables.py."""

from dataclasses import dataclass, field

from paceline.core.kv_layout import BlockId, KVGroup
from paceline.engine.cached_block import CachedBlock


@dataclass(slots=True, eq=False)
class GroupTable:
    """One group's blocks. `pledged` blocks are set aside for it in the pool, if it has a window."""

    index: int
    group: KVGroup
    block_ids: list[BlockId | None] = field(default_factory=list)
    first: int = 0  # the ordinals before it were let go
    pledged: int = 0
    checksums: list[int] = field(default_factory=list)  # of complete blocks; 0 where there is none any more
    # The chain of cached blocks that carries the sequence's prefix: its last one, and its length. It is shorter than
    # `checksums` after a hash collision; then it grows no more.
    last_cached: CachedBlock | None = None
    num_cached: int = 0

    @property
    def is_windowed(self) -> bool:
        """Whether it lets blocks go."""
        return self.group.window is not None

    @property
    def held_ids(self) -> list[BlockId]:
        """What it holds, in order."""
        return [block_id for block_id in self.block_ids[self.first :] if block_id is not None]
