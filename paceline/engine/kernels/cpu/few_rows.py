"""The C++ of few_rows.cpp: products of a few rows with a weight that oneDNN has packed, read where it lies."""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from paceline.engine.kernels.cpu.build import NoKernelError, load

_SOURCE = Path(__file__).with_name("few_rows.cpp")
# Measured with 1 to 512 on two cores: up to here it takes 0.66 to 0.85 of oneDNN's time, and from 128 on the same.
MAX_ROWS = 64
_BLOCK = 64


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_rows", "inner", "outer")),
        ("num_threads", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("rows", "weight", "bias", "out")),
    )


class FewRows:
    """Of one weight. Raises NoKernelError where this machine, or the weight's form, is none that it is written for."""

    def __init__(self, packed: Tensor, out_features: int, in_features: int, bias: Tensor | None) -> None:
        self._multiply = _function()
        num_bytes = torch.ops.mkldnn._nbytes(packed)  # noqa: SLF001 - torch's own way to see what it keeps in files
        # No columns or rows are filled up, so that nothing but numbers of the weight is read.
        is_whole = out_features % _BLOCK == in_features % _BLOCK == 0
        if not is_whole or num_bytes != out_features * in_features * torch.bfloat16.itemsize:
            raise NoKernelError(f"a weight of {out_features} by {in_features} is packed with gaps")
        # The bias is kept, since its memory is read.
        self._packed, self._bias, self._sizes = packed, bias, (in_features, out_features)
        self._weight: int = torch.ops.mkldnn.data_ptr(packed)

    def __call__(self, rows: Tensor) -> Tensor:
        """`rows` [num_rows, in_features], contiguous, of bfloat16; gives [num_rows, out_features]."""
        out = rows.new_empty((rows.shape[0], self._sizes[1]))
        bias = None if self._bias is None else self._bias.data_ptr()
        pointers = rows.data_ptr(), self._weight, bias, out.data_ptr()
        self._multiply(_Product(rows.shape[0], *self._sizes, torch.get_num_threads(), *pointers))
        return out


@cache
def _function() -> "ctypes._NamedFuncPointer":
    library = load(_SOURCE)
    if not library.paceline_has_few_rows():
        raise NoKernelError("this processor does not multiply bfloat16 by itself")
    function = library.paceline_few_rows
    function.argtypes, function.restype = (ctypes.POINTER(_Product),), None
    return function
