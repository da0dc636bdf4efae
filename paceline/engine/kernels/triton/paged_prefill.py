"""Attention of chunks of prompts: the last tokens of each context attend to it, causally.

A program takes a run of a sequence's query tokens and the heads that share a KV head, as rows of one tile. A row gives the same bits wherever
chunks are cut, and beside whatever rows: tiles of keys are counted from the beginning of the context, not of the chunk.
"""

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
from paceline.engine.kernels.triton.tile_sizes import prefill_tile
from paceline.engine.kernels.triton.tiles import attend_tiles, seen_units, with_sink


def paged_prefill(query: Tensor, views: LayerViews, batch: RaggedBatch, rules: AttentionRules) -> Tensor:
    """See `paged_attention` in paged_attention.py; a sequence may have any number of tokens."""
    out = empty_answer(query, views)
    plan_prefill(out, query, views, batch, rules).run()
    return out


def plan_prefill(
    out: Tensor, query: Tensor, views: LayerViews, batch: RaggedBatch, rules: AttentionRules
) -> Launch:
    """The call that writes the answer to `out`."""
    known = attention_arguments(out, query, views, batch, rules)
    tile = prefill_tile(KeyCut.of(views.layer), query.element_size())
    heads_a_tile = min(known["group"], tile.rows)
    tokens_a_tile = tile.rows // heads_a_tile
    known |= {
        "rows": tile.rows,
        "tile_tokens": tile.tile_tokens,
        "heads_a_tile": heads_a_tile,
        "tokens_a_tile": tokens_a_tile,
    }
    grid = (
        len(batch.tables.sequences),
        known["num_kv_heads"] * -(-known["group"] // heads_a_tile),
        -(-batch.max_tokens // tokens_a_tile),
    )
    return Launch.of(attend_chunk, grid, known, num_warps=tile.num_warps, num_stages=tile.num_stages)


@triton.jit
def attend_chunk(
    out,
    query,
    keys,
    tails,
    values,
    key_scales,
    tail_scales,
    value_scales,
    sequences,
    tables,
    sinks,
    query_token_stride,
    query_head_stride,
    block_stride,
    scale_block_stride,
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
    heads_a_tile: tl.constexpr,
    tokens_a_tile: tl.constexpr,
):
    """Some tokens of one sequence, and the heads of one KV head, or as many of them as there are rows."""
    sequence = tl.program_id(0)
    tiles_a_group: tl.constexpr = (group + heads_a_tile - 1) // heads_a_tile
    kv_head = tl.program_id(1) // tiles_a_group
    first = tl.load(sequences + sequence * 4)
    last = tl.load(sequences + sequence * 4 + 1)
    context = tl.load(sequences + sequence * 4 + 2).to(tl.int32)
    table = tables + tl.load(sequences + sequence * 4 + 3)
    num_tokens = (last - first).to(tl.int32)
    begin = tl.program_id(2) * tokens_a_tile
    if begin >= num_tokens:
        return
    start = context - num_tokens
    end = start + tl.minimum(begin + tokens_a_tile, num_tokens)
    first_seen = tl.maximum(start + begin - window + 1, 0) if window > 0 else begin * 0
    first_tile, num_sink_tiles, num_tiles = seen_units(first_seen, end, tile_tokens, num_sink_tokens)

    row = tl.arange(0, rows)
    tokens = begin + row // heads_a_tile
    of_group = tl.program_id(1) % tiles_a_group * heads_a_tile + row % heads_a_tile
    is_row = (row < tokens_a_tile * heads_a_tile) & (tokens < num_tokens) & (of_group < group)
    heads = kv_head * group + of_group
    rows_at = query + (first + tokens) * query_token_stride + heads * query_head_stride
    most, total, sums = attend_tiles(
        rows_at,
        is_row,
        start + tokens,
        kv_head,
        keys,
        tails,
        values,
        key_scales,
        tail_scales,
        value_scales,
        table,
        first_tile,
        num_sink_tiles,
        num_tiles,
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
    if sinks is not None:
        total, shrink = with_sink(most, total, tl.load(sinks + heads, mask=is_row, other=0.0))
        sums = sums * shrink[:, None]
    dims = tl.arange(0, value_width)
    at = ((first + tokens) * num_kv_heads * group + heads) * value_dim
    tl.store(
        out + at[:, None] + dims[None, :],
        sums / total[:, None],
        mask=is_row[:, None] & (dims < value_dim)[None, :],
    )
