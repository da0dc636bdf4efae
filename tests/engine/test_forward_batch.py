"""A step's work as tensors."""

from paceline.core.kv_layout import BlockId
from paceline.core.request import SamplingParams
from paceline.engine.forward_batch import build_forward_batch
from paceline.engine.step import SampleTask, ScheduledSequence, SchedulerOutput
from tests.factories import GREEDY, make_id


def _item(
    name: str, token_ids: tuple[int, ...], start: int, table: tuple[int, ...], sampling: SamplingParams | None
) -> ScheduledSequence:
    samples = (SampleTask(sampling),) if sampling else ()
    return ScheduledSequence(make_id(name), token_ids, start, (tuple(BlockId(b) for b in table),), samples)


def test_sequences_lie_end_to_end_with_their_own_places() -> None:
    """Tokens, positions and slots of a chunk, a decode and a whole prompt; only those that sample have a row."""
    seeded = SamplingParams(seed=7)
    output = SchedulerOutput(
        (
            _item("chunk", (10, 11, 12), 2, (5, 3, 9), None),
            _item("decode", (20,), 8, (0, 1, 2), seeded),
            _item("prompt", (30, 31), 0, (7,), GREEDY),
        ),
        (),
    )
    batch = build_forward_batch(output, 4)
    assert batch.token_ids.tolist() == [10, 11, 12, 20, 30, 31]
    assert batch.positions.tolist() == [2, 3, 4, 8, 0, 1]
    assert batch.slot_mappings[0].tolist() == [5 * 4 + 2, 5 * 4 + 3, 3 * 4, 2 * 4, 7 * 4, 7 * 4 + 1]
    assert [(q.first, q.last, q.context) for q in batch.queries] == [(0, 3, 5), (3, 4, 9), (4, 6, 2)]
    assert [q.block_tables[0].tolist() for q in batch.queries] == [[5, 3], [0, 1, 2], [7]]
    assert batch.sample_rows.tolist() == [3, 5]
    assert batch.sample_tasks == (SampleTask(seeded), SampleTask(GREEDY))
    assert batch.sample_positions == (9, 2)


def test_a_step_of_chunks_samples_nothing() -> None:
    """When no prompt is complete there is no row to sample from."""
    batch = build_forward_batch(SchedulerOutput((_item("chunk", (1, 2), 0, (0,), None),), ()), 4)
    assert batch.sample_rows.tolist() == []
    assert batch.sample_tasks == ()
