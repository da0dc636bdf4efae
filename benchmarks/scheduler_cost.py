"""What a step costs the scheduler itself: real time of schedule() and update(), with nobody computing anything."""

import statistics
import time
from dataclasses import dataclass

from benchmarks.simulator.runner import EmptyRunner
from benchmarks.simulator.spec import scheduler_config
from benchmarks.simulator.trace import TraceRequest, spec_of
from paceline.engine.block_pool import BlockPool
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import SequenceRole

_BLOCK_SIZE = 16
_PROMPT_TOKENS, _OUTPUT_TOKENS = 100, 600
# Those that wait for blocks want so many tokens.
_LONG_TOKENS = 2000
_NUM_WARM_UP, _NUM_STEPS = 40, 400


@dataclass(frozen=True, slots=True)
class SchedulerCost:
    """Microseconds a step."""

    schedule_us: float
    update_us: float
    total_us_p50: float
    total_us_p95: float


def measure_scheduler(num_running: int, num_waiting: int, *, is_short_of_blocks: bool) -> SchedulerCost:
    """Steps in which `num_running` sequences decode while `num_waiting` wait: for a seat or, if so, for blocks."""
    runner = EmptyRunner()
    a_sequence = -(-(_PROMPT_TOKENS + _OUTPUT_TOKENS) // _BLOCK_SIZE)
    # All that run can grow to their ends; beyond that there is less than one that waits wants.
    num_blocks = num_running * a_sequence
    seats = num_running + (num_waiting if is_short_of_blocks else 0)
    config = scheduler_config(
        max_num_batched_tokens=8 * num_running, max_num_seqs=seats, watermark=1.0 - _BLOCK_SIZE / num_blocks
    )
    scheduler = Scheduler(config, BlockPool(num_blocks, _BLOCK_SIZE), runner.memory)
    for number in range(num_running + num_waiting):
        is_long = is_short_of_blocks and number >= num_running
        request = TraceRequest(0.0, _LONG_TOKENS if is_long else _PROMPT_TOKENS, _OUTPUT_TOKENS)
        scheduler.add(spec_of(request, number), SequenceRole.GENERATE)
    steps = [_step(scheduler, runner) for _ in range(_NUM_WARM_UP + _NUM_STEPS)][_NUM_WARM_UP:]
    totals = sorted(schedule_us + update_us for schedule_us, update_us in steps)
    return SchedulerCost(
        schedule_us=statistics.median(schedule_us for schedule_us, _ in steps),
        update_us=statistics.median(update_us for _, update_us in steps),
        total_us_p50=statistics.median(totals),
        total_us_p95=totals[int(0.95 * len(totals))],
    )


def _step(scheduler: Scheduler, runner: EmptyRunner) -> tuple[float, float]:
    begin = time.perf_counter()
    output = scheduler.schedule()
    scheduled = time.perf_counter()
    computed = runner.execute(output)
    update = time.perf_counter()
    # Kept until the time is taken, as the engine does, which hands them on.
    _events = scheduler.update(output, computed)
    end = time.perf_counter()
    # As the engine does after every step, so that changes do not pile up.
    scheduler.pool.take_changes()
    return 1e6 * (scheduled - begin), 1e6 * (end - update)
