"""What cannot be made exact is refused, with the operation and the module that runs it."""

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from paceline.core.errors import UnsupportedModelError
from paceline.engine.conformance.architectures import build_tiny
from paceline.engine.exact.census import require_trusted, take_census
from paceline.engine.exact.model import make_exact
from paceline.engine.exact.modules import ExactActivation, ExactConv1D, ExactLinear, replace_modules
from paceline.engine.model_loader import use_paged_attention


class _Mixing(nn.Module):
    """Something small that lets tokens see each other."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """The same values but for rounding, or nearly so."""
        if self.kind == "mean":
            return x - 1e-9 * x.mean(1, keepdim=True)
        if self.kind == "item":
            return x if float(x.sum()) > 0 else 2 * x
        if self.kind == "steer":
            return torch.where(x.argmax() > 5, x, 2 * x)
        return x.softmax(-1)


def _llama_with(module: nn.Module) -> PreTrainedModel:
    model = build_tiny("llama")
    use_paged_attention(model, "float32", 8)
    replace_modules(model)
    model.set_submodule("model.norm", module)
    return model


@pytest.mark.parametrize(
    ("kind", "operation"), [("mean", "mean"), ("item", "_local_scalar_dense"), ("steer", "argmax")]
)
def test_what_mixes_tokens_is_refused(kind: str, operation: str) -> None:
    """A reduction over tokens, a branch on their sum, a choice by their maximum: each is named with its module."""
    with pytest.raises(UnsupportedModelError, match=f"{operation} in _Mixing"):
        require_trusted(_llama_with(_Mixing(kind)))


def test_what_stays_within_a_token_is_trusted() -> None:
    """The same module, reducing along the last axis, passes."""
    require_trusted(_llama_with(_Mixing("softmax")))


def test_a_plain_model_is_not_trusted() -> None:
    """Its products and its activation are found: the census sees what exact mode replaces."""
    model = build_tiny("llama")
    use_paged_attention(model, "float32", 8)
    found = {name for name, _ in take_census(model)}
    assert {"mm", "silu"} <= found
    replace_modules(model)
    assert take_census(model) == set()


def test_every_linear_layer_and_activation_has_a_twin() -> None:
    """Twins share the weights; subclasses with a life of their own are left alone."""
    model = build_tiny("llama")
    weight = model.get_submodule("lm_head").weight
    replace_modules(model)
    assert model.get_submodule("lm_head").weight is weight
    kinds = {type(module) for module in model.modules()}
    assert {ExactLinear, ExactActivation} <= kinds
    assert nn.Linear not in kinds
    assert any(isinstance(module, ExactConv1D) for module in _replaced_gpt2().modules())


def _replaced_gpt2() -> PreTrainedModel:
    model = build_tiny("gpt2")
    assert any(isinstance(module, Conv1D) for module in model.modules())
    replace_modules(model)
    assert not any(type(module) is Conv1D for module in model.modules())
    return model


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("apertus", "softplus in XIELUActivation"),
        ("deepseek_v2", "polar in DeepseekV2RotaryEmbedding"),
        ("gemma3n", "std in Gemma3nTextMLP"),
        ("phi3_longrope", "max in Phi3RotaryEmbedding"),
    ],
)
def test_architectures_that_cannot_be_exact_are_refused(name: str, reason: str) -> None:
    """The reason says what, and where; in fast mode they are served."""
    model = build_tiny(name)
    use_paged_attention(model, "float32", 8)
    with pytest.raises(UnsupportedModelError, match=reason):
        make_exact(model)
