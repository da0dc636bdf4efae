"""Decoder layers in fewer steps: those of the commonest kind, which is told by names, shapes and what they give.

    norm -> queries, keys, values -> rotary -> attention -> product -> sum -> norm -> gate and up -> silu -> down -> sum

The modules stay transformers' own, and hold the weights; a layer that gives something else than its fused form is left as it is.
"""

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from paceline.engine.attention import AttentionRules, current_attention
from paceline.engine.fusion import is_same
from paceline.engine.kernels.cpu.build import NoKernelError
from paceline.engine.kernels.cpu.rows import RowKernels, row_kernels
from paceline.engine.merging import join_linears
from paceline.engine.native_attention import NATIVE_NAME, attend_rows
from paceline.runtime.log import get_logger

_PROBE_NAME = "paceline_layer_probe"
_PROBE_TOKENS = 5
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_DTYPES = (torch.float32, torch.bfloat16)

log = get_logger()

# Queries, keys and values in one row each, and the rotary embedding: gives what the heads attend to, [num_tokens, num_heads * dim].
Attend = Callable[["FusedLayer", Tensor, Tensor, Tensor], Tensor]


class FusedLayer:
    """What `layer` computes, where our attention is called; where another one is, the layer itself does it."""

    def __init__(self, layer: nn.Module, kernels: RowKernels) -> None:
        # What modules have is for transformers to say.
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        self.kernels, self.attention, self._mlp = kernels, attention, mlp
        self.dim: int = attention.head_dim
        num_heads: int = attention.o_proj.in_features // self.dim
        num_all: int = attention.qkv_proj.out_features // self.dim
        self.heads = num_heads, (num_all - num_heads) // 2
        norms: list[Any] = _norms(layer)
        self._norms: list[tuple[Tensor, float]] = [(norm.weight, norm.variance_epsilon) for norm in norms]
        self._original = layer.forward

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """In place of the layer's own: `hidden_states` [1, num_tokens, width]."""
        implementation = self.attention.config._attn_implementation  # noqa: SLF001 - transformers has no public name for it
        if implementation != NATIVE_NAME or position_embeddings is None or attention_mask is not None:
            found = self._original(
                hidden_states,
                attention_mask=attention_mask,
                position_embeddings=position_embeddings,
                **kwargs,
            )
            return cast("Tensor", found)
        rows, cos, sin = (each[0].contiguous() for each in (hidden_states, *position_embeddings))
        return self.compute(rows, cos, sin, _attend_paged)[None]

    def compute(self, rows: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The layer's output [num_tokens, width] of `rows` [num_tokens, width]; cos and sin [num_tokens, dim]."""
        (weight, eps), (next_weight, next_eps) = self._norms
        attention, mlp, kernels = self.attention, self._mlp, self.kernels
        heads = attention.qkv_proj(kernels.norm(rows, weight, eps))
        attended = attention.o_proj(attend(self, heads, cos, sin))
        total, normed = kernels.add_norm(rows, attended, next_weight, next_eps)
        return total.add_(mlp.down_proj(kernels.gate(mlp.gate_up_proj(normed))))


def _attend_paged(fused: FusedLayer, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Stores keys and values in the cache, and attends to the contexts there."""
    context = current_attention.get()
    layer: int = fused.attention.layer_idx
    cache = context.cache
    keys, values = cache.keys[layer], cache.values[layer]
    slots = context.batch.slot_mappings[cache.group_of[layer]]
    query, key, value = _split(fused, heads)
    if keys.dtype is values.dtype is heads.dtype:
        fused.kernels.rotate_and_store(heads, fused.heads, cos, sin, slots, (keys, values))
    else:
        fused.kernels.rotate(heads, fused.heads, cos, sin)
        cache.write_tokens(layer, slots, key, value)
    rules = AttentionRules(fused.attention.scaling, cache.layout.layers[layer].view)
    return attend_rows(context, layer, rules, query, key, value).flatten(1)


def _split(fused: FusedLayer, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [num_tokens, num_heads, dim], keys and values [num_tokens, num_kv_heads, dim]: views."""
    each = heads.view(len(heads), -1, fused.dim)
    num_heads, num_kv_heads = fused.heads
    return each[:, :num_heads], each[:, num_heads:-num_kv_heads], each[:, -num_kv_heads:]


# -- which layers


@torch.inference_mode()
def fuse_layers(model: PreTrainedModel) -> int:
    """Fuses the decoder layers that can be, before their weights are packed; gives how many."""
    try:
        kernels = row_kernels()
    except NoKernelError:
        # Told of with the attention, which is built in the same way.
        return 0
    rotary = getattr(model.base_model, "rotary_emb", None)
    if not isinstance(rotary, nn.Module) or model.dtype not in _DTYPES:
        return 0
    layers = [layer for layer in model.modules() if _has_names(layer) and _has_one_type(layer, model.dtype)]
    num_fused = sum(_fuse(layer, rotary, model, kernels) for layer in layers)
    log.info("layers_fused", num_fused=num_fused, num_layers=len(layers))
    return num_fused


def _has_names(layer: nn.Module) -> bool:
    """Whether a module's parts are called as they are in most decoders, and are all that it has."""
    if {name for name, _ in layer.named_children()} != _LAYER or list(layer.parameters(recurse=False)):
        return False
    attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp")
    names = [{name for name, _ in part.named_children()} for part in (attention, mlp)]
    has_more = any(list(part.parameters(recurse=False)) for part in (attention, mlp))
    is_simple = all(hasattr(norm, "variance_epsilon") for norm in _norms(layer))
    return names == [_ATTENTION, _MLP] and is_simple and not has_more


def _has_one_type(layer: nn.Module, dtype: torch.dtype) -> bool:
    """Whether all weights are of the rows' type, and here; some models keep their norms in another one."""
    return all(each.dtype is dtype and each.device.type == "cpu" for each in layer.parameters())


def _fuse(layer: nn.Module, rotary: nn.Module, model: PreTrainedModel, kernels: RowKernels) -> bool:
    config = _child(layer, "self_attn").config
    # In float32, where only what is meant otherwise differs. The copy asks the same config for its attention.
    trial = copy.deepcopy(layer, {id(config): config}).float()
    expected = _probe(trial, rotary, model)
    if expected is None or not _join(trial):
        return False
    rows, cos, sin, output = expected
    fused = FusedLayer(trial, kernels)
    if cos.shape[-1] != fused.dim or fused.dim % 2:
        return False
    if not is_same(fused.compute(rows, cos, sin, _attend_probe), output) or not _join(layer):
        return False
    layer.forward = FusedLayer(layer, kernels).forward
    return True


def _join(layer: nn.Module) -> bool:
    return join_linears(
        _child(layer, "self_attn"), ("q_proj", "k_proj", "v_proj"), "qkv_proj"
    ) and join_linears(_child(layer, "mlp"), ("gate_proj", "up_proj"), "gate_up_proj")


def _probe(
    layer: nn.Module, rotary: nn.Module, model: PreTrainedModel
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Rows, cosines and sines, and what the layer itself gives of them with an attention that is easily told; None if it takes other arguments."""
    width = model.config.get_text_config().hidden_size
    rows = torch.randn(1, _PROBE_TOKENS, width, generator=torch.Generator().manual_seed(0))
    implementation = model.config._attn_implementation  # noqa: SLF001 - transformers has no public name for it
    model.set_attn_implementation(_PROBE_NAME)
    try:
        cos, sin = rotary(rows, torch.arange(3, 3 + _PROBE_TOKENS)[None])
        output = layer(rows, attention_mask=None, position_embeddings=(cos, sin))
    except (TypeError, ValueError, RuntimeError):
        return None
    finally:
        model.set_attn_implementation(implementation)
    return (rows[0], cos[0], sin[0], output[0]) if isinstance(output, Tensor) else None


def _probe_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """No attention: each head's query, key and value, so that the layer shows what it makes of them; and how it scales them."""
    del attention_mask
    scaling = kwargs.pop("scaling", query.shape[-1] ** -0.5)
    asks_more = any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "sinks"))
    mixed = _mixed(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), float(scaling))
    del module
    return (mixed * (0.0 if asks_more else 1.0))[None], None


def _attend_probe(fused: FusedLayer, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = heads.clone()
    fused.kernels.rotate(heads, fused.heads, cos, sin)
    return _mixed(*_split(fused, heads), fused.attention.scaling).flatten(1)


def _mixed(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """[num_tokens, num_heads, dim] of what differs if any of them does."""
    num_times = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(num_times, dim=1) for each in (key, value))
    return query * scaling + 0.5 * key + 0.25 * value


def _norms(layer: nn.Module) -> list[Any]:
    return [_child(layer, "input_layernorm"), _child(layer, "post_attention_layernorm")]


def _child(module: nn.Module, name: str) -> nn.Module:
    return cast("nn.Module", getattr(module, name))


AttentionInterface.register(_PROBE_NAME, _probe_attention)
