"""Sweeps of block size and of token budget, with the reason of each default."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.simulator.cluster import simulate
from benchmarks.simulator.cost import CostModel, StepWork
from benchmarks.simulator.report import Report, as_json, report
from benchmarks.simulator.search import BLOCK_SIZES
from benchmarks.simulator.spec import ClusterSpec
from benchmarks.simulator.trace import Trace

BUDGETS = (64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class Point:
    """One value of the setting that is swept. `host_s` is what scheduler, pool and router took on this machine."""

    setting: str
    value: int
    report: Report
    host_s: float

    def as_json(self) -> dict[str, object]:
        """For programs."""
        return {self.setting: self.value, "host_s": self.host_s, **as_json(self.report)}


def sweep(trace: Trace, base: ClusterSpec, cost: CostModel) -> Iterator[Point]:
    """Both settings, each with the other one as it was given."""
    for block_size in BLOCK_SIZES:
        yield _point(trace, replace(base, block_size=block_size), cost, "block_size", block_size)
    for budget in BUDGETS:
        cluster = base.with_scheduler(max_num_batched_tokens=budget)
        yield _point(trace, cluster, cost, "max_num_batched_tokens", budget)


def sweep_table(points: Sequence[Point], defaults: ClusterSpec, cost: CostModel) -> str:
    """One part for each setting, and under it why its default is what it is."""
    reasons = {"block_size": _reason_of_block_size, "max_num_batched_tokens": _reason_of_budget}
    values = {
        "block_size": defaults.block_size,
        "max_num_batched_tokens": defaults.decode.max_num_batched_tokens,
    }
    parts = []
    for setting, default in values.items():
        by_value = {point.value: point for point in points if point.setting == setting}
        rows = [_row(point, is_default=value == default) for value, point in by_value.items()]
        head = f"{setting:<24}{'TTFT p95':>11}{'ITL p95':>11}{'tokens/s':>10}{'hits':>7}{'preempted':>10}{'host':>8}"
        parts.append("\n".join([head, *rows, reasons[setting](by_value, default, cost)]))
    return "\n\n".join(parts)


def _reason_of_block_size(points: dict[int, Point], default: int, _: CostModel) -> str:
    here, half, twice = points[default], points[default // 2], points[default * 2]
    return (
        f"The default is {default}: the last block of a sequence wastes {default / 2:g} tokens in the mean. With {half.value} the host has "
        f"{_change(half.host_s, here.host_s)} work with tables and hashes, for {_points(half, here)} of cache hits; {twice.value} "
        f"wastes twice as much, and matches prefixes more coarsely, for {_points(twice, here)}."
    )


def _reason_of_budget(points: dict[int, Point], default: int, cost: CostModel) -> str:
    here, half, twice = points[default], points[default // 2], points[default * 2]
    chunk = StepWork(0, 0, 1, default, default * (default + 1) // 2)
    ttft = {point.value: _change(point.report.ttft_s.p95, here.report.ttft_s.p95) for point in (half, twice)}
    return (
        f"The default is {default}: the budget bounds the gap between two tokens whatever prompt arrives, here by "
        f"{cost.step_s(chunk) * 1e3:.0f} ms and what the decodes take. Half of it changes TTFT p95 by {ttft[half.value]}, since each "
        f"chunk pays for a whole step; twice as much by {ttft[twice.value]}, with gaps twice as long."
    )


def _change(value: float, base: float) -> str:
    return f"{value / base - 1:+.0%}" if base else "nothing"


def _points(point: Point, base: Point) -> str:
    return f"{(point.report.cache_hit_share - base.report.cache_hit_share) * 100:+.1f} points"


def _point(trace: Trace, cluster: ClusterSpec, cost: CostModel, setting: str, value: int) -> Point:
    start_s = time.perf_counter()
    result = simulate(trace, cluster, cost)
    return Point(setting, value, report(result), time.perf_counter() - start_s)


def _row(point: Point, *, is_default: bool) -> str:
    numbers = point.report
    label = f"{point.value}{' (default)' if is_default else ''}"
    return (
        f"{label:<24}{numbers.ttft_s.p95 * 1e3:>8.0f} ms{numbers.itl_s.p95 * 1e3:>8.1f} ms"
        f"{numbers.output_tokens_per_s:>10.1f}{numbers.cache_hit_share:>7.1%}"
        f"{numbers.preempted_request_share:>10.1%}{point.host_s:>6.1f} s"
    )
