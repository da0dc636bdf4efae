"""Paged attention as a function that transformers calls in place of its own, through its AttentionInterface.

It stores the new keys and values in the KV cache and attends to each sequence's whole context there. The plain torch
form here is the reference; faster kernels must equal it.
"""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from paceline.core.errors import UnsupportedModelError
from paceline.core.kv_layout import LayerKV
from paceline.engine.forward_batch import ForwardBatch, QueryRange
from paceline.engine.kv_cache import KVCache

ATTENTION_NAME = "paceline_paged"

# Arguments of the attention call that change nothing for us. Anything else that is set is refused, never ignored.
_HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "sliding_window",  # known from the layer's mask, see `probe_layers`
    }
)


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """What a layer asks for beside plain causal attention."""

    scaling: float
    window: int | None = None  # see LayerKV.window
    softcap: float | None = None
    sinks: Tensor | None = None  # [num_heads], logits that take part in the softmax and carry no value


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What a forward pass is about; set around it by the model runner."""

    cache: KVCache
    batch: ForwardBatch
    shared: dict[Any, Any] = field(default_factory=dict)  # what a layer works out for those after it


current_attention: ContextVar[AttentionContext] = ContextVar("current_attention")


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, key_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, key_dim]
    value: Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer over the whole ragged batch; [1, num_tokens, num_heads, value_dim]."""
    context, layer, rules = store_tokens(module, query, key, value, attention_mask, kwargs)
    queries = context.batch.queries
    if context.cache.layout.layers[layer].is_latent:
        contexts = _split_contexts(context.cache, layer, queries, key[0], value[0])
    else:
        contexts = [_gather_context(context.cache, layer, part, query.dtype) for part in queries]
    parts = [
        attend(query[0, :, part.first : part.last], keys, values, rules)
        for part, (keys, values) in zip(queries, contexts, strict=True)
    ]
    return torch.cat(parts, dim=1).transpose(0, 1).unsqueeze(0), None


def store_tokens(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[AttentionContext, int, AttentionRules]:
    """Puts the new keys and values where they belong; gives the pass, the layer and the rules that the call is about.

    A layer that keeps latents has stored them already.
    """
    context = current_attention.get()
    assert attention_mask is None, "no mask function is registered, so none is built"
    assert query.shape[2] == len(context.batch.token_ids), "a layer computes every token of the batch"
    layer = module.layer_idx
    assert isinstance(layer, int)
    rules = read_rules(context.cache.layout.layers[layer], kwargs, query.shape[-1])
    if not context.cache.layout.layers[layer].is_latent:
        slots = context.batch.slot_mappings[context.cache.group_of[layer]]
        context.cache.write_tokens(layer, slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    return context, layer, rules


def read_rules(layer: LayerKV, kwargs: dict[str, Any], head_dim: int) -> AttentionRules:
    """What the call's keyword arguments ask for; raises UnsupportedModelError for what is not honoured.

    The window is that of the layer: some models pass none, or one that their own masks do not have.
    """
    rest = {name: value for name, value in kwargs.items() if value is not None and name not in _HARMLESS}
    scaling = rest.pop("scaling", head_dim**-0.5)
    softcap = rest.pop("softcap", None)
    sinks = rest.pop("s_aux", rest.pop("sinks", None))
    if rest.pop("dropout", 0.0) != 0.0:
        raise UnsupportedModelError(
            "the model asks for dropout in its attention; it is not in evaluation mode"
        )
    if not rest.pop("is_causal", True):
        raise UnsupportedModelError("the model's attention looks ahead; only causal attention is supported")
    if rest:
        raise UnsupportedModelError(
            f"the model's attention needs {', '.join(sorted(rest))}, which is not supported"
        )
    return AttentionRules(scaling, layer.window, softcap, sinks)


def attend(query: Tensor, keys: Tensor, values: Tensor, rules: AttentionRules) -> Tensor:
    """The last `num_queries` tokens of a context attend to it, causally. It may begin where the first of them sees first.

    query [num_heads, num_queries, key_dim], keys [num_kv_heads, context, key_dim], values [num_kv_heads, context,
    value_dim]; gives [num_heads, num_queries, value_dim].
    """
    num_queries, context = query.shape[1], keys.shape[1]
    visible = _visible(num_queries, context, rules.window)
    if rules.softcap is None and rules.sinks is None:
        is_whole = visible is not None and rules.window is None and num_queries == context
        out = functional.scaled_dot_product_attention(
            query.unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=None if is_whole else visible,
            is_causal=is_whole,
            scale=rules.scaling,
            enable_gqa=query.shape[0] != keys.shape[0],
        )
        return out[0]
    return _attend_by_definition(query, keys, values, visible, rules)


def sees_from(cache: KVCache, layer: int, part: QueryRange) -> int:
    """The first position that the part's tokens see, in any layer of the group."""
    group = cache.layout.groups[cache.group_of[layer]]
    return group.first_visible(part.context - (part.last - part.first))


def _gather_context(
    cache: KVCache, layer: int, part: QueryRange, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What the part's tokens attend to, each [num_kv_heads, tokens, dim], as `dtype`."""
    table = part.block_tables[cache.group_of[layer]]
    keys, values = cache.gather(layer, table, sees_from(cache, layer, part), part.context, dtype)
    return keys.transpose(0, 1), values.transpose(0, 1)


def _split_contexts(
    cache: KVCache, layer: int, queries: tuple[QueryRange, ...], keys: Tensor, values: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """The same, of keys and values [num_heads, tokens of all contexts, dim] that were expanded from latents."""
    lengths = [part.context - sees_from(cache, layer, part) for part in queries]
    return list(zip(torch.split(keys, lengths, 1), torch.split(values, lengths, 1), strict=True))


def _visible(num_queries: int, context: int, window: int | None) -> Tensor | None:
    """[num_queries, context], True where a query may look; None where it may look everywhere."""
    if num_queries == 1 and (window is None or window >= context):
        return None
    query_positions = torch.arange(context - num_queries, context).unsqueeze(1)
    distance = query_positions - torch.arange(context)
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def _attend_by_definition(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, rules: AttentionRules
) -> Tensor:
    """Softmax attention written out, for what the library's kernel does not know."""
    group = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    logits = (query @ keys.transpose(1, 2)).float() * rules.scaling
    if rules.softcap is not None:
        logits = torch.tanh(logits / rules.softcap) * rules.softcap
    if visible is not None:
        logits = logits.masked_fill(~visible, float("-inf"))
    if rules.sinks is None:
        return logits.softmax(-1).to(values.dtype) @ values
    sinks = rules.sinks.float().view(-1, 1, 1).expand(-1, logits.shape[1], 1)
    weights = torch.cat([logits, sinks], dim=-1).softmax(-1)[..., :-1]
    return weights.to(values.dtype) @ values


AttentionInterface.register(ATTENTION_NAME, paged_attention)
