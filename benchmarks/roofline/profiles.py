"""Where the time of a step goes, by operator of torch."""

from collections.abc import Mapping

from torch.profiler import ProfilerActivity, profile

from benchmarks.simulator.measure import Cell, Lab, measure_round

_PYTHON = "Python and what else is no operator"


def profile_of(lab: Lab, cell: Cell) -> dict[str, float]:
    """Milliseconds a step of each operator by itself, the largest first; the profiler makes steps somewhat longer."""
    measure_round(lab, [cell])
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        samples = measure_round(lab, [cell])
    step_ms = 1e3 * sum(sample.duration_s for sample in samples) / len(samples)
    by_name = {event.key: event.self_cpu_time_total / 1e3 / len(samples) for event in profiler.key_averages()}
    by_name[_PYTHON] = step_ms - sum(by_name.values())
    return dict(sorted(by_name.items(), key=lambda item: -item[1]))


def profile_table(title: str, by_name: Mapping[str, float], num_shown: int = 14) -> str:
    """For people."""
    step_ms = sum(by_name.values())
    lines = [
        f"  {name:<48} {each_ms:9.3f} ms {each_ms / step_ms:6.1%}"
        for name, each_ms in list(by_name.items())[:num_shown]
    ]
    return "\n".join([f"{title}: {step_ms:.2f} ms a step", *lines])
