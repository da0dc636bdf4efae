"""The C++ of rows.cpp: what a decoder layer does to each row of a batch between its matrix products.

Rows are contiguous, of float32 or bfloat16. These are called a hundred times in a step: straight, since torch's own way to an operator
takes as long as most of them do.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.engine.kernels.cpu.build import load

# How many heads of queries, and of keys and values, a row has.
Heads = tuple[int, int]

_SOURCE = Path(__file__).with_name("rows.cpp")


def _fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class _Norm(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "num_rows", "width"),
        *_fields(ctypes.c_float, "eps"),
        *_fields(ctypes.c_int32, "is_bf16", "num_threads"),
        *_fields(ctypes.c_void_p, "rows", "more", "weight", "sum", "out"),
    )


class _Gate(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "num_rows", "width"),
        *_fields(ctypes.c_int32, "is_bf16", "num_threads"),
        *_fields(ctypes.c_void_p, "rows", "out"),
    )


class _Rotation(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "num_rows", "num_heads", "num_kv_heads", "dim", "row_stride"),
        *_fields(ctypes.c_int64, "block_size", "key_block_stride", "key_token_stride"),
        *_fields(ctypes.c_int64, "value_block_stride", "value_token_stride"),
        *_fields(ctypes.c_int32, "is_bf16", "num_threads"),
        *_fields(ctypes.c_void_p, "rows", "cos", "sin", "slots", "keys", "values"),
    )


class RowKernels:
    """Raises NoKernelError where it cannot be built."""

    def __init__(self) -> None:
        library = load(_SOURCE)
        self._norm, self._gate, self._rotate = (
            library.paceline_norm,
            library.paceline_gate,
            library.paceline_rotate,
        )
        for function, kind in ((self._norm, _Norm), (self._gate, _Gate), (self._rotate, _Rotation)):
            function.argtypes, function.restype = (ctypes.POINTER(kind),), None

    def norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The root mean square norm (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467) of `rows` [num_rows, width]."""
        out = torch.empty_like(rows)
        self._call_norm(rows, None, weight, eps, None, out)
        return out

    def add_norm(self, rows: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum of both, and its norm."""
        total, out = torch.empty_like(rows), torch.empty_like(rows)
        self._call_norm(rows, more, weight, eps, total, out)
        return total, out

    def gate(self, rows: Tensor) -> Tensor:
        """Of `rows` [num_rows, 2 * width], a gate and what goes through it: silu(gate) * up (SwiGLU: Shazeer, 2020, https://arxiv.org/abs/2002.05202)."""
        num_rows, width = rows.shape[0], rows.shape[1] // 2
        out = rows.new_empty((num_rows, width))
        shape = num_rows, width, rows.dtype is torch.bfloat16, torch.get_num_threads()
        self._gate(_Gate(*shape, rows.data_ptr(), out.data_ptr()))
        return out

    def rotate(self, rows: Tensor, heads: Heads, cos: Tensor, sin: Tensor) -> None:
        """Rotary embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864) of the queries and keys in `rows`, in place.

        `rows` [num_rows, (number of heads + 2 * that of KV heads) * dim]; cos and sin [num_rows, dim].
        """
        self._rotate(_rotation(rows, heads, cos, sin, (0,) * 5, (None,) * 3))

    def rotate_and_store(
        self,
        rows: Tensor,
        heads: Heads,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        pool: tuple[Tensor, Tensor],
    ) -> None:
        """The same; keys and values go where `slots` [num_rows] say, into a layer's views of the pool, of the same type."""
        keys, values = pool
        strides = keys.stride(0), keys.stride(1), values.stride(0), values.stride(1)
        pointers = slots.data_ptr(), keys.data_ptr(), values.data_ptr()
        self._rotate(_rotation(rows, heads, cos, sin, (keys.shape[1], *strides), pointers))

    def _call_norm(
        self, rows: Tensor, more: Tensor | None, weight: Tensor, eps: float, total: Tensor | None, out: Tensor
    ) -> None:
        shape = (*rows.shape, eps, rows.dtype is torch.bfloat16, torch.get_num_threads())
        tensors = (rows, more, weight, total, out)
        self._norm(_Norm(*shape, *(None if each is None else each.data_ptr() for each in tensors)))


def _rotation(
    rows: Tensor,
    heads: Heads,
    cos: Tensor,
    sin: Tensor,
    places: tuple[int, ...],
    pointers: tuple[int | None, ...],
) -> _Rotation:
    shape = rows.shape[0], *heads, cos.shape[-1], rows.stride(0)
    how = rows.dtype is torch.bfloat16, torch.get_num_threads()
    return _Rotation(*shape, *places, *how, rows.data_ptr(), cos.data_ptr(), sin.data_ptr(), *pointers)


@cache
def row_kernels() -> RowKernels:
    """Built once. Raises NoKernelError."""
    return RowKernels()
