"""The hand-over's section of `./run bench kv`, with fake runners in real processes."""

from pathlib import Path

import pytest

from benchmarks.kv_handover import Row, crossover, measured, numbers_of


@pytest.mark.thorough
async def test_each_length_has_its_numbers(tiny_tokenizer_dir: Path) -> None:
    """Requests go through a cluster, and their blocks are pulled by both transports afterwards."""
    rows = await measured(lambda _: None, tiny_tokenizer_dir, (32, 100), repeats=1, runner="fake")
    assert [row.num_tokens for row in rows] == [32, 100]
    for row in rows:
        assert 0 < row.prefill_s <= row.ttft_s
        assert min(row.shm_pull_s, row.grpc_pull_s, row.first_gap_itls) > 0
    assert numbers_of(rows)["handover"][1]["num_tokens"] == 100


def _row(num_tokens: int, prefill_s: float, pull_s: float) -> Row:
    return Row(num_tokens, prefill_s, prefill_s, 0.01, 0.1, 1.5, pull_s, 2 * pull_s)


def test_the_crossover_is_where_pulling_stays_cheaper() -> None:
    """A length at which it was cheaper by chance does not count when a longer one is not."""
    rows = [_row(16, 0.1, 0.05), _row(64, 0.1, 0.2), _row(2048, 2.0, 0.1), _row(3000, 3.0, 0.2)]
    assert crossover(rows) == 2048
    assert crossover([_row(16, 0.1, 0.2)]) is None
    numbers = numbers_of(rows)
    assert numbers["pull_beats_compute_from_tokens"] == 2048
    assert numbers["handover_share_of_prefill_2048"] == 0.05
    assert numbers["grpc_handover_share_of_prefill_2048"] == 0.1
    assert numbers["first_gap_itls_3000"] == 1.5
