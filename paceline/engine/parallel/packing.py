"""Linear layers of which this process has a part, as layers of ours: the part lies as oneDNN reads it, and parts are added up at once.

Transformers' own wrap each call in tensors that know of all processes, which takes longer than a small product.
"""

import gc
from typing import cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from paceline.engine.fusion import PackedLinear, is_same, let_go_of_file
from paceline.runtime.log import get_logger

log = get_logger()


class SummedLinear(nn.Module):
    """Of a layer whose inputs are split among processes: each gives a part of every sum, and the bias comes once."""

    def __init__(self, part: nn.Linear, bias: Tensor | None) -> None:
        super().__init__()
        self.part, self.bias = PackedLinear(part), bias

    def forward(self, rows: Tensor) -> Tensor:
        """`rows` [..., this process's part of in_features]; gives [..., out_features]."""
        product = cast("Tensor", self.part(rows))
        distributed.all_reduce(product)
        return product if self.bias is None else product + self.bias


@torch.inference_mode()
def pack_parts(model: PreTrainedModel) -> int:
    """Replaces the layers that transformers has split, where ours gives the same; gives how many. All processes call it at once."""
    num_packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and isinstance(child.weight, DTensor):
                packed = _packed(child, child.weight)
                if packed is not None:
                    setattr(parent, name, packed)
                    num_packed += 1
    if num_packed:
        _copy_parts(model)
        let_go_of_file(model)
        # What was replaced holds itself, by the function that it was wrapped in, and so the weights.
        gc.collect()
    log.info("parts_packed", num_layers=num_packed)
    return num_packed


def _copy_parts(model: nn.Module) -> None:
    """Those that stay as they are, such as of an embedding: a part is a view of the file too, and cannot be given other memory."""
    kept = [part for part in model.parameters() if isinstance(part, DTensor)]
    copies = {id(part): _copy(part) for part in kept}
    for module in model.modules():
        # What several modules share they share again.
        for name, part in list(module.named_parameters(recurse=False)):
            if id(part) in copies:
                setattr(module, name, copies[id(part)])


def _copy(part: DTensor) -> nn.Parameter:
    copied = DTensor.from_local(
        part.to_local().clone(),
        part.device_mesh,
        part.placements,
        run_check=False,
        shape=part.shape,
        stride=part.stride(),
    )
    return nn.Parameter(copied, requires_grad=False)


def _packed(linear: nn.Linear, weight: DTensor) -> nn.Module | None:
    """None for one that is split in another way: what it gives tells."""
    part, bias = weight.to_local(), _local(linear.bias)
    rows = torch.zeros(2, part.shape[1], dtype=part.dtype)
    rows[0, 0] = rows[1, -1] = 1
    try:
        packed = _split_inputs(part, bias) if weight.placements == (Shard(1),) else _split_outputs(part, bias)
        found, expected = packed(rows), linear(rows)
    except (AttributeError, RuntimeError):
        return None
    return packed if found.shape == expected.shape and is_same(found, expected) else None


def _split_inputs(part: Tensor, bias: Tensor | None) -> nn.Module:
    return SummedLinear(_linear(part, None), bias)


def _split_outputs(part: Tensor, bias: Tensor | None) -> nn.Module:
    return PackedLinear(_linear(part, bias))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _local(bias: Tensor | None) -> Tensor | None:
    return bias.to_local() if isinstance(bias, DTensor) else bias
