"""What one KV block looks like in memory: plain numbers, no tensors.

A block is one contiguous run: for each layer its keys `[block_size, num_kv_heads, key_dim]`, then its values
`[block_size, num_kv_heads, value_dim]`, then, for a quantised type, the scales of its keys and those of its values, each
`[block_size, num_kv_heads]`; nothing for a layer that reads another one's. So a block moves between workers without packing.
"""

import hashlib
from dataclasses import astuple, dataclass
from typing import NewType

BlockId = NewType("BlockId", int)


@dataclass(frozen=True, slots=True)
class KVType:
    """How keys and values are stored. A quantised vector, one for each token and head, has a scale of its own."""

    item_bits: int
    scale_bytes: int = 0  # 0: not quantised

    def vector_bytes(self, dim: int) -> int:
        """Bytes of a vector of `dim` elements without its scale, filled up so that no scale lies askew in memory."""
        num_bytes, unit = -(-dim * self.item_bits // 8), max(1, self.scale_bytes)
        return -(-num_bytes // unit) * unit


KV_TYPES = {
    "float32": KVType(32),
    "bfloat16": KVType(16),
    "fp8": KVType(8, scale_bytes=2),
    "int8": KVType(8, scale_bytes=2),
    "int4": KVType(4, scale_bytes=2),
}


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Geometry of one layer's keys and values, as the layer itself shows it when the model is loaded."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None  # a token sees itself and the window - 1 tokens before it; None: all of them
    shared_with: int | None = None  # the earlier layer whose keys and values this one reads; it stores none


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of a block: all layers, tokens a block, and which of KV_TYPES its elements are."""

    layers: tuple[LayerKV, ...]
    block_size: int
    dtype: str

    @property
    def kv_type(self) -> KVType:
        """How its keys and values are stored."""
        return KV_TYPES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return sum(self.layer_bytes(layer) for layer in self.layers)

    def layer_bytes(self, layer: LayerKV) -> int:
        """Bytes that the layer takes in a block."""
        if layer.shared_with is not None:
            return 0
        vectors = self.kv_type.vector_bytes(layer.key_dim) + self.kv_type.vector_bytes(layer.value_dim)
        return self.block_size * layer.num_kv_heads * (vectors + 2 * self.kv_type.scale_bytes)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def digest(self) -> str:
        """Names the layout; equal layouts have equal digests. The type stands before it, for whoever reads of a mismatch."""
        return f"{self.dtype}:{hashlib.blake2b(repr(astuple(self)).encode(), digest_size=16).hexdigest()}"
