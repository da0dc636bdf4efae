"""Prepares a model for this processor when it is loaded: weights lie as oneDNN's matrix product reads them.

Left alone, torch has oneDNN lay a bfloat16 weight out anew in each call, which for few rows takes as long as the product, and gives
float32 to another library. The modules stay transformers' own, but for the linear layers in them.
"""

from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.engine.kernels.cpu.build import NoKernelError
from paceline.engine.kernels.cpu.few_rows import MAX_ROWS, FewRows
from paceline.runtime.log import get_logger

# How many rows the layout is chosen for. Measured with 1 to 512: it makes no difference.
_NUM_ROWS = 32
_NUM_TRIED = 3
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
log = get_logger()


class PackedLinear(nn.Module):
    """`nn.Linear` with its weight in oneDNN's own layout; what it gives is the same up to rounding.

    A few rows are multiplied by a kernel of ours, where it can be had and gives what oneDNN gives.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # No parameter: nobody but oneDNN can read it.
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(  # noqa: SLF001 - torch's own way in when it compiles a model
            linear.weight.detach(), _NUM_ROWS
        )
        self._few_rows = self._find_few_rows()

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], laid out anew for whoever looks at it, which some modules do for its dtype."""
        return self._packed.to_dense()

    def forward(self, rows: Tensor) -> Tensor:
        """`rows` [..., in_features]; gives [..., out_features]."""
        few_rows = self._few_rows
        if few_rows is None or rows.numel() > MAX_ROWS * self.in_features or not rows.is_contiguous():
            return self._multiply(rows)
        return few_rows(rows.view(-1, self.in_features)).view(*rows.shape[:-1], self.out_features)

    def _multiply(self, rows: Tensor) -> Tensor:
        product = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")  # noqa: SLF001 - the same
        return cast("Tensor", product)

    def _find_few_rows(self) -> FewRows | None:
        """Nobody promises how oneDNN packs a weight: what it gives shows whether it is as we read it."""
        if self._packed.dtype is not torch.bfloat16:
            return None
        rows = torch.randn(
            _NUM_TRIED, self.in_features, generator=torch.Generator().manual_seed(0)
        ).bfloat16()
        try:
            few_rows = FewRows(self._packed, self.out_features, self.in_features, self.bias)
        except NoKernelError:
            return None
        return few_rows if is_same(few_rows(rows), self._multiply(rows)) else None


@torch.inference_mode()
def pack_linears(model: PreTrainedModel) -> int:
    """Replaces the linear layers that can be packed, and whose packed form gives the same; gives how many."""
    num_packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_plain(child) and (packed := _packed(cast("nn.Linear", child))) is not None:
                setattr(parent, name, packed)
                num_packed += 1
    if num_packed:
        let_go_of_file(model)
    log.info("weights_packed", num_layers=num_packed)
    return num_packed


def let_go_of_file(model: nn.Module) -> None:
    """Copies what is not packed: it lies in a mapping of the file, which holds what is packed too for as long as anything of it is used."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def is_plain(module: nn.Module) -> bool:
    """Whether it is a linear layer and nothing more, such as one that others have hooked into, or of which this process has a part."""
    has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)  # noqa: SLF001 - there is no other way to ask
    has_hooks |= "forward" in vars(module)
    return type(module) is nn.Linear and module.weight.device.type == "cpu" and not has_hooks


def _packed(linear: nn.Linear) -> PackedLinear | None:
    dtype = linear.weight.dtype
    if dtype not in _TOLERANCE or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call] # it has no annotations
        return None
    # Of each row a unit in another place: it gives columns of the weight.
    rows = torch.zeros(2, linear.in_features, dtype=dtype)
    rows[0, 0] = rows[1, -1] = 1
    try:
        packed = PackedLinear(linear)
        found = packed(rows)
    except (AttributeError, RuntimeError):
        # Another build of torch, or a processor that oneDNN knows no such product for.
        return None
    return packed if is_same(found, linear(rows)) else None


def is_same(found: Tensor, expected: Tensor) -> bool:
    """Whether two products of one type are equal up to rounding."""
    tolerance = _TOLERANCE[expected.dtype]
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance)
