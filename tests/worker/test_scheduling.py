"""What a worker's settings mean to its scheduler, and which are refused."""

from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.worker.config import WorkerConfig
from paceline.worker.runner import LoadedRunner, load_runner
from paceline.worker.scheduling import scheduler_config


@pytest.fixture
def loaded(tiny_tokenizer_dir: Path) -> LoadedRunner:
    """A fake runner; its blocks have 128 bytes."""
    return load_runner(WorkerConfig(model=str(tiny_tokenizer_dir), runner="fake", num_blocks=64))


def test_every_setting_arrives(loaded: LoadedRunner) -> None:
    """None is ignored: each of these differs from its default, and so does what it becomes."""
    config = WorkerConfig(
        model="m",
        policy="sjf",
        victim="lifo",
        batching="static",
        watermark=0.1,
        fast_lane_share=0.25,
        fast_lane_prompt_tokens=64,
        fast_lane_output_tokens=32,
        aging_s=3.0,
        max_overtakes=5,
        overload_wait_s=1.5,
        max_decodes=7,
        group_by_experts=True,
        swap_memory="1KiB",
    )
    given, default = (
        scheduler_config(config, loaded),
        scheduler_config(WorkerConfig(model="m"), loaded),
    )
    assert (given.policy, given.victim, given.batching) == ("sjf", "lifo", "static")
    assert given.watermark == 0.1
    lane = given.fast_lane_share, given.fast_lane_prompt_tokens, given.fast_lane_output_tokens
    assert lane == (0.25, 64, 32)
    assert (given.aging_s, given.max_overtakes, given.overload_wait_s) == (3.0, 5, 1.5)
    assert (given.max_decodes, given.group_by_experts, given.num_swap_blocks) == (7, True, 8)
    for name in ("policy", "victim", "batching", "watermark", "fast_lane_share", "aging_s", "max_overtakes"):
        assert getattr(given, name) != getattr(default, name)


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"watermark": 1.0}, "--watermark"),
        ({"watermark": -0.1}, "--watermark"),
        ({"fast_lane_share": 1.5}, "--fast-lane-share"),
        ({"aging_s": 0.0}, "--aging-s"),
        ({"overload_wait_s": -1.0}, "--overload-wait-s"),
        ({"max_overtakes": -1}, "--max-overtakes"),
        ({"max_decodes": -1}, "--max-decodes"),
        ({"group_by_experts": True}, "--max-decodes"),
    ],
)
def test_what_cannot_work_is_refused_by_name(settings: dict[str, Any], setting: str) -> None:
    """The message names the setting."""
    with pytest.raises(ConfigError, match=setting):
        WorkerConfig(model="m", **settings)


@pytest.mark.parametrize("swap_memory", ["1B", "100TiB", "lots"])
def test_swap_memory_that_cannot_be_is_refused(loaded: LoadedRunner, swap_memory: str) -> None:
    """Less than a block, more than there is, or no amount."""
    with pytest.raises(ConfigError, match="--swap-memory"):
        scheduler_config(WorkerConfig(model="m", swap_memory=swap_memory), loaded)


def test_groups_of_experts_need_experts(tiny_tokenizer_dir: Path) -> None:
    """The fake runner has none, and says so."""
    config = WorkerConfig(
        model=str(tiny_tokenizer_dir), runner="fake", num_blocks=64, max_decodes=4, group_by_experts=True
    )
    with pytest.raises(ConfigError, match="--group-by-experts"):
        load_runner(config)
