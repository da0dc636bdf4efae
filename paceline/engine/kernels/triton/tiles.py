"""What decode and prefill share: rows of queries meet a sequence's tokens, one tile of them after the other (online softmax).

Tiles are counted from the beginning of the sequence, and one that a row sees nothing of leaves the row's numbers as they are, to the
bit. So what a row gives does not depend on which other rows are computed beside it.

Nothing is loaded that no row may see: such slots can hold anything, numbers that are none among it.
"""

import triton
import triton.language as tl

# Powers of two are what the processor has an instruction for; scores are multiplied by this, and the rest is the same.
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def seen_units(first_seen, end, unit: tl.constexpr, num_sink_tokens: tl.constexpr):
    """Which units of so many tokens hold what is seen of [0, end): those of the sinks that lie before, and all from `first` on.

    | sinks |  nobody looks here  | first ...             | end
    0       num_sinks             first_seen is in this one
    """
    first = first_seen // unit
    num_sinks = tl.minimum(tl.cdiv(num_sink_tokens, unit), first)
    return first, num_sinks, num_sinks + tl.cdiv(end, unit) - first


@triton.jit
def unit_at(ordinal, first, num_sinks):
    """The number of one of these units, counted from the beginning of the sequence."""
    return tl.where(ordinal < num_sinks, ordinal, first + ordinal - num_sinks)


@triton.jit
def numbers_of(codes, kv_dtype: tl.constexpr, dtype: tl.constexpr):
    """Stored elements as `dtype`, none of them rounded; see `_unpack` in kv_quant.py. Those of fp8 are in units of 256."""
    if kv_dtype == "fp8":
        bits = (codes.to(tl.int16) << 7) & -16385  # the sign stays where it is, and the bit after it goes
        numbers = bits.to(tl.float16, bitcast=True)
    else:
        numbers = codes
    return numbers.to(dtype)


@triton.jit
def load_queries(rows_at, is_row, dim: tl.constexpr, width: tl.constexpr):
    """[rows, width]: `dim` elements from each place, and zeros where there is no row."""
    dims = tl.arange(0, width)
    return tl.load(rows_at[:, None] + dims[None, :], mask=is_row[:, None] & (dims < dim)[None, :], other=0.0)


@triton.jit
def load_vectors(
    base,
    blocks,
    slots,
    is_there,
    block_stride,
    dim: tl.constexpr,
    width: tl.constexpr,
    vector: tl.constexpr,
    kv_dtype: tl.constexpr,
    dtype: tl.constexpr,
):
    """[tokens, width]: what the pool holds for these tokens in one head, and zeros where nothing is to be looked at."""
    dims = tl.arange(0, width)
    at = blocks[:, None] * block_stride + (slots * vector)[:, None] + dims[None, :]
    codes = tl.load(base + at, mask=is_there[:, None] & (dims < dim)[None, :], other=0)
    return numbers_of(codes, kv_dtype, dtype)


