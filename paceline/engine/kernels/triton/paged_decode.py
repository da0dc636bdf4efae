"""Attention of sequences that decode: one query token each, against a context that is cut into splits, and a kernel that joins them.

A split is a fixed run of the context's tokens, whoever else is in the batch, and splits are always joined, in order. So what a sequence gets
depends on itself alone. A program computes all heads that share a KV head, and so reads each key once (grouped-query attention).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.engine.attention import AttentionRules
from paceline.engine.kernels.triton.attention_arguments import (
    KeyCut,
    RaggedBatch,
    attention_arguments,
    empty_answer,
)
from paceline.engine.kernels.triton.launch import Launch
from paceline.engine.kernels.triton.layer_views import LayerViews
from paceline.engine.kernels.triton.tile_sizes import SPLIT_TOKENS, decode_tile
from paceline.engine.kernels.triton.tiles import (
    attend_tiles,
    larger_of,
    seen_units,
    unit_at,
    with_sink,
)


def paged_decode(query: Tensor, views: LayerViews, batch: RaggedBatch, rules: AttentionRules) -> Tensor:
    """See `paged_attention` in paged_attention.py; each sequence of the batch has one token."""
    out = empty_answer(query, views)
    for launch in plan_decode(out, query, views, batch, rules):
        launch.run()
    return out


def plan_decode(
    out: Tensor, query: Tensor, views: LayerViews, batch: RaggedBatch, rules: AttentionRules
) -> tuple[Launch, Launch]:
    """The calls that write the answer to `out`, in order."""
    assert batch.max_tokens == 1, "a decode is of one token a sequence"
    known = attention_arguments(out, query, views, batch, rules)
    tile = decode_tile(KeyCut.of(views.layer), query.element_size())
    num_sequences, num_heads = len(batch.tables.sequences), query.shape[1]
    max_splits = _max_splits(batch.max_context, rules)
    parts = (num_sequences, num_heads, max_splits)
    known |= {
        "sums": query.new_empty((*parts, known["value_dim"]), dtype=torch.float32),
        "largest": query.new_empty(parts, dtype=torch.float32),
        "totals": query.new_empty(parts, dtype=torch.float32),
        "max_splits": max_splits,
        "num_heads": num_heads,
        "split_tokens": SPLIT_TOKENS,
        "rows": tile.rows,
        "tile_tokens": tile.tile_tokens,
    }
    grid = (num_sequences, known["num_kv_heads"] * -(-known["group"] // tile.rows), max_splits)
    split = Launch.of(attend_split, grid, known, num_warps=tile.num_warps, num_stages=tile.num_stages)
    return split, Launch.of(join_splits, (num_sequences, num_heads), known)


def _max_splits(max_context: int, rules: AttentionRules) -> int:
    """How many splits the longest sequence sees at most."""
    whole = -(-max_context // SPLIT_TOKENS)
    window, num_sink_tokens = rules.view
    if window is None:
        return whole
    return min(whole, -(-window // SPLIT_TOKENS) + 1 + -(-num_sink_tokens // SPLIT_TOKENS))


@triton.jit
def _first_seen(context, window: tl.constexpr):
    """See View.first_visible, of the context's last token."""
    return tl.maximum(context - window, 0) if window > 0 else context * 0


