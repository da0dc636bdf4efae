"""What stands in the inputs of a fixed shape: the numbers of the step, wherever the last one left something else."""

import random

import pytest
import torch

from paceline.core.kv_layout import BlockId, KVLayout, LayerKV
from paceline.engine.decode_graphs import FixedInputs
from paceline.engine.device import HOST
from paceline.engine.forward_batch import build_forward_batch
from paceline.engine.padding import DecodeShape, padded
from paceline.engine.step import BlockTable, SampleTask, ScheduledSequence, SchedulerOutput
from tests.factories import GREEDY, make_id

BLOCK_SIZE, WIDTH, SCRATCH = 4, 6, BlockId(99)
SHAPE = DecodeShape(4, BLOCK_SIZE * WIDTH)
LAYOUT = KVLayout((LayerKV(1, 8, 8), LayerKV(1, 8, 8, window=8)), BLOCK_SIZE, "float32")


def decode(end: int, tables: tuple[BlockTable, ...]) -> ScheduledSequence:
    """A sequence whose last token of `end` is computed."""
    return ScheduledSequence(make_id("r"), (end + 7,), end - 1, tables, (SampleTask(GREEDY),))


def require_filled(inputs: FixedInputs, *items: ScheduledSequence) -> None:
    """They are those of the padded step, as it would be computed call by call."""
    output = padded(SchedulerOutput(items, ()), SHAPE.num_rows, SCRATCH)
    inputs.fill(output.scheduled)
    batch = build_forward_batch(output, BLOCK_SIZE)
    assert torch.equal(inputs.batch.token_ids, batch.token_ids)
    assert torch.equal(inputs.batch.positions, batch.positions)
    for group, tables in enumerate(inputs.tables):
        assert torch.equal(inputs.batch.slot_mappings[group], batch.slot_mappings[group])
        assert tables.decodes is not None
        sequences, found = tables.decodes.tables.sequences.tolist(), tables.decodes.tables.tables
        for (first, last, context, start), part in zip(sequences, batch.queries, strict=True):
            assert (first, last, context) == (part.first, part.last, part.context)
            expected = part.block_tables[group]
            assert torch.equal(found[start : start + len(expected)], expected)


def table(*block_ids: int | None) -> BlockTable:
    """A table of these blocks."""
    return tuple(None if block_id is None else BlockId(block_id) for block_id in block_ids)


def test_a_table_that_stays_the_same_is_there_to_its_end() -> None:
    """Its sequence comes to later blocks without a new one; longer ones than the shape has room for are cut."""
    inputs, tables = FixedInputs(SHAPE, LAYOUT, HOST), (table(*range(1, 9)), table(None, *range(11, 18)))
    for end in (5, 6, 9, 24):
        require_filled(inputs, decode(end, tables))


def test_a_row_that_becomes_nobodys_sees_nothing() -> None:
    """But the scratch block; and one that becomes another's sees that one's blocks."""
    inputs = FixedInputs(SHAPE, LAYOUT, HOST)
    long, short = (table(1, 2, 3), table(None, 12, 13)), (table(5), table(15))
    require_filled(inputs, decode(9, long), decode(10, long), decode(2, short))
    require_filled(inputs, decode(3, short))
    require_filled(inputs, decode(3, short), decode(11, long))


@pytest.mark.parametrize("seed", range(5))
def test_any_steps_one_after_the_other(seed: int) -> None:
    """Sequences come, grow and go, in any rows."""
    chance, inputs = random.Random(seed), FixedInputs(SHAPE, LAYOUT, HOST)
    known = [
        (table(*chance.sample(range(90), WIDTH)), table(*chance.sample(range(90), WIDTH))) for _ in range(6)
    ]
    for _ in range(40):
        chosen = chance.sample(known, chance.randint(1, SHAPE.num_rows))
        require_filled(inputs, *(decode(chance.randint(1, SHAPE.max_context), each) for each in chosen))
