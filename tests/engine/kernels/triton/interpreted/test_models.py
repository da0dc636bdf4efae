"""Whole models whose attention is that of the kernels: every path through the engine equals plain transformers."""

from functools import cache

import pytest

from paceline.engine.conformance.matrix import tiny_subject
from paceline.engine.conformance.paths import PATHS, Subject, run_path
from paceline.engine.triton_attention import TRITON_NAME

# Plain; soft caps and windows; value heads of another size; keys and values that layers share; all tokens' logits.
KINDS = ("llama", "gemma2", "deepseek_v3", "gemma4", "gpt2")


@cache
def _subject(name: str) -> Subject:
    return tiny_subject(name, TRITON_NAME)


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
