"""Steps on lent cores: as many threads as there are cores for it, and the same answers."""

from pathlib import Path
from typing import Any

import pytest

from paceline.core.clock import ManualClock
from paceline.core.errors import ConfigError
from paceline.engine.step import SchedulerOutput
from paceline.runtime.cores import Cores, create_cores_file
from paceline.worker.config import WorkerConfig
from paceline.worker.lent_cores import LentCoresRunner
from paceline.worker.runner import load_runner


def test_each_step_has_the_threads_of_the_cores_that_it_has(tiny_tokenizer_dir: Path, tmp_path: Path) -> None:
    """They are set when their number changes, and not in between."""
    file, clock = tmp_path / "cores", ManualClock(1.0)
    create_cores_file(file, 2)
    loaded = load_runner(WorkerConfig(model=str(tiny_tokenizer_dir), runner="fake", num_blocks=4))
    ours, other = (Cores(file, range(first, first + 1), clock=clock, busy_s=lambda: 0.0) for first in (0, 1))
    threads: list[int] = []
    runner = LentCoresRunner(loaded.runner, ours, threads.append)
    nothing = SchedulerOutput((), ())
    assert runner.memory is loaded.runner.memory
    runner.execute(nothing)
    runner.execute(nothing)
    with other.taken():
        runner.execute(nothing)
    clock.advance(1.0)
    runner.execute(nothing)
    assert threads == [2, 1, 2]
    for cores in (ours, other):
        cores.close()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"threads": 0}, "--cores-file needs --threads"),
        ({"threads": 1, "first_core": -1}, "--first-core"),
        ({"threads": 1, "exactness": "exact"}, "--cores-file is for fast mode"),
    ],
)
def test_what_cannot_be_lent_is_refused(settings: dict[str, Any], why: str) -> None:
    """One line says what to change."""
    with pytest.raises(ConfigError, match=why):
        WorkerConfig(model="m", cores_file="cores", **settings)