@triton.jit
def attend_split(
    query,
    keys,
    tails,
    values,
    key_scales,
    tail_scales,
    value_scales,
    sequences,
    tables,
    sums,
    largest,
    totals,
    query_token_stride,
    query_head_stride,
    block_stride,
    scale_block_stride,
    max_splits,
    scaling,
    block_size: tl.constexpr,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    kv_dtype: tl.constexpr,
    head_dim: tl.constexpr,
    tail_dim: tl.constexpr,
    value_dim: tl.constexpr,
    head_width: tl.constexpr,
    tail_width: tl.constexpr,
    value_width: tl.constexpr,
    key_vector: tl.constexpr,
    tail_vector: tl.constexpr,
    value_vector: tl.constexpr,
    is_latent: tl.constexpr,
    softcap: tl.constexpr,
    window: tl.constexpr,
    num_sink_tokens: tl.constexpr,
    rows: tl.constexpr,
    tile_tokens: tl.constexpr,
    split_tokens: tl.constexpr,
):
    """One split of one sequence, for `rows` heads that share a KV head: its part of their sums."""
    sequence = tl.program_id(0)
    tiles_a_group: tl.constexpr = (group + rows - 1) // rows
    kv_head = tl.program_id(1) // tiles_a_group
    ordinal = tl.program_id(2)
    token = tl.load(sequences + sequence * 4)
    context = tl.load(sequences + sequence * 4 + 2).to(tl.int32)
    table = tables + tl.load(sequences + sequence * 4 + 3)
    first_seen = _first_seen(context, window)
    first_split, num_sink_splits, num_splits = seen_units(first_seen, context, split_tokens, num_sink_tokens)
    if ordinal >= num_splits:
        return
    begin = unit_at(ordinal, first_split, num_sink_splits) * split_tokens
    end = tl.minimum(begin + split_tokens, context)

    of_group = tl.program_id(1) % tiles_a_group * rows + tl.arange(0, rows)
    is_row = of_group < group
    heads = kv_head * group + of_group
    rows_at = query + token * query_token_stride + heads * query_head_stride
    most, total, row_sums = attend_tiles(
        rows_at,
        is_row,
        tl.full([rows], 0, tl.int32) + context - 1,
        kv_head,
        keys,
        tails,
        values,
        key_scales,
        tail_scales,
        value_scales,
        table,
        begin // tile_tokens,
        0,
        tl.cdiv(end - begin, tile_tokens),
        first_seen,
        end,
        block_stride,
        scale_block_stride,
        scaling,
        block_size,
        num_kv_heads,
        kv_dtype,
        head_dim,
        tail_dim,
        value_dim,
        head_width,
        tail_width,
        value_width,
        key_vector,
        tail_vector,
        value_vector,
        is_latent,
        softcap,
        window,
        num_sink_tokens,
        rows,
        tile_tokens,
    )
    at = (sequence * num_kv_heads * group + heads).to(tl.int64) * max_splits + ordinal
    value_dims = tl.arange(0, value_width)
    tl.store(largest + at, most, mask=is_row)
    tl.store(totals + at, total, mask=is_row)
    tl.store(
        sums + at[:, None] * value_dim + value_dims[None, :],
        row_sums,
        mask=is_row[:, None] & (value_dims < value_dim)[None, :],
    )


@triton.jit
def join_splits(
    out,
    sequences,
    sinks,
    sums,
    largest,
    totals,
    max_splits,
    num_heads,
    value_dim: tl.constexpr,
    value_width: tl.constexpr,
    window: tl.constexpr,
    num_sink_tokens: tl.constexpr,
    split_tokens: tl.constexpr,
):
    """One head of one sequence: its splits, in order, and last the sink, which has a weight and no value."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(sequences + sequence * 4)
    context = tl.load(sequences + sequence * 4 + 2).to(tl.int32)
    _, _, num_splits = seen_units(_first_seen(context, window), context, split_tokens, num_sink_tokens)
    at = (sequence * num_heads + head).to(tl.int64) * max_splits
    dims = tl.arange(0, value_width)
    is_there = dims < value_dim
    most, total = tl.load(largest + at), tl.load(totals + at)
    joined = tl.load(sums + at * value_dim + dims, mask=is_there, other=0.0)
    for ordinal in range(1, num_splits):
        largest_of_split = tl.load(largest + at + ordinal)
        both, measure = larger_of(most, largest_of_split)
        shrink, grow = tl.exp2(most - measure), tl.exp2(largest_of_split - measure)
        more = tl.load(sums + (at + ordinal) * value_dim + dims, mask=is_there, other=0.0)
        total = total * shrink + tl.load(totals + at + ordinal) * grow
        most, joined = both, joined * shrink + more * grow
    if sinks is not None:
        total, shrink = with_sink(most, total, tl.load(sinks + head))
        joined = joined * shrink
    tl.store(out + (token * num_heads + head) * value_dim + dims, joined / total, mask=is_there)
