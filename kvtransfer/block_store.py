"""What the hand-over asks of a KV cache: the bytes of a block. It knows no layers, heads or tensors."""

from typing import Protocol

import xxhash

from paceline.core.kv_layout import BlockId
from paceline.runtime.pool_memory import PoolMemory


class BlockStore(Protocol):
    """Blocks as runs of bytes of one size. Who may touch a block, and when, is the caller's business."""

    @property
    def block_bytes(self) -> int:
        """Bytes of every block."""

    def read(self, block_id: BlockId) -> memoryview:
        """The block's bytes; they stay what they are only as long as the block is held."""

    def write(self, block_id: BlockId, offset: int, data: bytes | memoryview) -> None:
        """Puts `data` at `offset` of the block, within its bounds."""

    def checksum(self, block_id: BlockId) -> int:
        """XXH3-64 of the block's bytes."""


class MemoryBlockStore:
    """Blocks one after the other; for tests, benchmarks and machines without a model."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self.pool = PoolMemory(num_blocks * block_bytes)
        self._view = self.pool.buffer

    @property
    def block_bytes(self) -> int:
        """Bytes of every block."""
        return self._block_bytes

    def read(self, block_id: BlockId) -> memoryview:
        """The block's bytes, not to be written through."""
        start = block_id * self._block_bytes
        return self._view[start : start + self._block_bytes].toreadonly()

    def write(self, block_id: BlockId, offset: int, data: bytes | memoryview) -> None:
        """Puts `data` at `offset` of the block."""
        assert 0 <= offset <= offset + len(data) <= self._block_bytes, "a write leaves its block"
        start = block_id * self._block_bytes + offset
        self._view[start : start + len(data)] = data

    def checksum(self, block_id: BlockId) -> int:
        """XXH3-64 of the block's bytes."""
        return xxhash.xxh3_64_intdigest(self.read(block_id))
