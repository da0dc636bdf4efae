"""Matrix products and elementwise functions whose results for a row do not depend on the other rows.

Products run in calls of agreeing heights (see rungs.py). Elementwise functions are a trap of another kind: torch computes
whole vectors of elements with one formula and what is left over at the end, or at the seam between two threads, with
another. Here every element is part of a whole vector.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from paceline.engine.exact.rungs import ANCHOR, RUNGS, agreeing, aligned, in_rungs

Function = Callable[[Tensor], Tensor]
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_VECTOR_ITEMS = 256  # a multiple of every vector length that torch unrolls to
_GRAIN_ITEMS = 32768  # elements from which on torch gives a part to each thread (its GRAIN_SIZE)


# Set while one of the functions below computes, so that a census knows what it sees.
in_exact_function: ContextVar[bool] = ContextVar("in_exact_function", default=False)

_CANDIDATES: Mapping[str, Function] = {
    "cos": torch.cos,
    "erf": torch.erf,
    "exp": torch.exp,
    "gelu": functional.gelu,
    "log": torch.log,
    "pow": lambda x: x.pow(3),
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "sin": torch.sin,
    "tanh": torch.tanh,
}


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Of rows [num_rows, inner] with weight [outer, inner]."""
    return functional.linear(rows, weight, bias)


def affine(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Of rows [num_rows, inner] with weight [inner, outer]."""
    return rows @ weight if bias is None else torch.addmm(bias, rows, weight)


def multiply(product: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`product` of x [..., inner], for each row alike in any company."""
    with _marked():
        weight = aligned(weight)
        shape = tuple(weight.shape)
        bias_items = 0 if bias is None else len(bias)
        rungs = _agreeing_heights(product, shape, bias_items, weight.dtype, torch.get_num_threads())
        compute = partial(_swapped, product, weight, bias)
        out = in_rungs(x.reshape(-1, x.shape[-1]), compute, rungs)
        return out.view(*x.shape[:-1], out.shape[-1])


def elementwise(function: Function, x: Tensor) -> Tensor:
    """`function` of each element of x, alike at any place among any number of elements."""
    with _marked():
        num_items, flat = _whole_vectors(x.numel(), torch.get_num_threads()), x.reshape(-1)
        if num_items == x.numel():
            return function(flat).view(x.shape)
        padded = functional.pad(flat, (0, num_items - x.numel()))
        return function(padded)[: x.numel()].view(x.shape)


@cache
def placeless(dtype: torch.dtype) -> frozenset[str]:
    """Functions that give an element the same bits at any place, on this machine; in bfloat16 all elements are tried."""
    with torch.inference_mode():
        if dtype == torch.bfloat16:
            x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
            x = x[x.isfinite()]
        else:
            x = torch.randn(20_000, generator=torch.Generator().manual_seed(0)).to(dtype) * 3
        return frozenset(name for name, function in _CANDIDATES.items() if _is_placeless(function, x))


def _is_placeless(function: Function, x: Tensor) -> bool:
    """Whether pieces too short for a vector, single elements and spread ones get the bits that a whole array gets."""
    whole = function(x).nan_to_num()
    pieces = torch.cat([function(piece.clone()) for piece in torch.split(x, 15)])
    singles = torch.cat([function(each.clone()) for each in torch.split(x[::31], 1)])
    spread = function(x.repeat_interleave(2)[::2])
    return all(
        torch.equal(bits.nan_to_num(), expected)
        for bits, expected in ((pieces, whole), (singles, whole[::31]), (spread, whole))
    )


@contextmanager
def _marked() -> Iterator[None]:
    token = in_exact_function.set(True)
    try:
        yield
    finally:
        in_exact_function.reset(token)


def cancelling(num_rows: int, num_columns: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [num_rows, inner] and columns [num_columns, inner] whose products are all 0 but for rounding.

    What is left depends on nothing but the order of summation, and shows it in any precision.
    """
    generator = torch.Generator().manual_seed(inner)
    half = inner // 2
    order = torch.randperm(2 * half, generator=generator)
    rows, columns = torch.zeros(num_rows, inner), torch.zeros(num_columns, inner)
    a, b = (torch.randn(count, half, generator=generator) for count in (num_rows, num_columns))
    rows[:, order] = torch.cat([a, -a], 1)
    columns[:, order] = torch.cat([b, b], 1)
    return rows.to(dtype), columns.to(dtype)


@cache
def _agreeing_heights(
    product: Product, shape: tuple[int, ...], bias_items: int, dtype: torch.dtype, num_threads: int
) -> tuple[int, ...]:
    """Seen on the first product of a shape. The number of threads is part of the question: it may choose the kernel."""
    del num_threads
    inner, outer = (shape[1], shape[0]) if product is linear else (shape[0], shape[1])
    num_rows = max(rung for rung in RUNGS if rung <= max(64, (1 << 25) // outer))
    rows, columns = cancelling(max(num_rows, ANCHOR), outer, inner, dtype)
    weight = columns if product is linear else columns.t().contiguous()
    bias = torch.full((outer,), 2.0**-20, dtype=dtype) if bias_items else None
    return agreeing(rows, partial(_swapped, product, weight, bias))


def _swapped(product: Product, weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    return product(rows, weight, bias)


@cache
def _whole_vectors(num_items: int, num_threads: int) -> int:
    """The least number from `num_items` up of which every thread gets whole vectors."""
    if num_items == 0:
        return 0
    padded, used = 0, 0
    while used != (used := min(num_threads, -(-max(padded, num_items) // _GRAIN_ITEMS))):
        step = _VECTOR_ITEMS * used
        padded = -(-num_items // step) * step
    return padded
