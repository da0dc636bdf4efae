"""Attention of one tile of queries to one split of a context, many at once, in calls that have been seen to agree.

The number of items in one call is a rung of a ladder, as the number of rows in a product is (rungs.py).
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.errors import UnsupportedModelError

CHUNK_TILE_TOKENS = 32
_ROW_MULTIPLE = 8  # lower products are often computed by kernels of their own
_ITEM_RUNGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MASKED = float("-inf")


@dataclass(frozen=True, slots=True)
class Geometry:
    """All that shapes a product, beside the number of items."""

    num_kv_heads: int
    group: int  # query heads that share a key head
    key_dim: int
    value_dim: int
    split_tokens: int
    block_size: int


def partial_attention(
    query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention to one split: the greatest logit, the sum of weights, and the weighted values, for each row.

    query [items, num_kv_heads, rows, key_dim], scaled; keys and values [items, num_kv_heads, split_tokens, dim];
    hidden [the last items, 1, rows, split_tokens].
    """
    items, heads = query.shape[:2]
    logits = torch.bmm(query.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.view(items, heads, *logits.shape[1:])
    logits[items - len(hidden) :].masked_fill_(hidden, MASKED)
    highest = logits.amax(-1, keepdim=True)
    weights = logits.sub_(highest.masked_fill(highest == MASKED, 0.0)).exp_()
    weighted = torch.bmm(weights.flatten(0, 1), values.flatten(0, 1))
    return highest, weights.sum(-1, keepdim=True), weighted.view(items, heads, *weighted.shape[1:])


def fill_rows(rows: Tensor, axis: int) -> Tensor:
    """Zeros up to a multiple that suits a product; nobody reads what becomes of them."""
    return functional.pad(rows, (0, 0) * (rows.dim() - 1 - axis) + (0, -rows.shape[axis] % _ROW_MULTIPLE))


@cache
def agreeing_items(geometry: Geometry, tile_tokens: int, num_threads: int) -> tuple[int, ...]:
    """How many items a call may have: those numbers that give the bits of one item with a full tile.

    The number of threads is part of the question: it may choose the kernel.
    """
    del num_threads
    with torch.inference_mode():
        query, keys, values = _examples(geometry)
        bits = torch.cat(
            [_example(query, keys, values, index) for index in torch.arange(len(query)).view(-1, 1)]
        )
        if tile_tokens == 1:
            query, bits = fill_rows(query[:, :, : geometry.group], axis=2), bits[:, :, : geometry.group]
        rungs = tuple(rung for rung in _ITEM_RUNGS if _agrees(query, keys, values, bits, rung))
    if 1 not in rungs:
        raise UnsupportedModelError(
            "this machine's attention gives a token other bits alone than in a chunk; exact mode cannot run here"
        )
    return rungs


def _agrees(query: Tensor, keys: Tensor, values: Tensor, bits: Tensor, rung: int) -> bool:
    """Whether calls of `rung` items give `bits`, with the items in two orders."""
    order = torch.arange(len(query))
    calls = [
        items
        for each in (order, order.flip(0))
        for items in torch.split(each, rung)[:2]
        if len(items) == rung
    ]
    return all(
        torch.equal(_example(query, keys, values, items)[:, :, : bits.shape[2]], bits[items])
        for items in calls
    )


def _examples(geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """Random items: in float32 a sum in another order shows in most of its results."""
    generator = torch.Generator().manual_seed(geometry.key_dim)
    sizes = (
        (CHUNK_TILE_TOKENS * geometry.group, geometry.key_dim),
        (geometry.split_tokens, geometry.key_dim),
        (geometry.split_tokens, geometry.value_dim),
    )
    shapes = [(_ITEM_RUNGS[-1], geometry.num_kv_heads, *size) for size in sizes]
    query, keys, values = (torch.randn(shape, generator=generator) for shape in shapes)
    return query * geometry.key_dim**-0.5, keys, values


def _example(query: Tensor, keys: Tensor, values: Tensor, items: Tensor) -> Tensor:
    """Weighted values and, as a last column, the sum of weights."""
    hidden = torch.zeros(0, 1, query.shape[2], keys.shape[2], dtype=torch.bool)
    _, total, weighted = partial_attention(query[items], keys[items], values[items], hidden, None)
    return torch.cat([weighted, total], -1)
