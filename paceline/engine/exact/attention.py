"""Attention whose result for a token does not depend on how its context was cut into steps, or on the rest of the batch.

A context is cut into splits of a fixed number of tokens, counted from its first one. Each tile of queries meets each
split in a product of fixed shape, and a token's splits are summed from the first to the last. A split that a token may
not see adds nothing, to the bit. Everything between the products is in float32.

    split        0        1        2
    tokens    |0 .. S)|S .. 2S)|2S .. 3S)
    tile of a decode:             [t]          meets splits 0, 1, 2
    tile of a chunk:      [t t t t]            meets splits 0, 1, and for some of its tokens 1 adds nothing
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from paceline.core.errors import UnsupportedModelError
from paceline.engine.attention import AttentionRules, read_rules, store_tokens
from paceline.engine.exact.rungs import cover
from paceline.engine.forward_batch import ForwardBatch, QueryRange
from paceline.engine.kv_cache import KVCache

EXACT_NAME = "paceline_exact"

_MIN_SPLIT_TOKENS = 128
_CHUNK_TILE_TOKENS = 32
_ROW_MULTIPLE = 8  # lower products are often computed by kernels of their own
_ITEM_RUNGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True, slots=True)
class Plan:
    """The tiles of one height, and the items of work: each tile with each of its splits, in order.

    Rows and positions repeat the last token where a tile is not full.
    """

    rows: Tensor  # [num_tiles, tile_tokens], rows of the batch
    positions: Tensor  # [num_tiles, tile_tokens]
    tile: Tensor  # [num_items]
    ordinal: Tensor  # [num_items], which of its tile's items it is
    first_key: Tensor  # [num_items], position of the split's first token
    seen: Tensor  # [num_items, 2], the positions [from, to) that any token of the tile may see
    blocks: Tensor  # [num_items, split_tokens // block_size]; 0 stands for those that there are not


@dataclass(frozen=True, slots=True)
class _Geometry:
    """All that shapes a product, beside the number of items."""

    num_kv_heads: int
    group: int  # query heads that share a key head
    key_dim: int
    value_dim: int
    split_tokens: int


def exact_paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, key_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, key_dim]
    value: Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """In place of attention.py's paged_attention, with the same arguments and the same result but for rounding."""
    context, layer = store_tokens(module, key, value, attention_mask)
    rules = read_rules(query.shape[-1], kwargs)
    if rules.window not in context.shared:
        context.shared[rules.window] = make_plans(
            context.batch, context.cache.layout.block_size, rules.window
        )
    plans = context.shared[rules.window]
    return exact_attention(context.cache, layer, query[0].transpose(0, 1), plans, rules).unsqueeze(0), None


def make_plans(batch: ForwardBatch, block_size: int, window: int | None) -> tuple[Plan, ...]:
    """One for the decodes and one for the chunks, where there are any."""
    decodes = [part for part in batch.queries if part.last - part.first == 1]
    chunks = [part for part in batch.queries if part.last - part.first > 1]
    groups = ((decodes, 1), (chunks, _CHUNK_TILE_TOKENS))
    return tuple(_make_plan(parts, tokens, block_size, window) for parts, tokens in groups if parts)


