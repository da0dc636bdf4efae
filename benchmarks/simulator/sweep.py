"""Sweeps of block size and of token budget, with the reason of each default."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.simulator.cluster import simulate
from benchmarks.simulator.cost import CostModel
from benchmarks.simulator.report import Report, as_json, report
from benchmarks.simulator.search import BLOCK_SIZES
from benchmarks.simulator.spec import ClusterSpec
from benchmarks.simulator.trace import Trace

BUDGETS = (64, 128, 256, 512, 1024, 2048)
_REASONS = {
    "block_size": "A smaller block wastes less of each sequence's last one and matches prefixes more finely, but tables, hashes and "
    "hand-overs have more entries: see the host's time. 16 wastes 8 tokens a sequence in the mean, and halves the books of 8.",
    "max_num_batched_tokens": "A step is never larger than the budget, so the budget bounds the gap between two tokens whatever prompt arrives; "
    "but each chunk pays for a whole step. 512 is where a larger one hardly shortens the wait for the first token any more.",
}


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


def sweep_table(points: list[Point], defaults: ClusterSpec) -> str:
    """One part for each setting, and under it why its default is what it is."""
    default = {
        "block_size": defaults.block_size,
        "max_num_batched_tokens": defaults.decode.max_num_batched_tokens,
    }
    parts = []
    for setting, value in default.items():
        rows = [_row(point, is_default=point.value == value) for point in points if point.setting == setting]
        head = f"{setting:<24}{'TTFT p95':>11}{'ITL p95':>11}{'tokens/s':>10}{'hits':>7}{'preempted':>10}{'host':>8}"
        parts.append("\n".join([head, *rows, f"The default is {value}. {_REASONS[setting]}"]))
    return "\n\n".join(parts)


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
