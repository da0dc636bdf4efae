"""Whole models whose attention is that of the kernels: every path through the engine equals plain transformers."""

from functools import cache
from typing import Any

import pytest
from torch import Tensor, nn
from transformers import AttentionInterface

from paceline.engine.attention import store_tokens
from paceline.engine.conformance.matrix import tiny_subject
from paceline.engine.conformance.paths import PATHS, Subject, run_path
from paceline.engine.kernels.triton.layer_views import LayerViews
from paceline.engine.kernels.triton.paged_attention import StepTables, paged_attention

NAME = "triton_in_the_interpreter"
# Plain; soft caps and windows; value heads of another size; keys and values that layers share; all tokens' logits.
KINDS = ("llama", "gemma2", "deepseek_v3", "gemma4", "gpt2")


def triton_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """See `paged_attention` in attention.py."""
    context, layer, rules = store_tokens(module, query, key, value, attention_mask, kwargs)
    tables = StepTables.of(context.batch.queries, context.cache.group_of[layer], query.device)
    views = LayerViews.of(context.cache, layer)
    return paged_attention(query[0].transpose(0, 1), views, tables, rules).unsqueeze(0), None


AttentionInterface.register(NAME, triton_attention)


@cache
def _subject(name: str) -> Subject:
    return tiny_subject(name, NAME)


def _require_passed(name: str, path: str) -> None:
    result = run_path(_subject(name), path)
    assert result.passed, result


def test_mixed_steps_of_a_model_are_plain_transformers() -> None:
    """One with windows and sinks: logits within 1e-4 and the same greedy tokens."""
    _require_passed("gpt_oss", "mixed")


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_every_path_of_a_model_is_plain_transformers(path: str) -> None:
    """Chunks, batches, prefix hits, preemption and hand-over."""
    _require_passed("gpt_oss", path)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model_is_plain_transformers(name: str) -> None:
    """The path that asks most of a model."""
    _require_passed(name, "mixed")
