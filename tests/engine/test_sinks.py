"""A model that was trained to look at its first tokens beside a window: its mask shows it, and their blocks are kept."""

from functools import partial

import pytest
from torch import Tensor
from transformers import masking_utils

from benchmarks.schedules import Counts, Witness, run_schedule
from paceline.engine.conformance.architectures import WINDOW, build_tiny
from paceline.engine.conformance.paths import PATHS, make_subject, run_path
from paceline.engine.exact.model import make_exact
from paceline.engine.model_loader import use_paged_attention

NUM_SINK_TOKENS = 5
BLOCK_SIZE = 8


def _is_sink(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (key < NUM_SINK_TOKENS) & (key <= query)


@pytest.fixture(autouse=True)
def _trained_with_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistral with another mask: transformers has no model of this kind of its own."""
    name = "create_sliding_window_causal_mask"
    with_sinks = partial(getattr(masking_utils, name), or_mask_function=_is_sink)
    monkeypatch.setattr(f"transformers.models.mistral.modeling_mistral.{name}", with_sinks)


def test_sinks_are_seen_in_the_mask() -> None:
    """They are part of the layout, and of what a sequence needs: a block more than the window alone."""
    layout = use_paged_attention(build_tiny("mistral"), "float32", BLOCK_SIZE)
    assert {(layer.window, layer.num_sink_tokens) for layer in layout.layers} == {(WINDOW, NUM_SINK_TOKENS)}
    (group,) = layout.groups
    assert group.blocks_seen(position=100, num_blocks=13, block_size=BLOCK_SIZE) == [0, 10, 11, 12]


@pytest.mark.parametrize("path", PATHS)
def test_every_path_is_plain_transformers(path: str) -> None:
    """Chunks, batches, prefix hits, preemption and hand-over, with blocks let go between the sinks and the window."""
    model = build_tiny("mistral")
    result = run_path(make_subject(model, use_paged_attention(model, "float32", BLOCK_SIZE)), path)
    assert result.num_tokens > 0
    assert result.passed, result


@pytest.mark.thorough
def test_exact_mode_keeps_every_bit() -> None:
    """Random schedules find no difference."""
    model = build_tiny("mistral")
    layout = use_paged_attention(model, "float32", BLOCK_SIZE)
    make_exact(model)
    witness = Witness()
    counts = sum((run_schedule(model, layout, witness, seed) for seed in range(3)), Counts())
    assert witness.num_mismatches == 0
    assert min(witness.num_compared, counts.num_hand_overs) > 5
