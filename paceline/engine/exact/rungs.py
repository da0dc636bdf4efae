"""Computes many rows in calls of a few fixed heights, of which it has been seen that they give the same bits.

A library picks its kernel, and with it the order of its sums, by the shape of a call. So a batch of any size is cut into
calls whose heights are rungs of one ladder. Before a rung is used it must agree, bit for bit, with the anchor: for every
row, wherever in the call it stands and whatever stands beside it. A rung that does not agree is left out, which costs
time and no exactness.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.errors import UnsupportedModelError

RUNGS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ANCHOR = 8  # the height whose bits count
_ALIGNMENT_BYTES = 64  # what libraries ask for before they promise anything
_MAX_CHECKED_ITEMS = 1 << 25  # of the output; wider matrices get lower ladders, or the check would take long

Compute = Callable[[Tensor], Tensor]  # [height, ...] -> [height, ...]


def in_rungs(rows: Tensor, compute: Compute, rungs: tuple[int, ...]) -> Tensor:
    """`compute` of all rows, in calls of these heights only; rows of zeros fill up the last one."""
    if len(rows) in rungs:
        return compute(aligned(rows))
    # Without rows there is a call all the same: only that knows the shape of what comes out.
    calls = cover(len(rows), rungs) or ((0, 0, rungs[0]),)
    parts = [_padded_call(rows[first:last], compute, height) for first, last, height in calls]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@lru_cache(maxsize=4096)
def cover(num_rows: int, rungs: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """The calls, as (first row, end, height): rounded up to a rung where most of it would be filled, else cut."""
    calls, first = [], 0
    while first < num_rows:
        rest = num_rows - first
        above = min((rung for rung in rungs if rung >= rest), default=None)
        below = max((rung for rung in rungs if rung <= rest), default=None)
        height = above if above is not None and (below is None or 4 * rest >= 3 * above) else below
        assert height is not None, "a ladder has rungs"
        last = min(num_rows, first + height)
        calls.append((first, last, height))
        first = last
    return tuple(calls)


def agreeing(rows: Tensor, compute: Compute, rungs: Iterable[int] = RUNGS) -> tuple[int, ...]:
    """The rungs that give the anchor's bits for `rows`; raises UnsupportedModelError when not even that one does."""
    with torch.inference_mode():
        bits = torch.cat([compute(part) for part in torch.split(rows, ANCHOR)])
        if not _agrees(rows, bits, compute, ANCHOR):
            raise UnsupportedModelError(
                "this machine's matrix product gives a row other bits beside other rows; exact mode cannot run here"
            )
        fitting = [rung for rung in rungs if rung <= len(rows) and _fits(bits, rung)]
        return tuple(rung for rung in fitting if rung == ANCHOR or _agrees(rows, bits, compute, rung))


def aligned(tensor: Tensor) -> Tensor:
    """The same values, contiguous, at an address that a library may count on."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % _ALIGNMENT_BYTES == 0 else tensor.clone()


def _padded_call(rows: Tensor, compute: Compute, height: int) -> Tensor:
    if len(rows) == height:
        return compute(aligned(rows))
    padding = (0, 0) * (rows.dim() - 1) + (0, height - len(rows))
    return compute(functional.pad(rows, padding))[: len(rows)]


def _agrees(rows: Tensor, bits: Tensor, compute: Compute, height: int) -> bool:
    """Whether calls of this height give `bits`, in order and with every row at another place beside other rows."""
    num_rows = min(len(rows), max(height, 32)) // height * height
    rows, bits = rows[:num_rows], bits[:num_rows]
    orders = (torch.arange(num_rows), torch.arange(num_rows).flip(0), torch.arange(num_rows).roll(3))
    return all(
        torch.equal(
            torch.cat([compute(aligned(part)) for part in torch.split(rows[order], height)]), bits[order]
        )
        for order in orders
    )


def _fits(bits: Tensor, rung: int) -> bool:
    return rung <= 64 or rung * bits[0].numel() <= _MAX_CHECKED_ITEMS
