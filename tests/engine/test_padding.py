"""Decode steps of few shapes: which there are, which one a step gets, and that rows of nobody change nothing."""

import pytest
import torch

from paceline.core.kv_layout import BlockId, min_blocks
from paceline.engine.conformance.architectures import build_tiny
from paceline.engine.forward_batch import build_forward_batch
from paceline.engine.model_loader import use_paged_attention
from paceline.engine.model_runner import ModelRunner, side_by_side
from paceline.engine.padding import (
    DecodeShape,
    context_limits,
    decode_shapes,
    padded,
    row_counts,
    shape_for,
)
from paceline.engine.step import SampleTask, ScheduledSequence, SchedulerOutput, ScoreTask
from tests.factories import BLOCK_SIZE, GREEDY, make_id

SHAPES = decode_shapes(8, 5000)


def decode(index: int, end: int) -> ScheduledSequence:
    """A sequence whose last token of `end` is computed."""
    return ScheduledSequence(
        make_id(f"r{index}"), (7 + index,), end - 1, ((BlockId(index),),), (SampleTask(GREEDY),)
    )


def step(*items: ScheduledSequence) -> SchedulerOutput:
    """A step of these."""
    return SchedulerOutput(items, ())


@pytest.mark.parametrize(
    ("most", "counts"),
    [(0, ()), (1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (40, (1, 2, 4, 8, 12, 16, 24, 32, 40))],
)
def test_row_counts_end_at_the_most(most: int, counts: tuple[int, ...]) -> None:
    """And are few."""
    assert row_counts(most) == counts


def test_few_rows_are_nobodys() -> None:
    """From eight sequences on, less than half as many as there are sequences."""
    counts = row_counts(512)
    for num_rows in range(8, 513):
        assert 2 * min(count for count in counts if count >= num_rows) < 3 * num_rows


@pytest.mark.parametrize(("longest", "limits"), [(100, (100,)), (1024, (1024,)), (5000, (1024, 4096, 5000))])
def test_context_limits_end_at_the_longest(longest: int, limits: tuple[int, ...]) -> None:
    """Each but the last is four times the one before."""
    assert context_limits(longest) == limits


def test_the_largest_shape_comes_first() -> None:
    """Later ones find the memory that they need."""
    assert SHAPES[0] == DecodeShape(8, 5000)
    assert len(SHAPES) == len(set(SHAPES)) == 4 * 3


def test_a_step_of_decodes_gets_the_smallest_that_has_room() -> None:
    """For its rows and for its longest context."""
    assert shape_for(step(decode(0, 9)), SHAPES) == DecodeShape(1, 1024)
    assert shape_for(step(decode(0, 9), decode(1, 1025), decode(2, 3)), SHAPES) == DecodeShape(4, 4096)


def test_other_steps_get_none() -> None:
    """Chunks of prompts, scored tokens, and more or longer sequences than there are shapes for."""
    chunk = ScheduledSequence(make_id("c"), (1, 2), 0, ((BlockId(3),),))
    scored = ScheduledSequence(make_id("s"), (1,), 0, ((BlockId(3),),), (), ScoreTask(0, (2,), 0))
    for item in (chunk, scored, decode(0, 5001)):
        assert shape_for(step(decode(1, 4), item), SHAPES) is None
    assert shape_for(step(*(decode(index, 4) for index in range(9))), SHAPES) is None


def test_padding_samples_nothing_and_writes_to_the_scratch_block() -> None:
    """In each KV group."""
    item = ScheduledSequence(
        make_id("a"), (7,), 4, ((BlockId(0), BlockId(1)), (None, BlockId(2))), (SampleTask(GREEDY),)
    )
    batch = build_forward_batch(padded(step(item), 4, BlockId(9)), 4)
    assert batch.sample_rows.tolist() == [0]
    assert [slots.tolist() for slots in batch.slot_mappings] == [[4, 36, 36, 36], [8, 36, 36, 36]]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@torch.inference_mode()
def test_rows_of_nobody_change_no_logits(name: str) -> None:
    """A padded step gives what the step gives by itself, and writes to its own blocks and the scratch one."""
    model = build_tiny(name)
    layout = use_paged_attention(model, "float32", BLOCK_SIZE)
    num_blocks, length = min_blocks(layout), BLOCK_SIZE + 3
    runner = ModelRunner(model, layout, num_blocks, has_scratch=True)
    tables = [side_by_side(index, length, layout) for index in range(2)]
    prompts = step(
        *(
            ScheduledSequence(make_id(f"r{n}"), tuple(range(5 + n, 4 + n + length)), 0, table)
            for n, table in enumerate(tables)
        )
    )
    runner.execute(prompts)
    decodes = step(
        *(
            ScheduledSequence(make_id(f"r{n}"), (9,), length - 1, table, (SampleTask(GREEDY),))
            for n, table in enumerate(tables)
        )
    )
    alone = runner.forward(build_forward_batch(decodes, BLOCK_SIZE))
    own = {table[-1] for item in decodes.scheduled for table in item.block_tables}
    others = [BlockId(index) for index in range(num_blocks) if index not in own]
    before = [bytes(runner.memory.read(block_id)) for block_id in others]
    together = runner.forward(build_forward_batch(padded(decodes, 8, BlockId(num_blocks)), BLOCK_SIZE))
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)
    assert [bytes(runner.memory.read(block_id)) for block_id in others] == before
