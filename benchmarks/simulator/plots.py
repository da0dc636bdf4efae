"""Curves that people would rather look at: how latencies are spread, and what becomes of goodput as load grows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.simulator.cluster import simulate
from benchmarks.simulator.cost import CostModel
from benchmarks.simulator.records import Result
from benchmarks.simulator.report import report
from benchmarks.simulator.slo import Slo
from benchmarks.simulator.spec import ClusterSpec
from benchmarks.simulator.trace import Trace

LOADS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
# Enough for a steady state, and eight runs of so many take as long as one of a day's traffic.
_MAX_REQUESTS = 2000


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One load: the trace's requests, arriving `factor` times as fast."""

    factor: float
    requests_per_s: float
    served_per_s: float
    goodput: float | None


def load_curve(trace: Trace, spec: ClusterSpec, cost: CostModel, slo: Slo | None) -> list[LoadPoint]:
    """The first requests of the trace at several loads; for ever slower ones a queue would only grow."""
    requests = trace.requests[:_MAX_REQUESTS]
    points = []
    for factor in LOADS:
        faster = Trace(
            trace.name, tuple(replace(each, arrival_s=each.arrival_s / factor) for each in requests)
        )
        numbers = report(simulate(faster, spec, cost), slo)
        points.append(LoadPoint(factor, faster.request_rate, numbers.requests_per_s, numbers.goodput))
    return points


def plot_latencies(result: Result, slo: Slo | None, file: Path) -> None:
    """Shares of requests below each TTFT, and of tokens below each ITL."""
    figure = _figure()
    left, right = figure.subplots(1, 2)
    _cdf(left, [record.ttft_s for record in result.finished], "TTFT", slo.ttft_s if slo else None)
    _cdf(
        right, [gap for record in result.finished for gap in record.itls_s], "ITL", slo.itl_s if slo else None
    )
    figure.savefig(file)


def plot_load(points: Sequence[LoadPoint], slo: Slo | None, file: Path) -> None:
    """What is served, and what of it as promised, over what arrives."""
    figure = _figure()
    axes = figure.subplots()
    arriving = [point.requests_per_s for point in points]
    axes.plot(arriving, arriving, linestyle=":", color="grey", label="all that arrive")
    axes.plot(arriving, [point.served_per_s for point in points], marker="o", label="served")
    if slo is not None:
        axes.plot(arriving, [point.goodput or 0.0 for point in points], marker="s", label=f"within {slo}")
    axes.set_xlabel("requests a second that arrive")
    axes.set_ylabel("requests a second")
    axes.legend()
    figure.savefig(file)


def _cdf(axes: Axes, values: Sequence[float], label: str, bound_s: float | None) -> None:
    ordered = sorted(values)
    axes.plot(
        [value * 1e3 for value in ordered], [(index + 1) / len(ordered) for index in range(len(ordered))]
    )
    if bound_s is not None:
        axes.axvline(bound_s * 1e3, linestyle="--", color="grey")
    axes.set_xscale("log")
    axes.set_xlabel(f"{label} in ms")
    axes.set_ylabel("share")
    axes.grid(visible=True, alpha=0.3)


def _figure() -> Figure:
    """One of its own: no window, and nothing that is shared."""
    mpl.use("Agg")
    return Figure(figsize=(9, 4), layout="constrained")
