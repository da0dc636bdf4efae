"""Attention whose result for a token does not depend on how its context was cut into steps, or on the rest of the batch.

A context is cut into splits of a fixed number of tokens, counted from its first one. Each tile of queries meets each
split in a product of fixed shape, and a token's splits are summed from the first to the last. A split that a token may
not see adds nothing, to the bit. Everything between the products is in float32.

    split        0        1        2
    tokens    |0 .. S)|S .. 2S)|2S .. 3S)
    tile of a decode:             [t]          meets splits 0, 1, 2
    tile of a chunk:      [t t t t]            meets splits 0, 1, and for some of its tokens 1 adds nothing
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from paceline.core.errors import UnsupportedModelError
from paceline.engine.attention import AttentionRules, store_tokens
from paceline.engine.exact.rungs import cover
from paceline.engine.forward_batch import ForwardBatch, QueryRange
from paceline.engine.kv_cache import KVCache

EXACT_NAME = "paceline_exact"

_MIN_SPLIT_TOKENS = 128
_CHUNK_TILE_TOKENS = 32
_ROW_MULTIPLE = 8  # lower products are often computed by kernels of their own
_ITEM_RUNGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_MASKED = float("-inf")


@dataclass(frozen=True, slots=True)
class Geometry:
    """All that shapes a product, beside the number of items."""

    num_kv_heads: int
    group: int  # query heads that share a key head
    key_dim: int
    value_dim: int
    split_tokens: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Call:
    """Items of work that are computed at once: each is a tile and one of its splits.

    In the first `num_whole` of them every token of the tile sees every token of the split.
    """

    tile: Tensor  # [num_items]
    ordinal: Tensor  # [num_items], which of its tile's items it is
    blocks: Tensor  # [num_items, split_tokens // block_size]; 0 stands for those that there are not
    num_whole: int
    hidden: Tensor  # [the other items, 1, rows, split_tokens], True where the token of a row may not look
    unseen: Tensor  # [the other items, 1, split_tokens, 1], True where no token of the tile may look


@dataclass(frozen=True, slots=True)
class Plan:
    """The tiles of one height, and what is to be done. A tile that is not full repeats its last token."""

    rows: Tensor  # [num_tiles, tile_tokens], rows of the batch
    max_items: int  # that a tile has
    calls: tuple[Call, ...]

    @property
    def tile_tokens(self) -> int:
        """Its height."""
        return self.rows.shape[1]


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
    geometry = _geometry_of(context.cache, layer, num_heads=query.shape[1])
    if (geometry, rules.window) not in context.shared:
        context.shared[geometry, rules.window] = make_plans(context.batch, geometry, rules.window)
    plans = context.shared[geometry, rules.window]
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


def _geometry_of(cache: KVCache, layer: int, num_heads: int) -> Geometry:
    block_size, sizes = cache.layout.block_size, cache.layout.layers[layer]
    split_tokens = -(-_MIN_SPLIT_TOKENS // block_size) * block_size
    group = num_heads // sizes.num_kv_heads
    return Geometry(sizes.num_kv_heads, group, sizes.key_dim, sizes.value_dim, split_tokens, block_size)


# -- what is to be done


@dataclass(frozen=True, slots=True)
class _Item:
    tile: int
    ordinal: int
    first_key: int
    seen_from: int  # the positions [seen_from, seen_to) that any token of the tile may see
    seen_to: int
    is_whole: bool
    blocks: Tensor


def make_plans(batch: ForwardBatch, geometry: Geometry, window: int | None) -> tuple[Plan, ...]:
    """One for the decodes and one for the chunks, where there are any."""
    decodes = [part for part in batch.queries if part.last - part.first == 1]
    chunks = [part for part in batch.queries if part.last - part.first > 1]
    groups = ((decodes, 1), (chunks, _CHUNK_TILE_TOKENS))
    return tuple(_make_plan(parts, height, geometry, window) for parts, height in groups if parts)


def _make_plan(parts: list[QueryRange], height: int, geometry: Geometry, window: int | None) -> Plan:
    rows: list[Tensor] = []
    positions: list[Tensor] = []
    items: list[_Item] = []
    for part in parts:
        start = part.context - (part.last - part.first)
        splits = _splits_of(part.block_table, geometry)
        for first in range(start, part.context, height):
            last = min(first + height, part.context) - 1
            items += _items_of(len(rows), first, last, splits, geometry, window)
            positions.append(torch.arange(first, first + height).clamp(max=last))
            rows.append(positions[-1] - start + part.first)
    # Whole ones first: in a call, the others stand together at its end.
    items.sort(key=lambda item: not item.is_whole)
    rungs = agreeing_items(geometry, height, torch.get_num_threads())
    row_positions = _fill_rows(torch.stack(positions).repeat_interleave(geometry.group, 1), axis=1)
    calls = tuple(
        _make_call(_repeat_last(items[first:last], size), row_positions, geometry, window)
        for first, last, size in cover(len(items), rungs)
    )
    return Plan(torch.stack(rows), max(item.ordinal for item in items) + 1, calls)


def _splits_of(block_table: Tensor, geometry: Geometry) -> Tensor:
    """As [num_splits, blocks of a split]."""
    num_blocks = geometry.split_tokens // geometry.block_size
    return functional.pad(block_table, (0, -len(block_table) % num_blocks)).view(-1, num_blocks)


def _items_of(
    tile: int, first: int, last: int, splits: Tensor, geometry: Geometry, window: int | None
) -> list[_Item]:
    """Those of the tile whose tokens stand at positions first to last."""
    size = geometry.split_tokens
    seen_from = 0 if window is None else max(0, first - window + 1)
    all_see_from = 0 if window is None else max(0, last - window + 1)
    return [
        _Item(
            tile=tile,
            ordinal=ordinal,
            first_key=split * size,
            seen_from=seen_from,
            seen_to=last + 1,
            is_whole=all_see_from <= split * size and (split + 1) * size <= first + 1,
            blocks=splits[split],
        )
        for ordinal, split in enumerate(range(seen_from // size, last // size + 1))
    ]


def _make_call(items: list[_Item], row_positions: Tensor, geometry: Geometry, window: int | None) -> Call:
    tile = torch.tensor([item.tile for item in items])
    num_whole = sum(item.is_whole for item in items)
    edges = items[num_whole:]
    first_keys = torch.tensor([item.first_key for item in edges], dtype=torch.long)
    keys = first_keys.unsqueeze(1) + torch.arange(geometry.split_tokens)
    distance = row_positions[tile[num_whole:]].unsqueeze(2) - keys.unsqueeze(1)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    seen = torch.tensor([(item.seen_from, item.seen_to) for item in edges], dtype=torch.long).view(-1, 2)
    return Call(
        tile=tile,
        ordinal=torch.tensor([item.ordinal for item in items]),
        blocks=torch.stack([item.blocks for item in items]),
        num_whole=num_whole,
        hidden=hidden.unsqueeze(1),
        unseen=((keys < seen[:, :1]) | (keys >= seen[:, 1:]))[:, None, :, None],
    )


def _repeat_last(items: list[_Item], size: int) -> list[_Item]:
    """Fills a call up; what is computed twice is stored twice, with the same bits."""
    return items + items[-1:] * (size - len(items))


# -- doing it


def partial_attention(
    query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention to one split: the greatest logit, the sum of weights, and the weighted values, for each row.

    query [items, num_kv_heads, rows, key_dim], scaled; keys and values [items, num_kv_heads, split_tokens, dim];
    hidden [the last items, 1, rows, split_tokens].
    """
    items, heads = query.shape[:2]
    logits = torch.bmm(query.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.view(items, heads, *logits.shape[1:])
    logits[items - len(hidden) :].masked_fill_(hidden, _MASKED)
    highest = logits.amax(-1, keepdim=True)
    weights = logits.sub_(highest.masked_fill(highest == _MASKED, 0.0)).exp_()
    weighted = torch.bmm(weights.flatten(0, 1), values.flatten(0, 1))
    return highest, weights.sum(-1, keepdim=True), weighted.view(items, heads, *weighted.shape[1:])


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
    highest, total = tiles.new_full((*shape, 1), _MASKED), tiles.new_zeros(*shape, 1)
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
    return _fill_rows(tiles.transpose(1, 2).flatten(2, 3), axis=2)


def _unstack_heads(tiles: Tensor, tile_tokens: int, geometry: Geometry) -> Tensor:
    """[num_tiles, num_kv_heads, rows, value_dim] to [num_tiles, tile_tokens, num_heads, value_dim]."""
    tiles = tiles[:, :, : tile_tokens * geometry.group]
    tiles = tiles.reshape(*tiles.shape[:2], tile_tokens, geometry.group, -1)
    return tiles.transpose(1, 2).flatten(2, 3)


def _sink_rows(sinks: Tensor, tile_tokens: int, geometry: Geometry) -> Tensor:
    """As [num_kv_heads, rows, 1]."""
    rows = sinks.float().view(geometry.num_kv_heads, 1, geometry.group, 1).expand(-1, tile_tokens, -1, 1)
    return _fill_rows(rows.flatten(1, 2), axis=1)


def _fill_rows(rows: Tensor, axis: int) -> Tensor:
    """Zeros up to a multiple that suits a product; nobody reads what becomes of them."""
    return functional.pad(rows, (0, 0) * (rows.dim() - 1 - axis) + (0, -rows.shape[axis] % _ROW_MULTIPLE))


# -- which calls agree


@cache
def agreeing_items(geometry: Geometry, tile_tokens: int, num_threads: int) -> tuple[int, ...]:
    """How many items a call may have: those numbers that give the bits of one item with a full tile.

    The number of threads is part of the question: it may choose the kernel.
    """
    del num_threads
    with torch.inference_mode():
        query, keys, values = _examples(geometry)
        bits = torch.cat(
            [_example(query, keys, values, index) for index in torch.arange(len(query)).view(-1, 1)]
        )
        if tile_tokens == 1:
            query, bits = _fill_rows(query[:, :, : geometry.group], axis=2), bits[:, :, : geometry.group]
        rungs = tuple(rung for rung in _ITEM_RUNGS if _agrees(query, keys, values, bits, rung))
    if 1 not in rungs:
        raise UnsupportedModelError(
            "this machine's attention gives a token other bits alone than in a chunk; exact mode cannot run here"
        )
    return rungs


def _agrees(query: Tensor, keys: Tensor, values: Tensor, bits: Tensor, rung: int) -> bool:
    """Whether calls of `rung` items give `bits`, with the items in two orders."""
    order = torch.arange(len(query))
    calls = [
        items
        for each in (order, order.flip(0))
        for items in torch.split(each, rung)[:2]
        if len(items) == rung
    ]
    return all(
        torch.equal(_example(query, keys, values, items)[:, :, : bits.shape[2]], bits[items])
        for items in calls
    )


def _examples(geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """Random items: in float32 a sum in another order shows in most of its results."""
    generator = torch.Generator().manual_seed(geometry.key_dim)
    sizes = (
        (_CHUNK_TILE_TOKENS * geometry.group, geometry.key_dim),
        (geometry.split_tokens, geometry.key_dim),
        (geometry.split_tokens, geometry.value_dim),
    )
    shapes = [(_ITEM_RUNGS[-1], geometry.num_kv_heads, *size) for size in sizes]
    query, keys, values = (torch.randn(shape, generator=generator) for shape in shapes)
    return query * geometry.key_dim**-0.5, keys, values


def _example(query: Tensor, keys: Tensor, values: Tensor, items: Tensor) -> Tensor:
    """Weighted values and, as a last column, the sum of weights."""
    hidden = torch.zeros(0, 1, query.shape[2], keys.shape[2], dtype=torch.bool)
    _, total, weighted = partial_attention(query[items], keys[items], values[items], hidden, None)
    return torch.cat([weighted, total], -1)


AttentionInterface.register(EXACT_NAME, exact_paged_attention)
