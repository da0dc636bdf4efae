"""Layers in fewer steps: the same model, which computes the same; what is of another kind stays as it is."""

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from paceline.engine import fused_layer
from paceline.engine.conformance.architectures import build_tiny
from paceline.engine.fused_layer import fuse_layers
from paceline.engine.fusion import PackedLinear, pack_linears
from paceline.engine.kernels.cpu.build import NoKernelError
from paceline.engine.merging import PartOfLinear, join_linears
from paceline.engine.model_loader import use_paged_attention
from paceline.engine.model_runner import ModelRunner, require_same_as_transformers
from paceline.engine.native_attention import NATIVE_NAME, choose_attention

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
FUSED = {
    "llama": 2,
    "mistral": 2,
    "qwen2": 2,
    "qwen2_window": 2,
    "granite": 2,
    "smollm3": 1,  # its other layer has no rotary embedding
    "gemma2": 0,
    "qwen3": 0,
    "mixtral": 0,
    "olmo2": 0,
    "phi3": 0,
    "gpt2": 0,
}


def of_type(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model itself, whose weights are of that type now."""
    for each in (*model.parameters(), *model.buffers()):
        each.data = each.data.to(dtype) if isinstance(each, nn.Parameter) else each.data
    return model


def tiny(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of that kind that runs our attention."""
    model = of_type(build_tiny(name), dtype)
    use_paged_attention(model, "float32" if dtype is torch.float32 else "bfloat16", 8)
    choose_attention(model, "native")
    return model


def own_logits(model: PreTrainedModel) -> torch.Tensor:
    """By transformers' own attention."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = cast("torch.Tensor", model(IDS, use_cache=False).logits)
    model.set_attn_implementation(NATIVE_NAME)
    return logits


@pytest.mark.parametrize(("name", "num_fused"), FUSED.items())
def test_a_layer_is_fused_or_left_as_it_is(name: str, num_fused: int) -> None:
    """And either way the model is what it was, with transformers' own attention too."""
    model = tiny(name)
    plain = copy.deepcopy(model)
    assert fuse_layers(model) == num_fused
    kinds = {type(each) for each in model.modules()}
    assert (PartOfLinear in kinds) == bool(num_fused)
    torch.testing.assert_close(own_logits(model), own_logits(plain), atol=1e-5, rtol=1e-5)
    pack_linears(model)
    torch.testing.assert_close(own_logits(model), own_logits(plain), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name, num in FUSED.items() if num])
@pytest.mark.parametrize("kv_dtype", ["own", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_model_is_transformers_own(name: str, kv_dtype: str, dtype: torch.dtype) -> None:
    """In two chunks over our cache, of its own type and of another one."""
    model = of_type(build_tiny(name), dtype)
    own = "float32" if dtype is torch.float32 else "bfloat16"
    layout = use_paged_attention(model, own if kv_dtype == "own" else kv_dtype, 8)
    choose_attention(model, "native")
    fuse_layers(model)
    pack_linears(model)
    runner = ModelRunner(model, layout, 32)
    if kv_dtype == "own":
        require_same_as_transformers(runner, model, layout)
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("paceline.engine.model_runner._TOLERANCE", {"int8": 0.2})
            require_same_as_transformers(runner, model, layout)


def _with_more(layer: Any) -> None:
    layer.register_parameter("extra", nn.Parameter(torch.ones(1)))


def _of_another_type(layer: Any) -> None:
    layer.input_layernorm.double()


def _with_another_gate(layer: Any) -> None:
    layer.mlp.act_fn = nn.GELU()


def _hooked(layer: Any) -> None:
    layer.self_attn.q_proj.register_forward_hook(lambda *_: None)


def _scaled_otherwise(layer: Any) -> None:
    """It calls the attention with another scaling than it shows."""
    attention, own = layer.self_attn, layer.self_attn.forward
    attention.scaling = shown = 0.9

    def forward(*arguments: Any, **named: Any) -> Any:
        """With its own."""
        attention.scaling = 0.5
        try:
            return own(*arguments, **named)
        finally:
            attention.scaling = shown

    attention.forward = forward


@pytest.mark.parametrize(
    "change", [_with_more, _of_another_type, _with_another_gate, _hooked, _scaled_otherwise]
)
def test_a_layer_that_is_a_little_different_is_left_as_it_is(change: Callable[[Any], None]) -> None:
    """The other one of its model is fused all the same."""
    model = tiny("llama")
    layers: Any = model.base_model.layers
    change(layers[1])
    assert fuse_layers(model) == 1
    assert "forward" in vars(layers[0])
    assert type(layers[1].self_attn.q_proj) is nn.Linear


def test_residual_sums_that_are_scaled_are_seen() -> None:
    """Granite's are, by what its config says."""
    model = tiny("granite")
    layers: Any = model.base_model.layers
    for layer in layers:
        layer.residual_multiplier = 0.22
    assert fuse_layers(model) == 0


def test_without_a_compiler_nothing_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model stays as it is."""

    def missing() -> None:
        """What a machine without a compiler does."""
        raise NoKernelError("there is none")

    monkeypatch.setattr(fused_layer, "row_kernels", missing)
    assert fuse_layers(tiny("llama")) == 0


def test_joined_layers_give_what_each_gave() -> None:
    """With a bias and without, before and after their weight is packed; those that differ are not joined."""
    for bias in (False, True):
        owner = nn.Module()
        owner.a, owner.b = nn.Linear(12, 5, bias=bias), nn.Linear(12, 9, bias=bias)
        rows = torch.randn(2, 3, 12)
        expected = owner.a(rows), owner.b(rows)
        weights = owner.a.weight.clone(), owner.b.weight.clone()
        assert join_linears(owner, ("a", "b"), "whole")
        assert not join_linears(owner, ("a", "b"), "whole")
        for _ in range(2):
            torch.testing.assert_close((owner.a(rows), owner.b(rows)), expected)
            assert all(map(torch.equal, (owner.a.weight, owner.b.weight), weights))
            if isinstance(owner.whole, nn.Linear):
                owner.whole = PackedLinear(owner.whole)
    odd = nn.Module()
    odd.a, odd.b, odd.c = nn.Linear(12, 5), nn.Linear(12, 5, bias=False), nn.Linear(11, 5)
    assert not join_linears(odd, ("a", "b"), "whole")
    assert not join_linears(odd, ("a", "c"), "whole")
    assert not join_linears(odd, ("a", "missing"), "whole")
    assert type(odd.a) is nn.Linear
