"""Stores new tokens' keys and values in the pool, quantised where it is: what KVCache.write_tokens does, bit for bit."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from paceline.engine.kernels.triton.launch import Launch
from paceline.engine.kernels.triton.layer_views import LayerViews, width_of


def write_kv(views: LayerViews, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """`slots` [num_tokens]; keys and values [num_tokens, num_kv_heads, dim]."""
    plan_write(views, slots, keys, values).run()


def plan_write(views: LayerViews, slots: Tensor, keys: Tensor, values: Tensor) -> Launch:
    """The call that does it: a program for each token, with all its heads."""
    assert keys.stride(2) == values.stride(2) == 1, "a vector's elements stand side by side"
    (stored_keys, stored_values), (key_scales, value_scales) = views.elements, views.scales
    arguments: dict[str, Any] = {
        "slots": slots,
        "keys": keys,
        "values": values,
        "stored_keys": stored_keys,
        "stored_values": stored_values,
        "key_scales": key_scales,
        "value_scales": value_scales,
        "key_token_stride": keys.stride(0),
        "key_head_stride": keys.stride(1),
        "value_token_stride": values.stride(0),
        "value_head_stride": values.stride(1),
        "key_dim": views.layer.key_dim,
        "value_dim": views.layer.value_dim,
        "key_vector": stored_keys.shape[3],
        "value_vector": stored_values.shape[3],
        "key_width": width_of(stored_keys.shape[3]),
        "value_width": width_of(stored_values.shape[3]),
        "num_heads_up": triton.next_power_of_2(stored_keys.shape[2]),
    }
    return Launch.of(write_token, (len(slots),), arguments | views.geometry())


@triton.jit
def _is_nan(numbers):
    return numbers != numbers  # noqa: PLR0124 - only what is no number differs from itself


@triton.jit
def _as_bfloat16(scales):
    """Of numbers that are not negative: their bits as a bfloat16, rounded to the nearest, of two to the even one."""
    bits = scales.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(_is_nan(scales), 0x7FC0, rounded)


@triton.jit
def _to_whole(steps):
    """Rounded to the nearest, of two to the even one: added to 1.5 * 2**23, whose last place is a one, a number has no others."""
    return (steps + 12582912.0 - 12582912.0).to(tl.int32)


@triton.jit
def _to_e4m3(steps):
    """Of numbers up to 448 on either side: their bits as a float8_e4m3fn, rounded to the nearest, of two to the even one.

    By whole numbers, so that it needs no instruction that only newer processors have.
    """
    bits = steps.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    # Below 2**-6 a step is 2**-9: added to 2**14, whose last place that is, a number is rounded to whole steps.
    small = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    normal = (bits - (120 << 23) + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    return sign | tl.where(bits < (121 << 23), small, normal)


@triton.jit
def _quantised(vectors, kv_dtype: tl.constexpr):
    """Codes [heads, width] and the bits of the scales [heads]; see `quantise` in kv_quant.py."""
    most: tl.constexpr = 448.0 if kv_dtype == "fp8" else 127.0
    is_no_number = tl.max(_is_nan(vectors).to(tl.int32), 1) > 0
    greatest = tl.max(tl.abs(tl.where(_is_nan(vectors), 0.0, vectors)), 1)
    scales = tl.div_rn(greatest, tl.full(greatest.shape, most, tl.float32))
    scale_bits = _as_bfloat16(tl.where(is_no_number, float("nan"), scales))
    stored = (scale_bits << 16).to(tl.float32, bitcast=True)
    steps = tl.div_rn(vectors, tl.broadcast_to(stored[:, None], vectors.shape))
    # 0 / 0 in a vector of zeros, and x / 0 in one that is too small for any scale.
    steps = tl.where(_is_nan(steps), 0.0, steps)
    steps = tl.minimum(tl.maximum(steps, -most), most)
    codes = _to_e4m3(steps) if kv_dtype == "fp8" else _to_whole(steps)
    return codes.to(tl.int8), scale_bits.to(tl.int16)


@triton.jit
def _write(
    source,
    stored,
    scales,
    heads,
    head_stride,
    num_kv_heads: tl.constexpr,
    kv_dtype: tl.constexpr,
    dim: tl.constexpr,
    vector: tl.constexpr,
    width: tl.constexpr,
):
    """All heads' keys, or values, of one token; pointers are that token's. What fills a vector up is zero."""
    dims = tl.arange(0, width)
    is_head = heads < num_kv_heads
    at = source + heads[:, None] * head_stride + dims[None, :]
    vectors = tl.load(at, mask=is_head[:, None] & (dims < dim)[None, :], other=0.0)
    to = stored + heads[:, None] * vector + dims[None, :]
    is_stored = is_head[:, None] & (dims < vector)[None, :]
    if kv_dtype == "plain":
        tl.store(to, vectors.to(stored.dtype.element_ty), mask=is_stored)
    else:
        codes, scale_bits = _quantised(vectors.to(tl.float32), kv_dtype)
        tl.store(to, codes, mask=is_stored)
        tl.store(scales + heads, scale_bits, mask=is_head)


@triton.jit
def write_token(
    slots,
    keys,
    values,
    stored_keys,
    stored_values,
    key_scales,
    value_scales,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    scale_block_stride,
    block_size: tl.constexpr,
    num_kv_heads: tl.constexpr,
    kv_dtype: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_vector: tl.constexpr,
    value_vector: tl.constexpr,
    key_width: tl.constexpr,
    value_width: tl.constexpr,
    num_heads_up: tl.constexpr,
):
    """One token, into its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    block = slot // block_size
    place = slot % block_size * num_kv_heads
    heads = tl.arange(0, num_heads_up)
    scales_at = block * scale_block_stride + place
    _write(
        keys + token * key_token_stride,
        stored_keys + block * block_stride + place * key_vector,
        key_scales if kv_dtype == "plain" else key_scales + scales_at,
        heads,
        key_head_stride,
        num_kv_heads,
        kv_dtype,
        key_dim,
        key_vector,
        key_width,
    )
    _write(
        values + token * value_token_stride,
        stored_values + block * block_stride + place * value_vector,
        value_scales if kv_dtype == "plain" else value_scales + scales_at,
        heads,
        value_head_stride,
        num_kv_heads,
        kv_dtype,
        value_dim,
        value_vector,
        value_width,
    )
