"""A prompt's way from a prefill worker to a decode worker: which blocks travel, and when the last one is there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.simulator.cost import CostModel
from paceline.core.kv_layout import BlockId
from paceline.core.request import FirstToken
from paceline.core.ticket import ReadyBlock
from paceline.engine.engine import BlockMemory


@dataclass(slots=True)
class HandOver:
    """Blocks stream while later chunks are computed, as the real receiver pulls them.

    prefill   [chunk 1][chunk 2][chunk 3]        first token
    wire          ..[blocks 1][blocks 2]...[blocks 3]..       .. a round trip
    decode                                            commit
    """

    # When blocks became ready, and which.
    ready: list[tuple[float, tuple[ReadyBlock, ...]]] = field(default_factory=list)
    complete_s: float | None = None
    reserved_s: float | None = None
    block_ids: tuple[BlockId, ...] = ()
    num_held: int = 0
    first_token: FirstToken | None = None

    def reserve(self, now_s: float, block_ids: Sequence[BlockId], num_held: int) -> None:
        """The receiver has room; it holds the first `num_held` blocks already."""
        self.reserved_s, self.block_ids, self.num_held = now_s, tuple(block_ids), num_held

    @property
    def is_ready(self) -> bool:
        """Whether everything is known that its end depends on."""
        return self.complete_s is not None and self.reserved_s is not None

    def end_s(self, cost: CostModel, block_bytes: int) -> float:
        """When the receiver may commit."""
        assert self.complete_s is not None and self.reserved_s is not None
        wire_s, num_before = self.reserved_s + cost.transfer_latency_s, 0
        for ready_s, blocks in self.ready:
            num_travelling = len(blocks) - max(0, min(len(blocks), self.num_held - num_before))
            num_before += len(blocks)
            if num_travelling:
                wire_s = max(wire_s, ready_s) + cost.transfer_s(num_travelling * block_bytes)
        return max(wire_s, self.complete_s) + cost.transfer_latency_s

    def copy(self, source: BlockMemory, target: BlockMemory) -> None:
        """Moves the content, for runners that have any."""
        for from_id, to_id in self._travelling():
            target.write(to_id, 0, bytes(source.read(from_id)))

    @property
    def num_travelling(self) -> int:
        """Blocks that the receiver did not hold."""
        return len(self.block_ids) - self.num_held

    def _travelling(self) -> Iterator[tuple[BlockId, BlockId]]:
        blocks = [block.block_id for _, ready in self.ready for block in ready]
        return zip(blocks[self.num_held :], self.block_ids[self.num_held :], strict=True)
