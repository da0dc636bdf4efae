"""Keys and values in 8 or 4 bits, each vector with a scale of its own: the arithmetic, which kernels must equal bit for bit.

A vector is one token's key or value in one head. Its scale comes from that vector alone and is never changed again, so
what is stored for a token depends on nothing but the token. It knows no blocks and no layouts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# The range of float32, so that no vector is too large or too small for its scale. What the scale's own rounding costs is
# less than half a step, since elements are divided by the scale as it is stored.
SCALE_DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class _Format:
    largest: float  # the element that a vector's greatest one becomes
    num_packed: int = 1  # elements in a byte
    unit: float = 1.0  # what `_unpack` gives is in units of so much

    @property
    def multiple(self) -> int:
        """Vectors are filled up with zeros to a multiple of so many elements: whole scales, see KVType.vector_bytes."""
        return SCALE_DTYPE.itemsize * self.num_packed


_FORMATS = {
    "int8": _Format(127.0),
    "fp8": _Format(448.0, unit=256.0),
    "int4": _Format(7.0, num_packed=2),
}


def quantise(vectors: Tensor, kv_dtype: str) -> tuple[Tensor, Tensor]:
    """From [..., dim] to bytes [..., vector_bytes] and scales [..., 1].

    A vector of zeros stays one. A vector with an element that is no finite number comes back as no number altogether:
    an error that shows.
    """
    form = _FORMATS[kv_dtype]
    vectors = vectors.float()
    scales = (vectors.abs().amax(-1, keepdim=True) / form.largest).to(SCALE_DTYPE)
    # 0 / 0 in a vector of zeros, and x / 0 in one that is too small for any scale.
    steps = (vectors / scales.float()).nan_to_num(0.0).clamp(-form.largest, form.largest)
    return _pack(functional.pad(steps, (0, -steps.shape[-1] % form.multiple)), kv_dtype), scales


def dequantise(packed: Tensor, scales: Tensor, dim: int, kv_dtype: str, dtype: torch.dtype) -> Tensor:
    """From what `quantise` gave to [..., dim]: each element times its scale, rounded once."""
    unit = scales.to(dtype) * _FORMATS[kv_dtype].unit  # a power of two: rounded nowhere
    return _unpack(packed, kv_dtype, dtype)[..., :dim] * unit


def _pack(steps: Tensor, kv_dtype: str) -> Tensor:
    """As bytes. Two elements of int4 share one, the first in its lower half, each with 8 added."""
    if kv_dtype == "fp8":
        return steps.to(torch.float8_e4m3fn).view(torch.uint8)
    if kv_dtype == "int8":
        return steps.round().to(torch.int8).view(torch.uint8)
    halves = (steps.round() + 8).to(torch.uint8)
    return halves[..., ::2] | (halves[..., 1::2] << 4)


def _unpack(packed: Tensor, kv_dtype: str, dtype: torch.dtype) -> Tensor:
    """As numbers, none of them rounded: every element is exact in each dtype that we compute in."""
    if kv_dtype == "fp8":
        # The library's own conversion takes ten times as long. The same bits, three places up and with the sign in its
        # place, are a float16, whose exponents count from 8 further down.
        halves = packed.view(torch.int8).to(torch.int16).mul_(128).bitwise_and_(~(1 << 14))
        return halves.view(torch.float16).float().to(dtype)
    if kv_dtype == "int8":
        return packed.view(torch.int8).to(dtype)
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(dtype) - 8
