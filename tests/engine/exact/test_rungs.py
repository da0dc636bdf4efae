"""Many rows are computed in calls of a few heights, and only of such as agree."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.core.errors import UnsupportedModelError
from paceline.engine.exact.rungs import ANCHOR, RUNGS, agreeing, aligned, cover, in_rungs

ROWS = torch.arange(64.0).view(64, 1) + 1


@given(num_rows=st.integers(0, 2000), rungs=st.sets(st.sampled_from(RUNGS), min_size=1))
def test_calls_cover_every_row_once(num_rows: int, rungs: set[int]) -> None:
    """In order, without a gap, and with heights of the ladder only."""
    calls = cover(num_rows, tuple(sorted(rungs)))
    assert [row for first, last, _ in calls for row in range(first, last)] == list(range(num_rows))
    assert all(height in rungs and 0 < last - first <= height for first, last, height in calls)


@pytest.mark.parametrize(
    ("num_rows", "heights"), [(1, [1]), (3, [4]), (31, [32]), (40, [32, 8]), (300, [256, 32, 16])]
)
def test_a_call_is_filled_up_only_where_little_is_wasted(num_rows: int, heights: list[int]) -> None:
    """A quarter of a call may be padding."""
    assert [height for *_, height in cover(num_rows, RUNGS)] == heights


@pytest.mark.parametrize("num_rows", [0, 1, 5, 8, 43])
def test_rows_come_back_in_their_order_from_calls_of_the_ladder(num_rows: int) -> None:
    """What computes sees only the ladder's heights, at aligned addresses; padding is not seen outside."""
    heights = []

    def double(rows: Tensor) -> Tensor:
        heights.append(len(rows))
        assert rows.data_ptr() % 64 == 0
        return 2 * rows

    assert torch.equal(in_rungs(ROWS[1:][:num_rows], double, (4, 8)), 2 * ROWS[1:][:num_rows])
    assert set(heights) <= {4, 8}


def test_a_height_with_other_bits_is_left_out() -> None:
    """A kernel that sums otherwise for 16 rows, or for one, is not called with so many."""

    def compute(rows: Tensor) -> Tensor:
        return rows * (1 + 1e-6) if len(rows) in {1, 16} else rows

    assert agreeing(ROWS, compute) == (2, 4, 8, 32, 64)


def test_a_height_at_which_the_place_matters_is_left_out() -> None:
    """The last row of such a call gets other bits than the same row elsewhere."""

    def compute(rows: Tensor) -> Tensor:
        return torch.cat([rows[:-1], rows[-1:] * (1 + 1e-6)]) if len(rows) == 32 else rows

    assert agreeing(ROWS, compute) == (1, 2, 4, 8, 16, 64)


def test_a_machine_on_which_neighbours_matter_is_refused() -> None:
    """Without an anchor there is no exact mode."""
    with pytest.raises(UnsupportedModelError, match="beside other rows"):
        agreeing(ROWS, lambda rows: rows + rows.mean())


def test_the_anchor_is_a_rung() -> None:
    """Its bits count, so it must be there."""
    assert ANCHOR in agreeing(ROWS, lambda rows: rows)


def test_aligned_keeps_values_and_copies_only_where_it_must() -> None:
    """A view in the middle is copied, a whole tensor is not."""
    assert aligned(ROWS) is ROWS
    assert torch.equal(aligned(ROWS[1:]), ROWS[1:])
    assert aligned(ROWS[1:]).data_ptr() != ROWS[1:].data_ptr()
