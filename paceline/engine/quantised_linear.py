"""Linear layers with weights in few bits: what they keep, and how they compute. They know nothing of the model around them."""

import torch
from torch import Tensor, nn

from paceline.engine.kernels.cpu.int8_linear import MakesInt8Product

_MOST = 127  # the largest whole number of 8 bits that has a negative
_LEAST = 1e-30  # a channel or row of smaller values has no unit, and counts as zeros
_INT8_GROUP = 64  # features of a row that share a unit
_GROUP = 32  # weights of a channel that share a unit and a middle, in 4 bits
_STEPS = 15  # between the least and the largest of them
_ROUND = 16  # channels: of the 4-bit product's width they must be a multiple


class TorchInt8:
    """By torch's own functions: the same, up to the rounding of a bias, and slower."""

    def __init__(self, codes: Tensor, units: Tensor, bias: Tensor | None) -> None:
        self.codes, self.units = codes.contiguous(), units
        self._groups = torch.split(self.codes, _INT8_GROUP, 1)
        self._bias = None if bias is None else bias.detach().float()

    def __call__(self, rows: Tensor) -> Tensor:
        total = rows.new_zeros((), dtype=torch.float32)
        for some, weights in zip(torch.split(_flat(rows), _INT8_GROUP, 1), self._groups, strict=True):
            codes, units = quantise_rows(some)
            sums = torch._int_mm(codes, weights.t())  # noqa: SLF001 - torch has no public name for it
            # Rounded once for a product and its sum, as the kernel does.
            total = (sums.double() * units + total).float()
        product = total * self.units
        if self._bias is not None:
            product = product + self._bias
        return product.to(rows.dtype).view(*rows.shape[:-1], len(self.codes))


class Int8Linear(nn.Module):
    """Weights in 8 bits with a unit for each channel, activations in 8 bits with one for each 64 features of a row.

    What a row gives depends on no other row: sums are of whole numbers, joined in order, and its units are its own.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, makes: MakesInt8Product) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias, self._dtype = bias, weight.dtype
        codes, units = quantise_rows(weight.detach())
        self._product = makes(codes, units[:, 0], bias)

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], what is left of it, for whoever looks at it."""
        return (self._product.codes.float() * self._product.units[:, None]).to(self._dtype)

    def forward(self, rows: Tensor) -> Tensor:
        """`rows` [..., in_features]; gives [..., out_features]."""
        return self._product(rows.contiguous())


class Int4Linear(nn.Module):
    """Weights in 4 bits with a unit and a middle for each 32 of a channel; activations stay as they are."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        codes, units, middles = _quantise_groups(weight.detach())
        pairs = torch.stack([units, middles], -1).transpose(0, 1)
        # [num_groups, out_features, 2], as the product reads them
        self._units = pairs.contiguous().to(weight.dtype)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)  # noqa: SLF001 - torch has no public name for it

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], what is left of it, for whoever looks at it."""
        # The product has no other way to show what it has stored.
        return self._multiply(torch.eye(self.in_features, dtype=self._units.dtype)).t()

    def forward(self, rows: Tensor) -> Tensor:
        """`rows` [..., in_features]; gives [..., out_features]."""
        product = self._multiply(_flat(rows.contiguous()))
        if self.bias is not None:
            product = product + self.bias
        return product.view(*rows.shape[:-1], self.out_features)

    def _multiply(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self._packed, _GROUP, self._units)  # noqa: SLF001 - the same
        return product


def fits_4_bits(weight: Tensor) -> bool:
    """Whether torch's product takes a weight of this shape, [out_features, in_features]."""
    out_features, in_features = weight.shape
    return out_features % _ROUND == 0 and in_features % _GROUP == 0


def _flat(rows: Tensor) -> Tensor:
    """[num_rows, num_features], also of no rows."""
    return rows.view(rows.numel() // rows.shape[-1], rows.shape[-1])


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`rows` [num_rows, num_features] as whole numbers in int8 and their units [num_rows, 1] in float32.

    A row with something that is no number has no unit that is one: it gives nothing else.
    """
    values = rows.float()
    largest = values.abs().amax(1, keepdim=True)
    is_nothing = largest < _LEAST
    # A number by a tensor would be that tensor's reciprocal, times the number: it is rounded twice.
    inverse = torch.where(is_nothing, 0.0, torch.full_like(largest, _MOST) / largest)
    units = torch.where(is_nothing, 0.0, torch.where(largest.isfinite(), largest / _MOST, torch.nan))
    codes = (values * inverse).nan_to_num_().round_().clamp_(-_MOST, _MOST)
    return codes.to(torch.int8), units


def _quantise_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As whole numbers from 0 to 15, in int32; of each group, [out_features, num_groups], the unit, and what an 8 stands for."""
    groups = weight.float().view(len(weight), -1, _GROUP)
    least, largest = groups.amin(-1), groups.amax(-1)
    units = ((largest - least) / _STEPS).clamp_min_(_LEAST)
    codes = ((groups - least[..., None]) / units[..., None]).round_().clamp_(0, _STEPS)
    return codes.to(torch.int32).view_as(weight), units, least + 8 * units
