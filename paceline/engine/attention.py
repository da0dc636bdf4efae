"""Paged attention as a function that transformers calls in place of its own, through its AttentionInterface.

It stores the new keys and values in the KV cache and attends to each sequence's whole context there. The plain torch
form here is the reference; faster kernels must equal it.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from paceline.core.errors import UnsupportedModelError
from paceline.core.kv_layout import WHOLE_VIEW, LayerKV, View
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
    view: View = WHOLE_VIEW
    softcap: float | None = None
    sinks: Tensor | None = None  # [num_heads], logits that take part in the softmax and carry no value


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What a forward pass is about; set around it by the model runner."""

    cache: KVCache
    batch: ForwardBatch
    shared: dict[Any, Any] = field(default_factory=dict)  # what a layer works out for those after it


# (cache, layer, slots, keys, values), as KVCache.write_tokens.
WriteTokens = Callable[[KVCache, int, Tensor, Tensor, Tensor], None]
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
    return attend_by_sequence(context, layer, rules, query, key, value), None


def attend_by_sequence(
    context: AttentionContext, layer: int, rules: AttentionRules, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """One sequence after the other, by torch's own functions; arguments and result are those of `paged_attention`."""
    queries = context.batch.queries
    if context.cache.layout.layers[layer].is_latent:
        contexts = _split_contexts(context.cache, layer, queries, key[0], value[0])
    else:
        contexts = [gather_by_head(context.cache, layer, part, query.dtype) for part in queries]
    parts = [
        attend_part(query, part, keys, values, rules)
        for part, (keys, values) in zip(queries, contexts, strict=True)
    ]
    return torch.cat(parts, dim=1).transpose(0, 1).unsqueeze(0)


def attend_part(
    query: Tensor, part: QueryRange, keys: Tensor, values: Tensor, rules: AttentionRules
) -> Tensor:
    """The rows of one sequence, [num_heads, rows, value_dim], against what they see of its context, each [num_kv_heads, tokens, dim]."""
    rows = query[0, :, part.first : part.last]
    return attend(rows, keys, values, rules, num_left_out=part.context - keys.shape[1])


def store_tokens(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    kwargs: dict[str, Any],
    write: WriteTokens = KVCache.write_tokens,
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
        write(context.cache, layer, slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
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
    return AttentionRules(scaling, layer.view, softcap, sinks)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, rules: AttentionRules, *, num_left_out: int = 0
) -> Tensor:
    """The last `num_queries` tokens of a context attend to it, causally.

    Its first `num_left_out` tokens behind the sinks are not given: none of the queries sees them.

    query [num_heads, num_queries, key_dim], keys [num_kv_heads, context, key_dim], values [num_kv_heads, context,
    value_dim]; gives [num_heads, num_queries, value_dim].
    """
    num_queries, context = query.shape[1], keys.shape[1]
    visible = _visible(num_queries, context, rules.view, num_left_out, query.device)
    if rules.softcap is not None or rules.sinks is not None:
        return _attend_by_definition(query, keys, values, visible, rules)
    if num_queries == 1:
        return _attend_once(query, keys, values, visible, rules.scaling)
    is_whole = visible is not None and rules.view.window is None and num_queries == context
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


def _attend_once(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scaling: float
) -> Tensor:
    """A single query, as in a decode. The heads that share keys count as so many queries of one head.

    In bfloat16 the library's own grouping takes five times as long for one query (torch 2.13 on a CPU).
    """
    grouped = query.view(keys.shape[0], -1, query.shape[2])
    out = functional.scaled_dot_product_attention(
        grouped.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), attn_mask=visible, scale=scaling
    )
    return out[0].reshape(query.shape[0], 1, values.shape[2])


def gather_seen(cache: KVCache, layer: int, part: QueryRange, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the part's tokens see in the layer's group, each [tokens, num_kv_heads, dim], as `dtype`.

    The sinks, if some lie before the rest, and then all from the first visible token on.
    """
    group = cache.group_of[layer]
    view, table = cache.layout.groups[group].view, part.block_tables[group]
    first = view.first_visible(part.start)
    keys, values = cache.gather(layer, table, first, part.context, dtype)
    if (num_kept := view.num_kept(first)) == 0:
        return keys, values
    sink_keys, sink_values = cache.gather(layer, table, 0, num_kept, dtype)
    return torch.cat([sink_keys, keys]), torch.cat([sink_values, values])


def gather_by_head(cache: KVCache, layer: int, part: QueryRange, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same, each [num_kv_heads, tokens, dim]."""
    keys, values = gather_seen(cache, layer, part, dtype)
    return keys.transpose(0, 1), values.transpose(0, 1)


def _split_contexts(
    cache: KVCache, layer: int, queries: tuple[QueryRange, ...], keys: Tensor, values: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """The same, of keys and values [num_heads, tokens of all contexts, dim] that were expanded from latents."""
    view = cache.layout.groups[cache.group_of[layer]].view
    firsts = [view.first_visible(part.start) for part in queries]
    lengths = [
        part.context - first + view.num_kept(first) for part, first in zip(queries, firsts, strict=True)
    ]
    return list(zip(torch.split(keys, lengths, 1), torch.split(values, lengths, 1), strict=True))


def _visible(
    num_queries: int, num_keys: int, view: View, num_left_out: int, device: torch.device
) -> Tensor | None:
    """[num_queries, num_keys], True where a query may look; None where it may look everywhere."""
    if num_queries == 1 and (view.window is None or view.window >= num_keys):
        return None
    keys, context = torch.arange(num_keys, device=device), num_keys + num_left_out
    keys = torch.where(keys < view.num_sink_tokens, keys, keys + num_left_out)
    distance = torch.arange(context - num_queries, context, device=device).unsqueeze(1) - keys
    visible = distance >= 0
    if view.window is None:
        return visible
    return visible & ((distance < view.window) | (keys < view.num_sink_tokens))


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
