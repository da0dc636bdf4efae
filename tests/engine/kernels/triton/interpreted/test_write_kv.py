"""New keys and values are stored as KVCache stores them, bit for bit."""

import math

import pytest
import torch

from paceline.core.kv_layout import LayerKV
from tests.engine.kernels.triton.checks import HEADS, require_stored, vectors

# Nothing, what is too small for a scale, what is large, what is none; elements, and scales of either type, halfway between two steps.
ODD_VECTORS = (
    (0.0, 0.0, -0.0),
    (1e-45, -1e-45, 0.0),
    (1e-42, 3e-42, -1e-42),
    (3.4e38, -1.0, 2e38),
    (math.inf, 1.0, -1.0),
    (math.nan, 1.0, math.inf),
    (127.0, 0.5, 1.5),
    (-127.0, 2.5, -3.5),
    (448.0, 2**-10, 3 * 2**-10),
    (-448.0, 17.0, 19.0),
    (448.0, 2**-7, 2**-6 - 2**-11),
    *((largest * (1 + odd / 256), 1.0, 0.0) for largest in (127.0, 448.0) for odd in (1, 3)),
)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "fp8"])
@pytest.mark.parametrize(("num_heads", "key_dim", "value_dim"), [(2, 64, 64), (3, 21, 12)])
def test_what_is_stored_is_what_the_cache_stores(
    kv_dtype: str, num_heads: int, key_dim: int, value_dim: int
) -> None:
    """Codes, scales, what fills a vector up, and nothing else of the pool."""
    torch.manual_seed(1)
    layer = LayerKV(num_heads, key_dim, value_dim)
    require_stored(layer, kv_dtype, vectors(20, num_heads, key_dim), vectors(20, num_heads, value_dim, 8.0))


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_odd_vectors_are_stored_alike(kv_dtype: str) -> None:
    """Zeros, infinities, what is no number, and what is rounded to the even one of two."""
    odd = torch.tensor(ODD_VECTORS).unsqueeze(1)
    require_stored(LayerKV(1, 3, 3), kv_dtype, odd, odd.flip(0))


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_every_element_is_rounded_alike(kv_dtype: str) -> None:
    """All float16 numbers in the range of the codes, under a scale of 1, and what lies halfway between them."""
    most = 127.0 if kv_dtype == "int8" else 448.0
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).float()
    numbers = halves[halves.abs() <= most]
    numbers = torch.cat([numbers, numbers * (1 + 2**-12)]).clamp(-most, most)
    dim = -(-len(numbers) // 40)
    padded = torch.nn.functional.pad(numbers, (0, 40 * dim - len(numbers))).view(40, 1, dim)
    padded[:, :, 0] = most
    require_stored(LayerKV(1, dim, dim), kv_dtype, padded, -padded)


def test_float16_is_taken_too() -> None:
    """What a model computes in is turned into float32 first, as the cache does."""
    torch.manual_seed(2)
    require_stored(LayerKV(2, 16, 16), "int8", vectors(9, 2, 16).half(), vectors(9, 2, 16).half())


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "fp8"])
@pytest.mark.parametrize("num_heads", [1, 2, 3, 8, 16])
@pytest.mark.parametrize(("key_dim", "value_dim"), HEADS)
def test_every_size_is_stored_alike(kv_dtype: str, num_heads: int, key_dim: int, value_dim: int) -> None:
    """As all kinds of models have them."""
    torch.manual_seed(3)
    layer = LayerKV(num_heads, key_dim, value_dim)
    require_stored(
        layer, kv_dtype, vectors(30, num_heads, key_dim, 8.0), vectors(30, num_heads, value_dim, 2.0)
    )
