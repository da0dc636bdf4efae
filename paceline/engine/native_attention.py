"""Which paged attention of fast mode a model runs; and the one that is compiled for the CPU: a whole batch in one call.

Chunks of prompts only where that is faster than torch, which takes one sequence after the other.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from paceline.core.errors import ConfigError
from paceline.engine.attention import (
    ATTENTION_NAME,
    AttentionContext,
    AttentionRules,
    attend_by_sequence,
    attend_part,
    gather_by_head,
    store_tokens,
)
from paceline.engine.device import HOST
from paceline.engine.kernels.cpu.build import NoKernelError
from paceline.engine.kernels.cpu.paged_attention import (
    RaggedTables,
    is_fast_for_chunks,
    register,
    takes,
)
from paceline.runtime.log import get_logger

NATIVE_NAME = "paceline_native"
log = get_logger()


def choose_attention(model: PreTrainedModel, wanted: str) -> None:
    """Makes a model that runs our attention run the wanted one; see `attention_name`."""
    model.set_attn_implementation(attention_name(wanted, model.device, model.dtype))


def attention_name(wanted: str, device: torch.device = HOST.place, dtype: torch.dtype = torch.float32) -> str:
    """Under which name `wanted` is registered: `torch`; `native` on a CPU; `triton` on a GPU; ConfigError for what cannot be.

    `auto` is the one that is made for the device, if it can be had, and torch's, with a warning, if not.
    """
    if wanted == "torch":
        return ATTENTION_NAME
    if wanted == "triton" or (wanted == "auto" and device.type == "cuda"):
        return _triton_name(wanted, device, dtype)
    if device.type != "cpu":
        raise ConfigError("--attention native is for CPUs; use triton or auto on a GPU")
    try:
        register()
    except NoKernelError as error:
        if wanted == "native":
            raise ConfigError(f"--attention native: {error}") from error
        log.warning("no_native_attention", reason=str(error))
        return ATTENTION_NAME
    return NATIVE_NAME


def _triton_name(wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    try:
        # Imported here: it takes a second, and few have it.
        from paceline.engine.triton_attention import TRITON_NAME, require_computable  # noqa: PLC0415
    except ImportError as error:
        if wanted == "triton":
            raise ConfigError(
                f"--attention triton: {error}; pip install -c constraints.txt -e '.[gpu]'"
            ) from error
        log.warning("no_triton_attention", reason=str(error))
        return ATTENTION_NAME
    require_computable(device, dtype)
    return TRITON_NAME


def native_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """See `paged_attention`. What the kernel is not written for goes the way that it knows."""
    context, layer, rules = store_tokens(module, query, key, value, attention_mask, kwargs)
    if context.cache.layout.layers[layer].is_latent:
        return attend_by_sequence(context, layer, rules, query, key, value), None
    rows = (each[0].transpose(0, 1) for each in (query, key, value))
    return attend_rows(context, layer, rules, *rows).unsqueeze(0), None


def attend_rows(
    context: AttentionContext, layer: int, rules: AttentionRules, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Attends to what the cache holds, the new tokens' keys and values among it; [num_tokens, num_heads, value_dim].

    `query` [num_tokens, num_heads, key_dim], `key` and `value` [num_tokens, num_kv_heads, dim].
    """
    pool = context.cache.keys[layer], context.cache.values[layer]
    if not takes(query, *pool):
        heads = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
        return attend_by_sequence(context, layer, rules, *heads)[0]
    if is_fast_for_chunks(query, *pool):
        return _attend_batch(context, layer, rules, query, with_chunks=True)
    out = _attend_batch(context, layer, rules, query, with_chunks=False)
    for part in context.batch.queries:
        if part.last - part.first > 1:
            keys, values = gather_by_head(context.cache, layer, part, query.dtype)
            heads_first = query.transpose(0, 1).unsqueeze(0)
            out[part.first : part.last] = attend_part(heads_first, part, keys, values, rules).transpose(0, 1)
    return out


def _attend_batch(
    context: AttentionContext, layer: int, rules: AttentionRules, query: Tensor, *, with_chunks: bool
) -> Tensor:
    """The rows of sequences with one token, or of all; those of others are there, and hold nothing yet."""
    cache = context.cache
    tables = _tables(context, cache.group_of[layer], with_chunks=with_chunks)
    if tables is None:
        return query.new_empty((*query.shape[:2], cache.values[layer].shape[3]))
    out: Tensor = torch.ops.paceline.paged_attention(
        query,
        cache.keys[layer],
        cache.values[layer],
        tables.sequences,
        tables.tables,
        None if rules.sinks is None else rules.sinks.float(),
        rules.scaling,
        rules.softcap or 0.0,
        rules.view.window or 0,
        rules.view.num_sink_tokens,
    )
    return out


def _tables(context: AttentionContext, group: int, *, with_chunks: bool) -> RaggedTables | None:
    """Made by the first layer of a group, for all of them."""
    key = ("tables", group, with_chunks)
    if key not in context.shared:
        queries = [part for part in context.batch.queries if with_chunks or part.last - part.first == 1]
        context.shared[key] = RaggedTables.of(queries, group) if queries else None
    tables: RaggedTables | None = context.shared[key]
    return tables


AttentionInterface.register(NATIVE_NAME, native_attention)
