"""What one KV block looks like in memory: plain numbers, no tensors.

A block is one contiguous run: for each layer its keys `[block_size, num_kv_heads, key_dim]`, then its values
`[block_size, num_kv_heads, value_dim]`; nothing for a layer that reads another one's. So a block moves between workers
without packing.
"""

import hashlib
from dataclasses import astuple, dataclass
from typing import NewType

BlockId = NewType("BlockId", int)

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Geometry of one layer's keys and values, as the layer itself shows it when the model is loaded."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None  # a token sees itself and the window - 1 tokens before it; None: all of them
    shared_with: int | None = None  # the earlier layer whose keys and values this one reads; it stores none

    @property
    def key_items(self) -> int:
        """Elements of the keys that the layer stores for one token."""
        return 0 if self.shared_with is not None else self.num_kv_heads * self.key_dim

    @property
    def value_items(self) -> int:
        """Elements of the values that the layer stores for one token."""
        return 0 if self.shared_with is not None else self.num_kv_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of a block: all layers, tokens a block, element type."""

    layers: tuple[LayerKV, ...]
    block_size: int
    dtype: str

    @property
    def block_items(self) -> int:
        """Elements of a block."""
        return self.block_size * sum(layer.key_items + layer.value_items for layer in self.layers)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.block_items * ITEM_BYTES[self.dtype]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def digest(self) -> str:
        """Names the layout; equal layouts have equal digests."""
        return hashlib.blake2b(repr(astuple(self)).encode(), digest_size=16).hexdigest()
