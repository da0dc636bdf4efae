"""The arithmetic of keys and values in 8 and 4 bits."""

import pytest
import torch
from torch import Tensor

from paceline.core.kv_layout import KV_TYPES
from paceline.engine.kv_quant import dequantise, quantise

QUANTISED = ("fp8", "int8", "int4")
# The greatest error that rounding to the nearest step can make, as a share of a vector's greatest element.
HALF_STEP = {"fp8": 16 / 448, "int8": 0.5 / 127, "int4": 0.5 / 7}


def _vectors(*shape: int, seed: int = 0) -> Tensor:
    """Of all sizes, so that scales differ."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(*shape[:-1], 1, generator=generator).mul(5).exp()
    return torch.randn(*shape, generator=generator) * sizes


def _back(vectors: Tensor, kv_dtype: str, dtype: torch.dtype = torch.float32) -> Tensor:
    packed, scales = quantise(vectors, kv_dtype)
    return dequantise(packed, scales, vectors.shape[-1], kv_dtype, dtype)


@pytest.mark.parametrize("kv_dtype", QUANTISED)
def test_what_comes_back_is_within_half_a_step(kv_dtype: str) -> None:
    """Of each element; the rounding of the scale costs no more than it may."""
    vectors = _vectors(200, 3, 64)
    largest = vectors.abs().amax(-1, keepdim=True)
    error = (_back(vectors, kv_dtype) - vectors).abs() / largest
    assert 0 < float(error.max()) <= 1.005 * HALF_STEP[kv_dtype]


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize("kv_dtype", QUANTISED)
def test_any_size_of_vector_fits_the_bytes_of_the_layout(kv_dtype: str, dim: int) -> None:
    """Odd sizes too: what fills a vector up is 0, and does not come back."""
    vectors = _vectors(7, 2, dim)
    packed, scales = quantise(vectors, kv_dtype)
    assert packed.shape == (7, 2, KV_TYPES[kv_dtype].vector_bytes(dim))
    assert packed.dtype == torch.uint8
    assert scales.shape == (7, 2, 1)
    assert scales.dtype.itemsize == KV_TYPES[kv_dtype].scale_bytes
    assert _back(vectors, kv_dtype).shape == vectors.shape


@pytest.mark.parametrize("kv_dtype", QUANTISED)
def test_zeros_stay_zeros(kv_dtype: str) -> None:
    """A vector of zeros has no size to divide by, and one too small for a scale becomes zeros."""
    assert torch.equal(_back(torch.zeros(2, 8), kv_dtype), torch.zeros(2, 8))
    assert torch.equal(_back(torch.full((2, 8), 1e-44), kv_dtype), torch.zeros(2, 8))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kv_dtype", QUANTISED)
def test_what_is_no_finite_number_spoils_its_vector_and_no_other(kv_dtype: str, wrong: float) -> None:
    """It is never taken for a number: the whole vector comes back as none, its neighbours as they were."""
    vectors = _vectors(3, 2, 8)
    vectors[1, 0, 3] = wrong
    back = _back(vectors, kv_dtype)
    assert back[1, 0].isnan().all()
    back[1, 0] = 0.0
    assert back.isfinite().all()


@pytest.mark.parametrize("size", [2.0**-90, 2.0**90])
@pytest.mark.parametrize("kv_dtype", QUANTISED)
def test_a_scale_reaches_as_far_as_the_numbers(kv_dtype: str, size: float) -> None:
    """Very small and very large vectors lose no more than others."""
    vectors = _vectors(5, 8) * size
    assert torch.equal(_back(vectors, kv_dtype) / size, _back(vectors / size, kv_dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", QUANTISED)
def test_a_vector_is_stored_alike_wherever_it_stands(kv_dtype: str, dtype: torch.dtype) -> None:
    """Alone, in any part of an array, strided, on one thread or two: the same bytes, and the same numbers out of them."""
    vectors = _vectors(67, 3, 12).to(dtype)
    packed, scales = quantise(vectors, kv_dtype)
    back = dequantise(packed, scales, 12, kv_dtype, dtype)
    parts = [vectors[i : i + 1] for i in range(67)]
    others = {
        "alone": [
            torch.cat(each) for each in zip(*(quantise(part, kv_dtype) for part in parts), strict=True)
        ],
        "strided": quantise(vectors.transpose(0, 1).contiguous().transpose(0, 1), kv_dtype),
        "shifted": [each[1:] for each in quantise(torch.cat([parts[3], vectors]), kv_dtype)],
    }
    for name, (other_packed, other_scales) in others.items():
        assert torch.equal(other_packed, packed), name
        assert torch.equal(other_scales, scales), name
    for i in range(67):
        assert torch.equal(dequantise(packed[i], scales[i], 12, kv_dtype, dtype), back[i])


def test_threads_do_not_change_a_byte() -> None:
    """An array large enough to be shared out gives the bytes that one thread gives."""
    vectors = _vectors(3000, 3, 64)
    for kv_dtype in QUANTISED:
        found = []
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            found.append(quantise(vectors, kv_dtype))
        torch.set_num_threads(1)
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(other, found[0], strict=True))


def test_eight_bit_floats_round_to_the_nearest_everywhere() -> None:
    """Ties and the smallest numbers included, and in a long array as in a single number."""
    values = torch.arange(-448.0, 448.0, 1 / 64)
    values = torch.cat([values, torch.arange(-64, 65) / 2048])
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    table = table[table.isfinite()]
    distance = (values.unsqueeze(1) - table).abs().amin(1)
    # A second element of 448 makes the scale 1.
    pairs = torch.stack([values, torch.full_like(values, 448.0)], -1)
    back = _back(pairs, "fp8")[:, 0]
    assert torch.equal((back - values).abs(), distance)
    alone = torch.cat([_back(pair[None], "fp8")[:, 0] for pair in pairs[::7]])
    assert torch.equal(alone, back[::7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_eight_bit_float_is_read_as_the_library_reads_it(dtype: torch.dtype) -> None:
    """All but the two patterns that are no number, which are never stored."""
    packed = torch.arange(256, dtype=torch.uint8)
    expected = packed.view(torch.float8_e4m3fn).to(dtype)
    found = dequantise(packed[:, None], torch.ones(256, 1), 1, "fp8", dtype)[:, 0]
    assert packed[expected != found].tolist() == [127, 255]


@pytest.mark.parametrize("kv_dtype", QUANTISED)
def test_numbers_come_back_rounded_once(kv_dtype: str) -> None:
    """In bfloat16 they are those of float32, rounded."""
    vectors = _vectors(50, 3, 16)
    assert torch.equal(_back(vectors, kv_dtype, torch.bfloat16), _back(vectors, kv_dtype).bfloat16())


def test_four_bits_of_two_elements_share_a_byte() -> None:
    """The first one in the lower half, each with 8 added."""
    packed, scales = quantise(torch.tensor([[7.0, -7.0, 1.0, 0.0]]), "int4")
    assert scales.tolist() == [[1.0]]
    assert packed.tolist() == [[15 | 1 << 4, 9 | 8 << 4]]
