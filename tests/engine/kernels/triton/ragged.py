"""Sequences whose blocks lie anywhere in a pool, and what attention over them is to give."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.kv_layout import KVLayout, LayerKV
from paceline.engine.attention import AttentionRules, attend
from paceline.engine.forward_batch import QueryRange
from paceline.engine.kernels.triton.layer_views import LayerViews
from paceline.engine.kv_cache import KVCache
from paceline.engine.kv_quant import dequantise, quantise

# Of each sequence its tokens in the batch, and its context.
DECODES = ((1, 1), (1, 17), (1, 256), (1, 257), (1, 700))
CHUNKS = ((1, 33), (40, 40), (9, 300), (1, 257), (2, 5))
# No KV cache has float16; here it stands for bfloat16 where that is wrong, in the interpreter.
FLOAT16 = "float16"
# What queries are in, by how keys and values are stored.
_DTYPES = {FLOAT16: torch.float16, "bfloat16": torch.bfloat16}


def copy_on(cache: KVCache, views: LayerViews, device: str) -> tuple[Tensor, LayerViews]:
    """The bytes of a pool on that device, and a layer's views of them."""
    pool = cache.blocks.flatten().clone().to(device)

    def copied(view: Tensor) -> Tensor:
        return pool.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset())

    keys, values = copied(views.keys), copied(views.values)
    if views.key_scales is None or views.value_scales is None:
        return pool, replace(views, keys=keys, values=values)
    key_scales, value_scales = copied(views.key_scales), copied(views.value_scales)
    return pool, LayerViews(views.layer, views.kv_dtype, keys, values, key_scales, value_scales)


class Ragged:
    """A pool of two layers, of which the second is looked at. All that no token of a sequence is in is not a number.

    Where a window has passed there is no block: the table says 0, and block 0 is nobody's.
    """

    def __init__(
        self,
        layer: LayerKV,
        kv_dtype: str,
        sequences: Sequence[tuple[int, int]],
        *,
        block_size: int = 16,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.layer, self.kv_dtype = layer, kv_dtype
        self.dtype = _DTYPES.get(kv_dtype, torch.float32)
        other = replace(layer, num_kv_heads=1, key_dim=16, value_dim=16)
        layout = KVLayout((other, layer), block_size, "bfloat16" if kv_dtype == FLOAT16 else kv_dtype)
        num_blocks = [-(-context // block_size) for _, context in sequences]
        self.cache = KVCache(layout, sum(num_blocks) + 1)
        self.views = self._views()
        self._spoil()
        places = torch.split(torch.randperm(sum(num_blocks)) + 1, num_blocks)
        firsts = [sum(num for num, _ in sequences[:index]) for index in range(len(sequences))]
        self.queries = tuple(
            QueryRange(first, first + num, context, (self._seen(place, context - num, block_size),))
            for first, (num, context), place in zip(firsts, sequences, places, strict=True)
        )
        self.contexts = [self._fill(part, block_size) for part in self.queries]

    def query(self, num_heads: int) -> Tensor:
        """Some, as the model lays them out: [num_tokens, num_heads, key_dim], heads apart."""
        dim = self.layer.key_dim + (self.layer.value_dim if self.layer.is_latent else 0)
        return torch.randn(num_heads, self.queries[-1].last, dim).transpose(0, 1).to(self.dtype)

    def plain(self, query: Tensor, rules: AttentionRules) -> Tensor:
        """What `attend` gives, in float32."""
        parts = [
            attend(query[part.first : part.last].transpose(0, 1).float(), keys, values, rules)
            for part, (keys, values) in zip(self.queries, self.contexts, strict=True)
        ]
        return torch.cat(parts, 1).transpose(0, 1)

    def _views(self) -> LayerViews:
        views = LayerViews.of(self.cache, 1)
        if self.kv_dtype != FLOAT16:
            return views
        return replace(views, keys=views.keys.view(self.dtype), values=views.values.view(self.dtype))

    def _spoil(self) -> None:
        cache = self.cache
        for view in (*cache.keys, *cache.values):
            view.fill_(127 if view.dtype == torch.uint8 else float("nan"))
        for view in (*cache.key_scales, *cache.value_scales):
            view.fill_(float("nan"))

    def _seen(self, table: Tensor, position: int, block_size: int) -> Tensor:
        (group,) = self.cache.layout.groups
        seen = torch.zeros_like(table)
        kept = group.blocks_seen(position, len(table), block_size)
        seen[kept] = table[kept]
        return seen

    def _fill(self, part: QueryRange, block_size: int) -> tuple[Tensor, Tensor]:
        """Stores a context; gives its keys and values as they are stored, each [num_kv_heads, context, dim], in float32."""
        (table,), positions = part.block_tables, torch.arange(part.context)
        blocks = table[positions // block_size]
        slots = (blocks * block_size + positions % block_size)[blocks > 0]
        dims = self.layer.key_dim, self.layer.value_dim
        keys, values = (torch.randn(part.context, self.layer.num_kv_heads, dim) for dim in dims)
        if self.kv_dtype == FLOAT16:
            keys, values = keys.half(), values.half()
            at = slots // block_size, slots % block_size
            self.views.keys[at], self.views.values[at] = keys[blocks > 0], values[blocks > 0]
        else:
            self.cache.write_tokens(1, slots, keys[blocks > 0], values[blocks > 0])
        keys, values = (self._as_stored(each).transpose(0, 1) for each in (keys, values))
        return (torch.cat([keys, values], -1), keys) if self.layer.is_latent else (keys, values)

    def _as_stored(self, vectors: Tensor) -> Tensor:
        if self.kv_dtype in {"int8", "fp8"}:
            packed, scales = quantise(vectors, self.kv_dtype)
            return dequantise(packed, scales, vectors.shape[-1], self.kv_dtype, torch.float32)
        return vectors.to(self.dtype).float()
