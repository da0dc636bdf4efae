"""Paged attention by the kernels for GPUs, as a model calls it. In Triton's interpreter the same runs on a CPU, slowly.

Imported by none but those who want it: triton need not be there.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from triton import knobs

from paceline.core.errors import ConfigError
from paceline.engine.attention import AttentionContext, attend_by_sequence, store_tokens
from paceline.engine.kernels.triton.attention_arguments import takes
from paceline.engine.kernels.triton.layer_views import LayerViews
from paceline.engine.kernels.triton.paged_attention import StepTables
from paceline.engine.kernels.triton.paged_attention import paged_attention as attend_step
from paceline.engine.kernels.triton.write_kv import write_kv
from paceline.engine.kv_cache import KVCache

TRITON_NAME = "paceline_triton"
# Nobody else has kernels for them: see `LayerViews`.
_NO_KERNELS = frozenset({"int4"})


def require_computable(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError where the kernels would not run, or would be wrong without saying so."""
    if device.type != "cpu":
        return
    if not knobs.runtime.interpret:
        raise ConfigError(
            "--attention triton needs a GPU; on a CPU only Triton's interpreter runs it, slowly, with TRITON_INTERPRET=1 set"
        )
    if dtype is not torch.float32:
        raise ConfigError(
            "--attention triton on a CPU: Triton's interpreter is wrong in bfloat16; use --dtype float32"
        )


def triton_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """See `paged_attention` in attention.py. What the kernels are not written for goes the way that it knows."""
    context, layer, rules = store_tokens(module, query, key, value, attention_mask, kwargs, _write)
    cache = context.cache
    if cache.layout.dtype in _NO_KERNELS or cache.layout.layers[layer].is_latent:
        return attend_by_sequence(context, layer, rules, query, key, value), None
    views, rows = LayerViews.of(cache, layer), query[0].transpose(0, 1)
    if not takes(rows, views):
        return attend_by_sequence(context, layer, rules, query, key, value), None
    tables = step_tables(context, cache.group_of[layer], query.device)
    return attend_step(rows, views, tables, rules).unsqueeze(0), None


def step_tables(context: AttentionContext, group: int, device: torch.device) -> StepTables:
    """Made by the first layer of a group, for all of them; or there already, see `fixed_tables`."""
    key = _key(group)
    if key not in context.shared:
        context.shared[key] = StepTables.of(context.batch.queries, group, device)
    tables: StepTables = context.shared[key]
    return tables


def fixed_tables(tables: list[StepTables]) -> dict[Any, Any]:
    """What a pass shares, where the tables of each KV group are known before."""
    return {_key(group): each for group, each in enumerate(tables)}


def _key(group: int) -> tuple[str, int]:
    return "triton", group


def _write(cache: KVCache, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """KVCache.write_tokens in one call, bit for bit."""
    if cache.layout.dtype in _NO_KERNELS:
        cache.write_tokens(layer, slots, keys, values)
    elif cache.layout.layers[layer].shared_with is None:
        write_kv(LayerViews.of(cache, layer), slots, keys, values)


AttentionInterface.register(TRITON_NAME, triton_attention)