@triton.jit
def load_scales(base, blocks, slots, is_there, scale_block_stride, kv_dtype: tl.constexpr):
    """[tokens], float32: what their vectors are to be multiplied by."""
    scales = tl.full(blocks.shape, 256.0 if kv_dtype == "fp8" else 1.0, tl.float32)
    if kv_dtype != "plain":
        bits = tl.load(base + blocks * scale_block_stride + slots, mask=is_there, other=0)
        scales = scales * (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return scales


@triton.jit
def scaled(vectors, scales, kv_dtype: tl.constexpr):
    """As `dequantise` has them: each element times its scale, rounded once."""
    return vectors if kv_dtype == "plain" else vectors * scales.to(vectors.dtype)[:, None]


@triton.jit
def capped(scores, softcap: tl.constexpr):
    """No score beyond the cap, by softcap * tanh(scores / softcap), in a form that neither overflows nor needs a library; 0 is no cap."""
    if softcap > 0.0:
        scores = softcap - 2.0 * softcap / (tl.exp2(scores * (2.0 * LOG2_E / softcap)) + 1.0)
    return scores


@triton.jit
def larger_of(largest, more_largest):
    """The larger of two parts' largest scores, and the same as what scores are measured against.

    That is 0 where neither part has a token, since the difference of two infinities is no number.
    """
    both = tl.maximum(largest, more_largest)
    return both, tl.where(both == float("-inf"), 0.0, both)


@triton.jit
def with_sink(largest, total, sink):
    """The sum of weights with that of a sink, which has no value; and what the weighted values are multiplied by."""
    _, measure = larger_of(largest, sink * LOG2_E)
    shrink = tl.exp2(largest - measure)
    return total * shrink + tl.exp2(sink * LOG2_E - measure), shrink


@triton.jit
def attend_tiles(
    rows_at,
    is_row,
    positions,
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
    block_size: tl.constexpr,
    num_kv_heads: tl.constexpr,
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
):
    """Queries [rows] in memory, of tokens at `positions`, against the tiles of one KV head.

    Gives of each row the largest score, the sum of the weights and the weighted values [rows, value_width], in powers of two.
    """
    q_head = load_queries(rows_at, is_row, head_dim, head_width)
    q_tail = q_head
    if tail_dim > 0:
        q_tail = load_queries(rows_at + head_dim, is_row, tail_dim, tail_width)
    dtype: tl.constexpr = q_head.dtype
    keys += kv_head * key_vector
    tails += kv_head * tail_vector
    values += kv_head * value_vector
    if kv_dtype != "plain":
        key_scales += kv_head
        tail_scales += kv_head
        value_scales += kv_head
    largest = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    sums = tl.zeros([rows, value_width], tl.float32)
    for ordinal in range(num_tiles):
        tokens = unit_at(ordinal, first_tile, num_sink_tiles) * tile_tokens + tl.arange(0, tile_tokens)
        is_there = tokens < end
        if window > 0:
            is_there = is_there & ((tokens >= first_seen) | (tokens < num_sink_tokens))
        blocks = tl.load(table + tokens // block_size, mask=is_there, other=0)
        slots = tokens % block_size * num_kv_heads

        heads = load_vectors(
            keys, blocks, slots, is_there, block_stride, head_dim, head_width, key_vector, kv_dtype, dtype
        )
        head_scales = load_scales(key_scales, blocks, slots, is_there, scale_block_stride, kv_dtype)
        scores = tl.dot(q_head, tl.trans(heads), input_precision="ieee") * head_scales[None, :]
        if tail_dim > 0:
            more = load_vectors(
                tails,
                blocks,
                slots,
                is_there,
                block_stride,
                tail_dim,
                tail_width,
                tail_vector,
                kv_dtype,
                dtype,
            )
            more_scales = load_scales(tail_scales, blocks, slots, is_there, scale_block_stride, kv_dtype)
            scores += tl.dot(q_tail, tl.trans(more), input_precision="ieee") * more_scales[None, :]
        scores = capped(scores * scaling, softcap) * LOG2_E

        distance = positions[:, None] - tokens[None, :]
        is_seen = is_there[None, :] & (distance >= 0)
        if window > 0:
            is_seen = is_seen & ((distance < window) | (tokens < num_sink_tokens)[None, :])
        scores = tl.where(is_seen, scores, float("-inf"))

        both, measure = larger_of(largest, tl.max(scores, 1))
        shrink = tl.exp2(largest - measure)
        weights = tl.exp2(scores - measure[:, None])
        largest, total = both, total * shrink + tl.sum(weights, 1)
        seen, seen_scales = heads, head_scales
        if not is_latent:
            seen = load_vectors(
                values,
                blocks,
                slots,
                is_there,
                block_stride,
                value_dim,
                value_width,
                value_vector,
                kv_dtype,
                dtype,
            )
            seen_scales = load_scales(value_scales, blocks, slots, is_there, scale_block_stride, kv_dtype)
        seen = scaled(seen, seen_scales, kv_dtype)
        sums = tl.dot(weights.to(dtype), seen, sums * shrink[:, None], input_precision="ieee")
    return largest, total, sums
