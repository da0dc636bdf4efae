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
    first: int = 0  # the ordinals before it were let go, sinks apart
    pledged: int = 0
    checksums: list[int] = field(default_factory=list)  # of complete blocks; 0 where there is none any more
    # The chain of cached blocks that carries the sequence's prefix: its last one, and its length. It is shorter than
    # `checksums` after a hash collision; then it grows no more.
    last_cached: CachedBlock | None = None
    num_cached: int = 0
    is_windowed: bool = field(init=False)

    def __post_init__(self) -> None:
        """Kept, since it is asked for with each block."""
        self.is_windowed = self.group.is_windowed

    @property
    def held_ids(self) -> list[BlockId]:
        """What it holds, in order."""
        return [block_id for block_id in self.block_ids if block_id is not None]

    def num_live(self, num_blocks: int, block_size: int) -> int:
        """What a table of `num_blocks` holds that has let go of what lies before its first."""
        return num_blocks - self.first + min(self.group.num_sink_blocks(block_size), self.first)

    def clear(self) -> None:
        """As if nothing had ever been held; what is pledged is the owner's business."""
        self.block_ids.clear()
        self.checksums.clear()
        self.first = self.num_cached = 0
        self.last_cached = None