def exact_attention(
    cache: KVCache, layer: int, query: Tensor, plans: tuple[Plan, ...], rules: AttentionRules
) -> Tensor:
    """query [num_tokens, num_heads, key_dim] to [num_tokens, num_heads, value_dim]."""
    num_tokens, num_heads, key_dim = query.shape
    num_kv_heads, value_dim = cache.values[layer].shape[2:]
    split = split_tokens(cache.layout.block_size)
    geometry = _Geometry(num_kv_heads, num_heads // num_kv_heads, key_dim, value_dim, split)
    out = query.new_empty(num_tokens, num_heads, value_dim)
    for plan in plans:
        # A row that fills up a tile is a copy of the last one and has its bits: it does not matter which is stored.
        tiles = _stack_heads(query[plan.rows].float(), geometry)
        attended = _attend_tiles(cache, layer, tiles, plan, geometry, rules)
        out[plan.rows] = _unstack_heads(attended, plan.rows.shape[1], geometry).to(query.dtype)
    return out


def split_tokens(block_size: int) -> int:
    """Whole blocks."""
    return -(-_MIN_SPLIT_TOKENS // block_size) * block_size


# -- what to compute


def _make_plan(parts: list[QueryRange], tile_tokens: int, block_size: int, window: int | None) -> Plan:
    split = split_tokens(block_size)
    rows, positions, items, blocks = [], [], [], []
    for part in parts:
        table = functional.pad(part.block_table, (0, -len(part.block_table) % (split // block_size)))
        table = table.view(-1, split // block_size)
        start = part.context - (part.last - part.first)
        for first in range(start, part.context, tile_tokens):
            last = min(first + tile_tokens, part.context) - 1
            mine = torch.arange(first, first + tile_tokens).clamp(max=last)
            seen_from = 0 if window is None else max(0, first - window + 1)
            splits = range(seen_from // split, last // split + 1)
            items += [(len(rows), i, each * split, seen_from, last + 1) for i, each in enumerate(splits)]
            blocks.append(table[splits.start : splits.stop])
            rows.append(mine - start + part.first)
            positions.append(mine)
    tile, ordinal, first_key, seen_from_, seen_to = torch.tensor(items).unbind(1)
    return Plan(
        rows=torch.stack(rows),
        positions=torch.stack(positions),
        tile=tile,
        ordinal=ordinal,
        first_key=first_key,
        seen=torch.stack([seen_from_, seen_to], 1),
        blocks=torch.cat(blocks),
    )


def _visible(plan: Plan, items: Tensor, geometry: _Geometry, num_rows: int, window: int | None) -> Tensor:
    """[items, 1, num_rows, split_tokens], True where the token of a row may look."""
    positions = plan.positions[plan.tile[items]].repeat_interleave(geometry.group, 1)
    positions = functional.pad(positions, (0, num_rows - positions.shape[1]), mode="replicate")
    distance = positions.unsqueeze(2) - _key_positions(plan, items, geometry).unsqueeze(1)
    visible = distance >= 0
    return (visible if window is None else visible & (distance < window)).unsqueeze(1)


def _key_positions(plan: Plan, items: Tensor, geometry: _Geometry) -> Tensor:
    return plan.first_key[items].unsqueeze(1) + torch.arange(geometry.split_tokens)


# -- computing it


def partial_attention(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, rules: AttentionRules
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention to one split: the greatest logit, the sum of weights, and the weighted values, for each row.

    query [items, num_kv_heads, rows, key_dim], keys and values [items, num_kv_heads, split_tokens, dim],
    visible [items, 1, rows, split_tokens].
    """
    items, heads = query.shape[:2]
    logits = torch.bmm(query.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2)) * rules.scaling
    if rules.softcap is not None:
        logits = torch.tanh(logits / rules.softcap) * rules.softcap
    logits = logits.unflatten(0, (items, heads)).masked_fill(~visible, float("-inf"))
    highest = logits.amax(-1, keepdim=True)
    weights = torch.exp(logits - highest.masked_fill(highest == float("-inf"), 0.0))
    weighted = torch.bmm(weights.flatten(0, 1), values.flatten(0, 1)).unflatten(0, (items, heads))
    return highest, weights.sum(-1, keepdim=True), weighted


def _attend_tiles(
    cache: KVCache,
    layer: int,
    tiles: Tensor,
    plan: Plan,
    geometry: _Geometry,
    rules: AttentionRules,
) -> Tensor:
    """[num_tiles, num_kv_heads, rows, value_dim]"""
    highest, total, weighted = _all_partials(cache, layer, tiles, plan, geometry, rules)
    reference = highest.amax(1)
    sink = None if rules.sinks is None else _sink_rows(rules.sinks, tiles.shape[2], plan.rows.shape[1], geometry)
    if sink is not None:
        reference = torch.maximum(reference, sink)
    sum_weights, sum_values = torch.zeros_like(reference), torch.zeros_like(weighted[:, 0])
    for ordinal in range(highest.shape[1]):
        factor = torch.exp(highest[:, ordinal] - reference)
        sum_weights = sum_weights + factor * total[:, ordinal]
        sum_values = sum_values + factor * weighted[:, ordinal]
    if sink is not None:
        sum_weights = sum_weights + torch.exp(sink - reference)
    # Adding 0 makes -0 and 0, which are equal numbers, equal bits too.
    return sum_values / sum_weights + 0.0


def _all_partials(
    cache: KVCache, layer: int, tiles: Tensor, plan: Plan, geometry: _Geometry, rules: AttentionRules
) -> tuple[Tensor, Tensor, Tensor]:
    """Each [num_tiles, most items of a tile, num_kv_heads, rows, 1 or value_dim]; items that are not add nothing."""
    num_tiles, heads, rows, _ = tiles.shape
    shape = (num_tiles, int(plan.ordinal.max()) + 1, heads, rows)
    highest, total = tiles.new_full((*shape, 1), float("-inf")), tiles.new_zeros(*shape, 1)
    weighted = tiles.new_zeros(*shape, geometry.value_dim)
    rungs = _agreeing_items(geometry, plan.rows.shape[1], torch.get_num_threads())
    for items in _calls(len(plan.tile), rungs):
        keys, values = _gather(cache, layer, plan, items, geometry)
        visible = _visible(plan, items, geometry, rows, rules.window)
        at = plan.tile[items], plan.ordinal[items]
        highest[at], total[at], weighted[at] = partial_attention(tiles[at[0]], keys, values, visible, rules)
    return highest, total, weighted


def _gather(
    cache: KVCache, layer: int, plan: Plan, items: Tensor, geometry: _Geometry
) -> tuple[Tensor, Tensor]:
    """Each split's keys and values, [items, num_kv_heads, split_tokens, dim]."""
    blocks = plan.blocks[items]
    keys, values = (
        memory[layer][blocks].flatten(1, 2).transpose(1, 2).float() for memory in (cache.keys, cache.values)
    )
    # What nobody sees may be left over from anything, and 0 times infinity is not 0.
    positions, seen = _key_positions(plan, items, geometry), plan.seen[items]
    unseen = (positions < seen[:, :1]) | (positions >= seen[:, 1:])
    return keys, values.masked_fill(unseen.unsqueeze(1).unsqueeze(3), 0.0)


def _calls(num_items: int, rungs: tuple[int, ...]) -> Iterator[Tensor]:
    """The items of each call; the last one is repeated where a rung is not full."""
    for first, _, height in cover(num_items, rungs):
        yield torch.arange(first, first + height).clamp(max=num_items - 1)


# -- rows: the query heads that share a key head, for each token of a tile


def _stack_heads(tiles: Tensor, geometry: _Geometry) -> Tensor:
    """[num_tiles, tile_tokens, num_heads, key_dim] to [num_tiles, num_kv_heads, rows, key_dim]."""
    tiles = tiles.unflatten(2, (geometry.num_kv_heads, geometry.group))
    return _fill_rows(tiles.transpose(1, 2).flatten(2, 3))


def _unstack_heads(tiles: Tensor, tile_tokens: int, geometry: _Geometry) -> Tensor:
    """[num_tiles, num_kv_heads, rows, value_dim] to [num_tiles, tile_tokens, num_heads, value_dim]."""
    tiles = tiles[:, :, : tile_tokens * geometry.group].unflatten(2, (tile_tokens, geometry.group))
    return tiles.transpose(1, 2).flatten(2, 3)


def _sink_rows(sinks: Tensor, num_rows: int, tile_tokens: int, geometry: _Geometry) -> Tensor:
    """[num_kv_heads, num_rows, 1]"""
    rows = sinks.float().view(geometry.num_kv_heads, 1, geometry.group, 1).expand(-1, tile_tokens, -1, 1)
    return functional.pad(rows.flatten(1, 2), (0, 0, 0, num_rows - tile_tokens * geometry.group))


def _fill_rows(tiles: Tensor) -> Tensor:
    return functional.pad(tiles, (0, 0, 0, -tiles.shape[2] % _ROW_MULTIPLE))


# -- which calls agree


@cache
def _agreeing_items(geometry: _Geometry, tile_tokens: int, num_threads: int) -> tuple[int, ...]:
    """How many items a call may have: those numbers that give the bits of one item of a full tile.

    The number of threads is part of the question: it may choose the kernel.
    """
    del num_threads
    with torch.inference_mode():
        query, keys, values = _examples(geometry)
        whole = torch.cat([_example(query, keys, values, torch.tensor([i])) for i in range(len(query))])
        tiles = query if tile_tokens > 1 else _fill_rows(query[:, :, : geometry.group])
        bits = whole if tile_tokens > 1 else whole[:, :, : geometry.group]
        rungs = tuple(rung for rung in _ITEM_RUNGS if _agree(tiles, keys, values, bits, rung))
    if 1 not in rungs:
        raise UnsupportedModelError(
            "this machine's attention gives a token other bits alone than in a chunk; exact mode cannot run here"
        )
    return rungs


def _agree(tiles: Tensor, keys: Tensor, values: Tensor, bits: Tensor, rung: int) -> bool:
    """Whether calls of `rung` items give `bits`, with each item at two places."""
    order = torch.arange(len(tiles))
    for items in (*order.split(rung)[:2], *order.flip(0).split(rung)[:2]):
        if len(items) == rung:
            out = _example(tiles, keys, values, items)
            if not torch.equal(out[:, :, : bits.shape[2]], bits[items]):
                return False
    return True


def _examples(geometry: _Geometry) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(geometry.key_dim)
    sizes = (
        (_CHUNK_TILE_TOKENS * geometry.group, geometry.key_dim),
        (geometry.split_tokens, geometry.key_dim),
        (geometry.split_tokens, geometry.value_dim),
    )
    shapes = [(_ITEM_RUNGS[-1], geometry.num_kv_heads, *size) for size in sizes]
    query, keys, values = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, keys, values


def _example(query: Tensor, keys: Tensor, values: Tensor, items: Tensor) -> Tensor:
    """Weighted values and, as a last column, the sum of weights."""
    visible = torch.ones(len(items), 1, query.shape[2], keys.shape[2], dtype=torch.bool)
    rules = AttentionRules(query.shape[-1] ** -0.5)
    _, total, weighted = partial_attention(query[items], keys[items], values[items], visible, rules)
    return torch.cat([weighted, total], -1)


AttentionInterface.register(EXACT_NAME, exact_paged_attention)
