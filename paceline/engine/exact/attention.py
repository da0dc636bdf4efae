"""Attention whose result for a token does not depend on how its context was cut into steps, or on the rest of the batch.

A context is cut into splits of a fixed number of tokens, counted from its first one. Each tile of queries meets each
split in a product of fixed shape, and a token's splits are summed from the first to the last. A split that a token may
not see adds nothing, to the bit. Everything between the products is in float32.

    split        0        1        2
    tokens    |0 .. S)|S .. 2S)|2S .. 3S)
    tile of a decode:             [t]          meets splits 0, 1, 2
    tile of a chunk:      [t t t t]            meets splits 0, 1, and for some of its tokens 1 adds nothing
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from paceline.engine.attention import AttentionRules, store_tokens
from paceline.engine.exact.partial import MASKED, Geometry, fill_rows, partial_attention
from paceline.engine.exact.plan import Plan, make_plans
from paceline.engine.kv_cache import KVCache

EXACT_NAME = "paceline_exact"

_MIN_SPLIT_TOKENS = 128


def exact_paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, key_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, key_dim]
    value: Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """In place of attention.py's paged_attention: the same arguments, and the same result but for rounding."""
    context, layer, rules = store_tokens(module, query, key, value, attention_mask, kwargs)
    geometry = geometry_of(context.cache, layer, num_heads=query.shape[1])
    key_of_plans = geometry, context.cache.group_of[layer], rules.view
    if key_of_plans not in context.shared:
        context.shared[key_of_plans] = make_plans(context.batch, *key_of_plans)
    plans = context.shared[key_of_plans]
    out = exact_attention(context.cache, layer, query[0].transpose(0, 1), plans, geometry, rules)
    return out.unsqueeze(0), None


def exact_attention(
    cache: KVCache,
    layer: int,
    query: Tensor,
    plans: tuple[Plan, ...],
    geometry: Geometry,
    rules: AttentionRules,
) -> Tensor:
    """From query [num_tokens, num_heads, key_dim] to [num_tokens, num_heads, value_dim]."""
    out = query.new_empty(*query.shape[:2], geometry.value_dim)
    for plan in plans:
        tiles = _stack_heads(query[plan.rows].float() * rules.scaling, geometry)
        attended = _attend_tiles(cache, layer, tiles, plan, geometry, rules)
        # A row that fills up a tile is a copy of the last one and has its bits: it does not matter which is stored.
        out[plan.rows] = _unstack_heads(attended, plan.tile_tokens, geometry).to(query.dtype)
    return out


def geometry_of(cache: KVCache, layer: int, num_heads: int) -> Geometry:
    block_size, sizes = cache.layout.block_size, cache.layout.layers[layer]
    split_tokens = -(-_MIN_SPLIT_TOKENS // block_size) * block_size
    group = num_heads // sizes.num_kv_heads
    return Geometry(sizes.num_kv_heads, group, sizes.key_dim, sizes.value_dim, split_tokens, block_size)


def _attend_tiles(
    cache: KVCache, layer: int, tiles: Tensor, plan: Plan, geometry: Geometry, rules: AttentionRules
) -> Tensor:
    """As [num_tiles, num_kv_heads, rows, value_dim]."""
    highest, total, weighted = _all_partials(cache, layer, tiles, plan, geometry, rules.softcap)
    reference = highest.amax(1)
    sink = None if rules.sinks is None else _sink_rows(rules.sinks, plan.tile_tokens, geometry)
    if sink is not None:
        reference = torch.maximum(reference, sink)
    sum_weights, sum_values = torch.zeros_like(reference), torch.zeros_like(weighted[:, 0])
    for ordinal in range(plan.max_items):
        factor = torch.exp(highest[:, ordinal] - reference)
        sum_weights = sum_weights + factor * total[:, ordinal]
        sum_values = sum_values + factor * weighted[:, ordinal]
    if sink is not None:
        sum_weights = sum_weights + torch.exp(sink - reference)
    # Adding 0 makes -0 and 0, which are equal numbers, equal bits too.
    return sum_values / sum_weights + 0.0


def _all_partials(
    cache: KVCache, layer: int, tiles: Tensor, plan: Plan, geometry: Geometry, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Each [num_tiles, max_items, num_kv_heads, rows, 1 or value_dim]; items that a tile has not add nothing."""
    num_tiles, heads, rows, _ = tiles.shape
    shape = (num_tiles, plan.max_items, heads, rows)
    highest, total = tiles.new_full((*shape, 1), MASKED), tiles.new_zeros(*shape, 1)
    weighted = tiles.new_zeros(*shape, geometry.value_dim)
    for call in plan.calls:
        keys, values = map(_by_head, cache.gather_blocks(layer, call.blocks, torch.float32))
        # What nobody sees may be left over from anything, and 0 times infinity is not 0.
        values[call.num_whole :].masked_fill_(call.unseen, 0.0)
        at = call.tile, call.ordinal
        highest[at], total[at], weighted[at] = partial_attention(
            tiles[call.tile], keys, values, call.hidden, softcap
        )
    return highest, total, weighted


def _by_head(blocks: Tensor) -> Tensor:
    """From [items, blocks of a split, block_size, num_kv_heads, dim] to [items, num_kv_heads, split_tokens, dim], float32."""
    found = blocks.flatten(1, 2).transpose(1, 2)
    return torch.empty(found.shape).copy_(found)


# -- rows: the query heads that share a key head, for each token of a tile


def _stack_heads(tiles: Tensor, geometry: Geometry) -> Tensor:
    """[num_tiles, tile_tokens, num_heads, key_dim] to [num_tiles, num_kv_heads, rows, key_dim]."""
    tiles = tiles.view(*tiles.shape[:2], geometry.num_kv_heads, geometry.group, -1)
    return fill_rows(tiles.transpose(1, 2).flatten(2, 3), axis=2)


def _unstack_heads(tiles: Tensor, tile_tokens: int, geometry: Geometry) -> Tensor:
    """[num_tiles, num_kv_heads, rows, value_dim] to [num_tiles, tile_tokens, num_heads, value_dim]."""
    tiles = tiles[:, :, : tile_tokens * geometry.group]
    tiles = tiles.reshape(*tiles.shape[:2], tile_tokens, geometry.group, -1)
    return tiles.transpose(1, 2).flatten(2, 3)


def _sink_rows(sinks: Tensor, tile_tokens: int, geometry: Geometry) -> Tensor:
    """As [num_kv_heads, rows, 1]."""
    rows = sinks.float().view(geometry.num_kv_heads, 1, geometry.group, 1).expand(-1, tile_tokens, -1, 1)
    return fill_rows(rows.flatten(1, 2), axis=1)


AttentionInterface.register(EXACT_NAME, exact_paged_attention)
