"""What a GPU leaves for KV, and the step that shows it, in plain numbers."""

import pytest

from paceline.core.errors import ConfigError
from paceline.engine.gpu_start import GpuMemory, largest_step

GIB = 1 << 30


def test_alone_a_worker_has_its_share_less_weights_and_a_step() -> None:
    """A quarter of the whole stays free, what the driver takes of it included."""
    memory = GpuMemory(total_bytes=80 * GIB, free_bytes=65 * GIB, own_bytes=15 * GIB, step_bytes=2 * GIB)
    assert memory.for_kv(0.75, 1) == (60 - 15 - 2) * GIB


def test_several_workers_have_equal_parts_of_the_share() -> None:
    """Whichever of them looks first."""
    memory = GpuMemory(total_bytes=80 * GIB, free_bytes=65 * GIB, own_bytes=15 * GIB, step_bytes=2 * GIB)
    assert memory.for_kv(0.75, 2) == (30 - 15 - 2) * GIB
    later = GpuMemory(
        total_bytes=80 * GIB,
        free_bytes=80 * GIB - 30 * GIB - 15 * GIB,
        own_bytes=15 * GIB,
        step_bytes=2 * GIB,
    )
    assert later.for_kv(0.75, 2) == memory.for_kv(0.75, 2)


def test_what_others_have_is_not_there() -> None:
    """Another program's memory is left alone."""
    memory = GpuMemory(total_bytes=80 * GIB, free_bytes=44 * GIB, own_bytes=15 * GIB, step_bytes=2 * GIB)
    assert memory.for_kv(0.75, 1) == (44 - 20 - 2) * GIB


def test_where_nothing_is_left_is_said_why() -> None:
    """With the numbers that it comes from."""
    memory = GpuMemory(total_bytes=16 * GIB, free_bytes=GIB, own_bytes=14 * GIB, step_bytes=GIB)
    with pytest.raises(
        ConfigError, match=r"leaves nothing for KV: the weights take 14 GiB, the largest step 1 GiB"
    ):
        memory.for_kv(0.9, 1)


@pytest.mark.parametrize(
    ("max_tokens", "max_sequences", "lengths"),
    [(10, 3, [3, 3, 4]), (2, 64, [1, 1]), (8, 1, [8]), (12, 1, [6, 6])],
)
def test_the_largest_step_has_all_tokens_and_samples_as_often_as_it_may(
    max_tokens: int, max_sequences: int, lengths: list[int]
) -> None:
    """With room for the longest of its sequences, none of which is longer than the model takes."""
    step = largest_step(max_tokens, max_sequences, 9, num_groups=2, block_size=4)
    assert [len(item.token_ids) for item in step.scheduled] == lengths
    assert all(len(item.samples) == 1 and len(item.block_tables) == 2 for item in step.scheduled)
    assert len(step.scheduled[0].block_tables[0]) == -(-max(lengths) // 4)
