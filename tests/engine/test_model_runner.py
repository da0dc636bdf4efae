"""The model runner by itself; tests/engine/test_conformance.py has what it computes."""

import pytest
import torch
from transformers import PreTrainedModel

from paceline.core.errors import UnsupportedModelError
from paceline.core.kv_layout import BlockId, KVLayout, min_blocks
from paceline.engine.conformance.architectures import build_tiny
from paceline.engine.forward_batch import build_forward_batch
from paceline.engine.model_loader import use_paged_attention
from paceline.engine.model_runner import (
    ModelRunner,
    filled_blocks,
    require_same_as_transformers,
    side_by_side,
)
from paceline.engine.step import SampleTask, ScheduledSequence, SchedulerOutput
from tests.factories import BLOCK_SIZE, GREEDY, make_id


def _open(name: str, *, seed: int = 0) -> tuple[PreTrainedModel, KVLayout, ModelRunner]:
    model = build_tiny(name, seed=seed)
    layout = use_paged_attention(model, "float32", BLOCK_SIZE)
    return model, layout, ModelRunner(model, layout, min_blocks(layout))


@pytest.mark.parametrize("name", ["llama", "gpt_bigcode", "gemma4"])
@torch.inference_mode()
def test_only_rows_that_sample_have_logits(name: str) -> None:
    """They are those of the whole batch, and in its order; a step without any gives none."""
    _, layout, runner = _open(name)
    tables = [side_by_side(index, BLOCK_SIZE + 3, layout) for index in range(2)]
    items = [
        ScheduledSequence(make_id(f"r{n}"), tuple(range(5, 8 + n)), 0, table, (SampleTask(GREEDY),))
        for n, table in enumerate(tables)
    ]
    both = runner.forward(build_forward_batch(SchedulerOutput(tuple(items), ()), BLOCK_SIZE))
    silent = ScheduledSequence(items[0].sequence_id, items[0].token_ids, 0, tables[0])
    one = runner.forward(build_forward_batch(SchedulerOutput((silent, items[1]), ()), BLOCK_SIZE))
    none = runner.forward(build_forward_batch(SchedulerOutput((silent,), ()), BLOCK_SIZE))
    torch.testing.assert_close(one, both[1:], atol=1e-4, rtol=0)
    assert (len(both), len(none)) == (2, 0)


def test_a_step_fills_the_blocks_whose_last_tokens_it_computes() -> None:
    """In each group where there is one, and a shared one once."""
    size = 4
    tables = tuple(
        tuple(None if block is None else BlockId(block) for block in table)
        for table in ((1, 2, 3), (None, 12, 13))
    )
    item = ScheduledSequence(make_id("a"), (0,) * 6, 3, tables)
    decode = ScheduledSequence(make_id("b"), (0,), 6, tables)
    assert filled_blocks([item, item, decode], size) == [1, 2, 12]
    assert filled_blocks([decode], size) == []


def test_the_check_at_start_leaves_the_model_as_it_was() -> None:
    """A model that is served rightly passes, and goes on with our attention."""
    model, layout, runner = _open("llama")
    require_same_as_transformers(runner, model, layout)
    require_same_as_transformers(runner, model, layout)


def test_the_check_at_start_refuses_a_model_that_is_served_wrongly() -> None:
    """A runner that is not the model's own gives other logits, and is refused with the distance in the message."""
    _, layout, runner = _open("llama")
    other = build_tiny("llama", seed=1)
    with pytest.raises(UnsupportedModelError, match="relative distance"):
        require_same_as_transformers(runner, other, layout)
