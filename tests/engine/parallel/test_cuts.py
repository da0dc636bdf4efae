"""Steps cut into batches for a pipeline."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.kv_layout import BlockId
from paceline.engine.forward_batch import build_forward_batch
from paceline.engine.parallel.cuts import cut
from paceline.engine.step import SampleTask, ScheduledSequence, SchedulerOutput, ScoreTask
from tests.factories import BLOCK_SIZE, GREEDY, make_id


def _item(length: int, *, start: int = 0, num_samples: int = 1, is_scored: bool = False) -> ScheduledSequence:
    num_blocks = -(-(start + length) // BLOCK_SIZE)
    return ScheduledSequence(
        make_id(f"s{length}-{start}"),
        tuple(range(length)),
        start,
        (tuple(map(BlockId, range(num_blocks))),),
        samples=(SampleTask(GREEDY),) * num_samples,
        score=ScoreTask(0, (1,) * length, 0) if is_scored else None,
    )


ITEMS = st.builds(
    _item,
    st.one_of(st.just(1), st.integers(1, 200)),
    start=st.integers(0, 50),
    num_samples=st.integers(0, 2),
    is_scored=st.booleans(),
)


@given(st.lists(ITEMS, min_size=1, max_size=8), st.integers(1, 6))
def test_the_batches_together_are_the_step(items: list[ScheduledSequence], num_batches: int) -> None:
    """The same tokens at the same places, and as many samples and scores, in the same order; no batch is empty, and none too many."""
    step = SchedulerOutput(tuple(items), ())
    batches = cut(step, num_batches)
    assert 1 <= len(batches) <= num_batches
    assert all(batch.scheduled for batch in batches)
    whole = build_forward_batch(step, BLOCK_SIZE)
    parts = [build_forward_batch(batch, BLOCK_SIZE) for batch in batches]
    for name in ("token_ids", "positions"):
        assert [x for part in parts for x in getattr(part, name).tolist()] == getattr(whole, name).tolist()
    slots = [slot for part in parts for slot in part.slot_mappings[0].tolist()]
    assert slots == whole.slot_mappings[0].tolist()
    assert tuple(place for part in parts for place in part.sample_positions) == whole.sample_positions
    assert tuple(task for part in parts for task in part.score_tasks) == whole.score_tasks
    firsts = [sum(len(part.token_ids) for part in parts[:index]) for index in range(len(parts))]
    for rows in ("sample_rows", "score_rows"):
        found = [
            first + row
            for first, part in zip(firsts, parts, strict=True)
            for row in getattr(part, rows).tolist()
        ]
        assert found == getattr(whole, rows).tolist()


@pytest.mark.parametrize(
    ("lengths", "num_batches", "expected"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([1], 2, [1]),
        ([512], 2, [256, 256]),
        ([512], 4, [128] * 4),
        ([1, 1, 254], 2, [128, 128]),
        ([20], 2, [20]),
        ([1, 1, 1], 2, [2, 1]),
    ],
)
def test_batches_have_about_as_many_tokens(lengths: list[int], num_batches: int, expected: list[int]) -> None:
    """A chunk is cut where a batch ends, but not into pieces that are not worth a call."""
    batches = cut(SchedulerOutput(tuple(map(_item, lengths)), ()), num_batches)
    assert [sum(len(item.token_ids) for item in batch.scheduled) for batch in batches] == expected


def test_a_chunk_with_scores_stays_whole() -> None:
    """Its targets are counted from its first row."""
    (batch,) = cut(SchedulerOutput((_item(200, is_scored=True),), ()), 2)
    assert [len(item.token_ids) for item in batch.scheduled] == [200]
