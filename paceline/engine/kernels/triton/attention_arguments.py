"""What the kernels of attention are told: how a key is cut, what rows a program has, and which rules a layer has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.core.kv_layout import LayerKV
from paceline.engine.attention import AttentionRules
from paceline.engine.device import Device
from paceline.engine.forward_batch import QueryRange
from paceline.engine.kernels.cpu.paged_attention import RaggedTables
from paceline.engine.kernels.triton.layer_views import PLAIN, LayerViews, width_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Sequences of one KV group on the device, and how long the longest of them are, which says how many programs are needed."""

    tables: RaggedTables
    max_tokens: int
    max_context: int

    @classmethod
    def of(cls, queries: Sequence[QueryRange], group: int, device: torch.device | str) -> "RaggedBatch":
        """Those of some sequences, at least one; the same for all layers of a group."""
        tables = RaggedTables.of(queries, group)
        on_device = RaggedTables(*Device(torch.device(device)).upload((tables.sequences, tables.tables)))
        tokens, contexts = zip(*((part.last - part.first, part.context) for part in queries), strict=True)
        return cls(on_device, max(tokens), max(contexts))


@dataclass(frozen=True, slots=True)
class KeyCut:
    """A key as two runs, [head, tail], each of which fills a tile well: 80 is 64 + 16, 576 is 512 + 64, and 64 has no tail.

    Of latents the head is the compressed pair, which is also the value, and the tail is the rotary part; see LayerKV.is_latent.
    """

    head_dim: int
    tail_dim: int
    value_dim: int

    @classmethod
    def of(cls, layer: LayerKV) -> "KeyCut":
        """That of a layer."""
        if layer.is_latent:
            return cls(layer.key_dim, layer.value_dim, layer.key_dim)
        head_dim = layer.key_dim if layer.key_dim < 16 else 1 << (layer.key_dim.bit_length() - 1)
        return cls(head_dim, layer.key_dim - head_dim, layer.value_dim)

    @property
    def width(self) -> int:
        """Elements of a token that a program holds at once, keys or values."""
        return max(width_of(self.head_dim) + self.tail_dim, width_of(self.value_dim))

    def arguments(self) -> dict[str, int]:
        """By the names of the kernels' parameters."""
        return {
            "head_dim": self.head_dim,
            "tail_dim": self.tail_dim,
            "value_dim": self.value_dim,
            "head_width": width_of(self.head_dim),
            "tail_width": width_of(self.tail_dim) if self.tail_dim else 0,
            "value_width": width_of(self.value_dim),
        }


def takes(query: Tensor, views: LayerViews) -> bool:
    """Whether these are of a kind that the kernels are written for."""
    is_plain = views.kv_dtype == PLAIN
    return (
        query.dtype in _DTYPES
        and query.stride(-1) == 1
        and (not is_plain or query.dtype == views.keys.dtype == views.values.dtype)
    )


def empty_answer(query: Tensor, views: LayerViews) -> Tensor:
    """Where an answer to these queries has room: [num_tokens, num_heads, value_dim]."""
    return query.new_empty((*query.shape[:2], KeyCut.of(views.layer).value_dim))


def attention_arguments(
    out: Tensor, query: Tensor, views: LayerViews, batch: RaggedBatch, rules: AttentionRules
) -> dict[str, Any]:
    """What decode and prefill have in common, by the names of their parameters."""
    assert takes(query, views), "queries are of the pool's type, or that one is quantised"
    cut, (keys, values), (key_scales, value_scales) = KeyCut.of(views.layer), views.elements, views.scales
    is_latent, tails, tail_scales = views.layer.is_latent, keys, key_scales
    if is_latent:
        tails, tail_scales = values, value_scales
    elif cut.tail_dim:
        tails = keys[..., cut.head_dim :]
    return {
        "out": out,
        "query": query,
        "query_token_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "keys": keys,
        "tails": tails,
        "values": values,
        "key_scales": key_scales,
        "tail_scales": tail_scales,
        "value_scales": value_scales,
        "sequences": batch.tables.sequences,
        "tables": batch.tables.tables,
        "sinks": None if rules.sinks is None else rules.sinks.float(),
        "scaling": float(rules.scaling),
        "softcap": float(rules.softcap or 0),
        "window": rules.view.window or 0,
        "num_sink_tokens": rules.view.num_sink_tokens,
        "group": query.shape[1] // keys.shape[2],
        "key_vector": keys.shape[3],
        "tail_vector": tails.stride(2),
        "value_vector": values.shape[3],
        "is_latent": is_latent,
        **cut.arguments(),
        **views.geometry(),
    }
