"""The C++ of paged_attention.cpp as an operator of torch's: a whole ragged batch of one layer in one call."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from paceline.engine.forward_batch import QueryRange
from paceline.engine.kernels.cpu.build import load

_SOURCE = Path(__file__).with_name("paged_attention.cpp")
_SCHEMA = (
    "paged_attention(Tensor query, Tensor keys, Tensor values, Tensor sequences, Tensor tables, Tensor? sinks, "
    "float scaling, float softcap, int window, int num_sink_tokens) -> Tensor"
)
_DTYPES = (torch.float32, torch.bfloat16)
# As long as one lives its operator is registered.
_LIBRARIES: list[torch.library.Library] = []


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_sequences", "num_heads", "num_kv_heads")),
        *((name, ctypes.c_int64) for name in ("key_dim", "value_dim", "block_size")),
        *((name, ctypes.c_int64) for name in ("query_token_stride", "query_head_stride")),
        *((name, ctypes.c_int64) for name in ("key_block_stride", "value_block_stride")),
        *((name, ctypes.c_int64) for name in ("window", "num_sink_tokens")),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
        *((name, ctypes.c_int32) for name in ("is_bf16", "num_threads")),
    )


class _Batch(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("query", "keys", "values", "out", "sequences", "tables", "sinks")
    )


@dataclass(frozen=True, slots=True)
class RaggedTables:
    """Where the sequences of a batch and a KV group lie, as int64.

    `sequences` [num_sequences, 4]: of each its rows of the batch from the first to behind the last one, the tokens of its context,
    and where in `tables`, all block tables end to end, its own begins.
    """

    sequences: Tensor
    tables: Tensor

    @classmethod
    def of(cls, queries: Sequence[QueryRange], group: int) -> "RaggedTables":
        """Those of some sequences, at least one: the same for all layers of a group."""
        rows, start = list[tuple[int, int, int, int]](), 0
        for part in queries:
            rows.append((part.first, part.last, part.context, start))
            start += len(part.block_tables[group])
        return cls(torch.tensor(rows), torch.cat([part.block_tables[group] for part in queries]))


def takes(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether these are of a kind that it is written for: all of one plain type."""
    return query.dtype in _DTYPES and query.dtype == keys.dtype == values.dtype and query.stride(-1) == 1


def is_fast_for_chunks(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether it leaves torch's own functions behind for many tokens of one sequence too: where the processor multiplies their type."""
    return query.dtype is torch.bfloat16 and _multiplies_halves(keys.shape[-1], values.shape[-1])


@cache
def _multiplies_halves(key_dim: int, value_dim: int) -> bool:
    function = load(_SOURCE).paceline_multiplies_halves
    function.argtypes, function.restype = (ctypes.c_int64, ctypes.c_int64), ctypes.c_int32
    return bool(function(key_dim, value_dim))


def register() -> None:
    """Builds it, and makes it torch.ops.paceline.paged_attention; once is enough. Raises NoKernelError."""
    if _LIBRARIES:
        return
    operator = build_operator()
    library = torch.library.Library("paceline", "FRAGMENT")  # type: ignore[no-untyped-call] # it has no annotations
    library.define(_SCHEMA)  # type: ignore[no-untyped-call]
    library.impl("paged_attention", operator, "CPU")  # type: ignore[no-untyped-call]
    _LIBRARIES.append(library)


def build_operator() -> Callable[..., Tensor]:
    """The function of the operator's schema, without torch's knowing of it. Raises NoKernelError."""
    function = load(_SOURCE).paceline_paged_attention
    function.argtypes, function.restype = (ctypes.POINTER(_Shape), ctypes.POINTER(_Batch)), None

    def paged_attention(  # noqa: PLR0913, PLR0917 - the operator's schema
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        sequences: Tensor,
        tables: Tensor,
        sinks: Tensor | None,
        scaling: float,
        softcap: float,
        window: int,
        num_sink_tokens: int,
    ) -> Tensor:
        """Gives [num_tokens, num_heads, value_dim], of which only rows of `sequences` are written.

        `query` [num_tokens, num_heads, key_dim]; keys and values are the layer's views of the pool; `sinks` [num_heads] in float32;
        0 is no softcap, or no window.
        """
        out = query.new_empty((*query.shape[:2], values.shape[3]))
        sizes = (len(sequences), query.shape[1], keys.shape[2], keys.shape[3], values.shape[3], keys.shape[1])
        strides = (query.stride(0), query.stride(1), keys.stride(0), values.stride(0))
        rules = (window, num_sink_tokens, scaling, softcap)
        shape = _Shape(*sizes, *strides, *rules, query.dtype is torch.bfloat16, torch.get_num_threads())
        tensors = (query, keys, values, out, sequences, tables)
        batch = _Batch(*(each.data_ptr() for each in tensors), None if sinks is None else sinks.data_ptr())
        function(ctypes.byref(shape), ctypes.byref(batch))
        return out

    return paged_attention
