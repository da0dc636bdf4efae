"""Puts the weights of a loaded model into 8 or 4 bits: its linear layers are replaced by ones that keep less.

Embeddings, norms, the experts of a mixture and what chooses among them stay as they were.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.core.errors import ConfigError
from paceline.engine.fusion import PackedLinear, is_plain
from paceline.engine.kernels.cpu.build import NoKernelError
from paceline.engine.kernels.cpu.int8_linear import MakesInt8Product, native_int8
from paceline.engine.model_loader import LoadedModel
from paceline.engine.quantised_linear import (
    Int4Linear,
    Int8Linear,
    TorchInt8,
    fits_4_bits,
)
from paceline.runtime.log import get_logger

# By the names that transformers gives them: a small error there is another expert.
_CHOOSERS = {"gate", "router", "shared_expert_gate"}
_DTYPES = (torch.float32, torch.bfloat16)
_Make = Callable[[Tensor, Tensor | None], nn.Module | None]
log = get_logger()


def quantised(loaded: LoadedModel, quantization: str) -> LoadedModel:
    """The model of fast mode with weights as `quantization` says: "w8a8" or "w4a16"; "none" is as it was. Raises ConfigError on a GPU."""
    if quantization == "none":
        return loaded
    if not loaded.device.is_host:
        raise ConfigError(
            f"--quantization {quantization} is for CPUs, and this worker computes on {loaded.device.place}; use --device cpu, or leave it out"
        )
    quantise_linears(loaded.model, quantization)
    return replace(loaded, fingerprint=replace(loaded.fingerprint, quantization=quantization))


@torch.inference_mode()
def quantise_linears(model: PreTrainedModel, quantization: str) -> int:
    """Replaces the linear layers that can be; gives how many."""
    make = _MAKERS[quantization]()
    num_quantised = num_left = 0
    for parent, name, child in _linears(model):
        if (few := make(child.weight, child.bias)) is None:
            num_left += 1
            continue
        setattr(parent, name, few)
        num_quantised += 1
    log.info("weights_quantised", quantization=quantization, num_layers=num_quantised, num_left=num_left)
    return num_quantised


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """The linear layers that are no more than that, or the packed ones in their place, with where they are."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name not in _CHOOSERS and (isinstance(child, PackedLinear) or is_plain(child)):
                yield parent, name, cast("nn.Linear", child)


def _int8_maker() -> _Make:
    makes: MakesInt8Product = TorchInt8
    try:
        makes = native_int8()
    except NoKernelError as error:
        log.warning("no_native_int8", reason=str(error))

    def make(weight: Tensor, bias: Tensor | None) -> nn.Module | None:
        if weight.dtype not in _DTYPES:
            return None
        return Int8Linear(weight, bias, makes)

    return make


def _int4_maker() -> _Make:
    def make(weight: Tensor, bias: Tensor | None) -> nn.Module | None:
        if weight.dtype not in _DTYPES or not fits_4_bits(weight):
            return None
        return Int4Linear(weight, bias)

    return make


_MAKERS = {"w8a8": _int8_maker, "w4a16": _int4_maker}
