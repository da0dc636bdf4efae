"""One layer's part of the KV pool, as its kernels are told of it: views, strides and sizes. Nothing is copied."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.core.kv_layout import LayerKV
from paceline.engine.kv_cache import KVCache

# Of numbers that have no scales.
PLAIN = "plain"
# The least that the matrix unit multiplies at once.
MIN_WIDTH = 16


@dataclass(frozen=True, slots=True)
class LayerViews:
    """What KVCache has of one layer; see there."""

    layer: LayerKV
    kv_dtype: str  # int8, fp8, or PLAIN
    keys: Tensor  # [num_blocks, block_size, num_kv_heads, key_dim]
    values: Tensor  # [num_blocks, block_size, num_kv_heads, value_dim]
    key_scales: Tensor | None = None  # [num_blocks, block_size, num_kv_heads, 1]
    value_scales: Tensor | None = None

    @classmethod
    def of(cls, cache: KVCache, index: int) -> "LayerViews":
        """The layer `index` of a cache, of any type but int4."""
        layer, dtype = cache.layout.layers[index], cache.layout.dtype
        assert dtype != "int4", "there are no kernels for an experiment"
        if cache.layout.kv_type.scale_bytes == 0:
            return cls(layer, PLAIN, cache.keys[index], cache.values[index])
        scales = cache.key_scales[index], cache.value_scales[index]
        return cls(layer, dtype, cache.keys[index], cache.values[index], *scales)

    @property
    def elements(self) -> tuple[Tensor, Tensor]:
        """Keys and values; those of 8 bits with a sign, which is how kernels take them apart."""
        if self.kv_dtype == PLAIN:
            return self.keys, self.values
        return self.keys.view(torch.int8), self.values.view(torch.int8)

    @property
    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Of keys and values, as bits: a bfloat16 is the upper half of a float32, and in this form every machine reads it alike."""
        if self.key_scales is None or self.value_scales is None:
            return None, None
        return self.key_scales.view(torch.int16), self.value_scales.view(torch.int16)

    def geometry(self) -> dict[str, Any]:
        """What every kernel on the pool is told of it, by the names of their parameters.

        All views are cut out of blocks of the same bytes, so one stride leads from block to block in each of them, and inside a block
        vectors stand without a gap.
        """
        keys, values = self.elements
        scales, _ = self.scales
        assert keys.stride(0) == values.stride(0), "keys and values lie in the same blocks"
        assert keys.stride()[1:] == (keys.shape[2] * keys.shape[3], keys.shape[3], 1), "without a gap"
        assert values.stride()[1:] == (values.shape[2] * values.shape[3], values.shape[3], 1), "without a gap"
        return {
            "block_stride": keys.stride(0),
            "scale_block_stride": 0 if scales is None else scales.stride(0),
            "block_size": keys.shape[1],
            "num_kv_heads": keys.shape[2],
            "kv_dtype": self.kv_dtype,
        }


def width_of(dim: int) -> int:
    """The power of two of at least MIN_WIDTH that has room for `dim` elements: what a tile may be wide."""
    return max(MIN_WIDTH, 1 << (dim - 1).bit_length())
