"""How many blocks a worker takes, and how long a request may be."""

from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import KVLayout
from paceline.engine.fake import fake_layout
from paceline.worker.capacity import Capacity, longest_in, plan_capacity
from paceline.worker.config import WorkerConfig

BLOCK_SIZE = 16
LAYOUT = fake_layout(BLOCK_SIZE)
BLOCK_BYTES = LAYOUT.block_bytes
OWN = 4096  # tokens that the model can take
FREE = 1 << 30


def plan(*, layout: KVLayout = LAYOUT, free_bytes: int = FREE, **settings: Any) -> Capacity:
    """The capacity of a worker with these settings."""
    return plan_capacity(WorkerConfig(model="m", **settings), layout, OWN, free_bytes)


def blocks(num_blocks: int) -> str:
    """The memory for so many blocks, as a setting."""
    return f"{num_blocks * BLOCK_BYTES}B"


def test_memory_gives_blocks() -> None:
    """As many whole blocks as the bytes hold, with what they mean for requests."""
    capacity = plan(kv_memory=f"{1000 * BLOCK_BYTES + BLOCK_BYTES - 1}B")
    assert capacity == Capacity(
        num_blocks=1000,
        max_model_tokens=OWN,
        own_max_model_tokens=OWN,
        num_tokens=16_000,
        num_requests=7,
    )


def test_no_more_requests_at_once_than_seats() -> None:
    """What the memory would hold beyond `max_num_seqs` never runs at once."""
    assert plan(kv_memory=blocks(1000), max_num_seqs=5).num_requests == 5


def test_a_share_is_of_what_is_free() -> None:
    """Half of what is free gives half as many blocks as all of it."""
    assert plan(kv_memory="50%", free_bytes=2000 * BLOCK_BYTES).num_blocks == 1000


@pytest.mark.parametrize(
    ("max_num_seqs", "max_model_len", "expected"), [(3, 100, 21), (2, 0, 512), (1, 5, 4)]
)
def test_no_more_is_taken_than_can_be_used(max_num_seqs: int, max_model_len: int, expected: int) -> None:
    """The most sequences of the longest kind, in whole blocks each; but always what the check at start takes."""
    capacity = plan(max_num_seqs=max_num_seqs, max_model_len=max_model_len, kv_memory="100%")
    assert capacity.num_blocks == expected


def test_a_number_of_blocks_is_taken_as_it_is() -> None:
    """--num-blocks wins over memory, free memory and cap."""
    assert plan(num_blocks=300, max_num_seqs=1, free_bytes=1, kv_memory="7TiB").num_blocks == 300


def test_a_context_that_memory_does_not_hold_is_lowered() -> None:
    """Without --max-model-len a request may be as long as the pool is large."""
    capacity = plan(kv_memory=blocks(10))
    assert (capacity.max_model_tokens, capacity.own_max_model_tokens) == (160, OWN)
    assert (capacity.num_tokens, capacity.num_requests) == (160, 1)


def test_a_context_that_was_asked_for_is_not_lowered() -> None:
    """With --max-model-len too little memory is an error, with the numbers and both ways out."""
    assert plan(kv_memory=blocks(63), max_model_len=1008).max_model_tokens == 1008
    with pytest.raises(ConfigError) as caught:
        plan(kv_memory=blocks(63), max_model_len=1009)
    for fact in ("this worker's part: 7.88 KiB", "63 KV blocks", "1009 needs 64", "8 KiB", "to 1008"):
        assert fact in str(caught.value)
    with pytest.raises(ConfigError, match="--num-blocks 63"):
        plan(num_blocks=63, max_model_len=1009)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"max_model_len": OWN + 1}, f"{OWN + 1} is more than the {OWN} tokens"),
        ({"kv_memory": blocks(3)}, "3 KV blocks .* needs 4"),
        ({"num_blocks": 3}, "--num-blocks 3 .* needs 4"),
        ({"kv_memory": "1B"}, "0 KV blocks"),
        (
            {"kv_memory": blocks(500), "free_bytes": 499 * BLOCK_BYTES},
            "62.5 KiB of KV cache are more than the 62.38 KiB",
        ),
        ({"max_model_len": -1}, "negative"),
        ({"num_blocks": -1}, "negative"),
        ({"kv_memory": "4"}, "--kv-memory '4' is no amount"),
    ],
)
def test_what_cannot_be_is_refused_with_numbers(settings: dict[str, Any], why: str) -> None:
    """A limit over the model's, memory for nearly nothing, more than is free, and numbers without sense."""
    with pytest.raises(ConfigError, match=why):
        plan(**settings)


@pytest.mark.parametrize("num_blocks", [0, 1, 7, 100])
def test_the_longest_sequence_fills_its_blocks(num_blocks: int) -> None:
    """One token more would need one block more."""
    longest = longest_in(LAYOUT.num_blocks_for, num_blocks, 10_000)
    assert LAYOUT.num_blocks_for(longest) == num_blocks
    assert LAYOUT.num_blocks_for(longest + 1) == num_blocks + 1
    assert longest_in(LAYOUT.num_blocks_for, num_blocks, 9) == min(9, longest)


def test_a_gpus_memory_is_what_was_measured() -> None:
    """Whatever the host has, and `kv_memory` says."""
    config = WorkerConfig(model="m", kv_memory="1B")
    assert plan_capacity(config, LAYOUT, OWN, 0, 300 * BLOCK_BYTES).num_blocks == 300


def test_a_gpu_with_too_little_left_is_refused_by_its_setting() -> None:
    """With how much there was."""
    config = WorkerConfig(model="m", max_model_len=OWN)
    with pytest.raises(ConfigError, match=r"--gpu-memory-share \(for KV: .*\) gives 10 KV blocks"):
        plan_capacity(config, LAYOUT, OWN, FREE, 10 * BLOCK_BYTES)
