"""Attention of one layer over a whole step: sequences that decode by one kernel, chunks of prompts by the other, into one answer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.engine.attention import AttentionRules
from paceline.engine.forward_batch import QueryRange
from paceline.engine.kernels.triton.attention_arguments import RaggedBatch, empty_answer
from paceline.engine.kernels.triton.launch import Launch
from paceline.engine.kernels.triton.layer_views import LayerViews
from paceline.engine.kernels.triton.paged_decode import plan_decode
from paceline.engine.kernels.triton.paged_prefill import plan_prefill


@dataclass(frozen=True, slots=True)
class StepTables:
    """A step's sequences of one KV group, made once for all its layers; None where there are none of a kind."""

    decodes: RaggedBatch | None
    chunks: RaggedBatch | None

    @classmethod
    def of(cls, queries: Sequence[QueryRange], group: int, device: torch.device | str) -> "StepTables":
        """Sequences with one token decode, whatever they are about to do."""
        decodes = [part for part in queries if part.last - part.first == 1]
        chunks = [part for part in queries if part.last - part.first > 1]
        return cls(
            RaggedBatch.of(decodes, group, device) if decodes else None,
            RaggedBatch.of(chunks, group, device) if chunks else None,
        )


def paged_attention(query: Tensor, views: LayerViews, tables: StepTables, rules: AttentionRules) -> Tensor:
    """[num_tokens, num_heads, value_dim], of which only the rows of the step's sequences are written.

    `query` [num_tokens, num_heads, key_dim]; of a layer that keeps latents, [..., compressed + rotary dim], and what comes out has the
    compressed pair's size. New keys and values are in the pool already, see `write_kv`.
    """
    out = empty_answer(query, views)
    for launch in plan_attention(out, query, views, tables, rules):
        launch.run()
    return out


def plan_attention(
    out: Tensor, query: Tensor, views: LayerViews, tables: StepTables, rules: AttentionRules
) -> Iterator[Launch]:
    """The calls that write the answer to `out`, in order."""
    if tables.decodes is not None:
        yield from plan_decode(out, query, views, tables.decodes, rules)
    if tables.chunks is not None:
        yield plan_prefill(out, query, views, tables.chunks, rules)
