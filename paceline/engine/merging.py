"""Joins linear layers that read the same rows into one: a wide product takes less time than narrow ones, and is called once.

By the names that decoders of transformers share. Each of the layers that were joined goes on to give what it gave.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.engine.fusion import is_plain


class PartOfLinear(nn.Module):
    """One of several linear layers that `whole`, a child of `owner`, computes together; for whoever asks for it alone."""

    def __init__(self, owner: nn.Module, whole: str, first: int, last: int) -> None:
        super().__init__()
        # In a tuple: a module that is an attribute would be a child, and its owner's own ancestor.
        self._place = owner, whole, first, last

    @property
    def weight(self) -> Tensor:
        """Its own rows [out_features, in_features] of the whole weight."""
        owner, whole, first, last = self._place
        weight: Tensor = getattr(owner, whole).weight
        return weight[first:last]

    def forward(self, rows: Tensor) -> Tensor:
        """`rows` [..., in_features]; gives [..., out_features]."""
        owner, whole, first, last = self._place
        product: Tensor = getattr(owner, whole)(rows)
        return product[..., first:last]


def join_linears(owner: nn.Module, names: Sequence[str], whole: str) -> bool:
    """Makes plain linear layers of one width and type, all with a bias or none, one that is called `whole`; whether they are that."""
    linears = [getattr(owner, name, None) for name in names]
    if hasattr(owner, whole) or not all(isinstance(each, nn.Linear) and is_plain(each) for each in linears):
        return False
    parts = [each for each in linears if isinstance(each, nn.Linear)]
    first = parts[0]
    is_alike = all(
        (each.in_features, each.weight.dtype, each.bias is None)
        == (first.in_features, first.weight.dtype, first.bias is None)
        for each in parts
    )
    if not is_alike:
        return False
    setattr(owner, whole, _joined(parts))
    start = 0
    for name, part in zip(names, parts, strict=True):
        setattr(owner, name, PartOfLinear(owner, whole, start, start + part.out_features))
        start += part.out_features
    return True


@torch.no_grad()
def _joined(parts: Sequence[nn.Linear]) -> nn.Linear:
    first = parts[0]
    num_out = sum(each.out_features for each in parts)
    joined = nn.Linear(
        first.in_features, num_out, bias=first.bias is not None, dtype=first.weight.dtype, device="meta"
    )
    joined.weight = nn.Parameter(torch.cat([each.weight for each in parts]), requires_grad=False)
    if first.bias is not None:
        joined.bias = nn.Parameter(torch.cat([each.bias for each in parts]), requires_grad=False)
    return joined
