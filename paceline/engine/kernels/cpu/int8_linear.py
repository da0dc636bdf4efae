"""The C++ of int8_linear.cpp: the product of a linear layer whose weights and activations are whole numbers of 8 bits.

It is called as it is, without an operator of torch's around it: that would take as long again as the product of a small layer, 200 times a step.
"""

import ctypes
from ctypes import byref
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from paceline.engine.kernels.cpu.build import NoKernelError, load
from paceline.engine.kernels.cpu.large_pages import LargePages

_SOURCE = Path(__file__).with_name("int8_linear.cpp")
_PANEL_CHANNELS, _QUAD, _FILL = 32, 4, 16
_SHIFT = 128  # what weights are stored with, so that none is negative
_IS_BF16 = {torch.float32: False, torch.bfloat16: True}


class _Weights(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "units", "bias")),
        *((name, ctypes.c_int64) for name in ("in_features", "out_features")),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "out")),
        ("num_rows", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("is_bf16", "num_threads")),
    )


class Int8Product(Protocol):
    """What multiplies rows with the weights of one layer, and keeps these."""

    @property
    def codes(self) -> Tensor:
        """[out_features, in_features] in int8."""
        ...

    @property
    def units(self) -> Tensor:
        """[out_features] in float32."""
        ...

    def __call__(self, rows: Tensor) -> Tensor:
        """`rows` [..., in_features] without gaps, in float32 or bfloat16; gives [..., out_features]."""
        ...


class MakesInt8Product(Protocol):
    """Takes `codes` and `units` as they are above, and a bias [out_features] if there is one."""

    def __call__(self, codes: Tensor, units: Tensor, bias: Tensor | None) -> Int8Product:
        """The product of a layer."""
        ...


def native_int8() -> MakesInt8Product:
    """Builds the kernel. Raises NoKernelError."""
    library = load(_SOURCE)
    if not library.paceline_multiplies_bytes():
        raise NoKernelError("this processor has no instructions that multiply bytes (AVX512-VNNI, AVX-VNNI)")
    function = library.paceline_int8_linear
    function.argtypes, function.restype = (ctypes.POINTER(_Weights), ctypes.POINTER(_Rows)), None
    return partial(_NativeInt8, function, LargePages())


class _NativeInt8:
    """A layer's weights as the kernel reads them."""

    def __init__(
        self,
        function: "ctypes._NamedFuncPointer",
        pages: LargePages,
        codes: Tensor,
        units: Tensor,
        bias: Tensor | None,
    ) -> None:
        self._function = function
        self._num_channels, self._num_features = codes.shape
        self._panels, self._units = pages.keep(_panels_of(codes)), _for_panels(units)
        self._bias = None if bias is None else _for_panels(bias.detach().float())
        addresses = (
            None if each is None else each.data_ptr() for each in (self._panels, self._units, self._bias)
        )
        self._weights = _Weights(*addresses, self._num_features, self._num_channels)
        self._address = byref(self._weights)

    @property
    def codes(self) -> Tensor:
        channels = self._panels.permute(0, 2, 1, 3).reshape(len(self._units), -1)
        return (channels[: self._num_channels, : self._num_features].int() - _SHIFT).to(torch.int8)

    @property
    def units(self) -> Tensor:
        return self._units[: self._num_channels]

    def __call__(self, rows: Tensor) -> Tensor:
        shape = rows.shape
        assert shape[-1] == self._num_features, "it would read what is not there"
        out = rows.new_empty((*shape[:-1], self._num_channels))
        num_rows, is_bf16 = rows.numel() // self._num_features, _IS_BF16[rows.dtype]
        given = _Rows(rows.data_ptr(), out.data_ptr(), num_rows, is_bf16, torch.get_num_threads())
        self._function(self._address, byref(given))
        return out


def _panels_of(codes: Tensor) -> Tensor:
    """[num_panels, quads of features, 32 channels, 4 features] in uint8, zeros where there is nothing."""
    num_channels, num_features = codes.shape
    padded = functional.pad(codes, (0, -num_features % _FILL, 0, -num_channels % _PANEL_CHANNELS))
    shifted = (padded.int() + _SHIFT).to(torch.uint8)
    # Quads are moved whole.
    panels = shifted.view(torch.int32).view(len(padded) // _PANEL_CHANNELS, _PANEL_CHANNELS, -1)
    return panels.transpose(1, 2).contiguous().view(torch.uint8).view(len(panels), -1, _PANEL_CHANNELS, _QUAD)


def _for_panels(channels: Tensor) -> Tensor:
    """The same with something for each channel of the last panel."""
    return functional.pad(channels, (0, -len(channels) % _PANEL_CHANNELS)).contiguous()
