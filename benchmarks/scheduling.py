"""`./run bench scheduling`: what each policy of the scheduler is worth, on the virtual clock and on a real model.

The virtual runs use the textbook's cost of a step (5 ms, 0.3 ms a decoding sequence, 0.2 ms a token of a prompt) and say the same
on every machine. The real ones are made side by side, and their ratio is what counts.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.experts import group_table, measure_groups
from benchmarks.fit import add_lab_flags, lab_of, say
from benchmarks.scenarios import (
    batching_trace,
    fast_lane_trace,
    head_of_line_trace,
    is_short,
    load_trace_at,
    one_worker,
    waste_trace,
)
from benchmarks.scheduler_cost import SchedulerCost, measure_scheduler
from benchmarks.simulator.cluster import simulate
from benchmarks.simulator.cost import LINEAR, TEXTBOOK
from benchmarks.simulator.measure import Lab
from benchmarks.simulator.options import write_json
from benchmarks.simulator.real_run import run_real
from benchmarks.simulator.records import RequestRecord, Result
from benchmarks.simulator.report import Report, report, slot_use
from benchmarks.simulator.slo import percentile
from benchmarks.simulator.spec import ClusterSpec
from benchmarks.simulator.trace import Trace
from paceline.engine.policies import VICTIM_POLICIES

Numbers = dict[str, Any]
_RATES = (2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)
# Where the curve above has its knee.
_CAPACITY = 7.0
_NO_CUSHION: dict[str, Any] = {"watermark": 0.0, "watermark_rise": 0.0}
_WATERMARKS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)


def main(argv: Sequence[str]) -> int:
    """Prints a table for each policy; always 0: the figures are for people to judge."""
    args = _parser().parse_args(argv)
    numbers: Numbers = {}
    for scenario in (_static_waste, _batching, _saturation, _watermarks, _victims, _head_of_line, _fast_lane):
        numbers |= scenario(args.requests)
        print(flush=True)
    numbers |= _own_cost()
    if not args.no_real:
        numbers |= _real_batching(args)
        numbers |= _experts(args.repeats)
    write_json(args.json, numbers)
    return 0


# -- batching


def _static_waste(_: int) -> Numbers:
    spec = one_worker(batching="static", max_num_seqs=4, fast_lane_share=0.0)
    decodes = [step.work.num_sequences for step in simulate(waste_trace(), spec, TEXTBOOK).steps]
    share = sum(decodes) / (4 * len(decodes))
    _title("A static batch of outputs of 20, 50, 200 and 800 tokens")
    print(f"useful slots: {share:.1%} of all, as in the textbook")
    return {"textbook_waste_slot_use": share}


def _batchings() -> dict[str, ClusterSpec]:
    def batching(kind: str, max_num_seqs: int) -> ClusterSpec:
        return one_worker(100_000, batching=kind, max_num_seqs=max_num_seqs, fast_lane_share=0.0)

    return {
        "static 4": batching("static", 4),
        "static 8": batching("static", 8),
        "continuous 8": batching("continuous", 8),
    }


def _batching(_: int) -> Numbers:
    _title("20 requests, prompts 10 to 100, outputs 20 to 200, all there at once")
    print(f"{'':<14}{'textbook cost':>15}{'slot use':>10}{'linear cost':>14}")
    numbers: Numbers = {}
    for name, spec in _batchings().items():
        textbook, linear = (simulate(batching_trace(), spec, cost) for cost in (TEXTBOOK, LINEAR))
        print(f"{name:<14}{textbook.end_s:>13.2f} s{slot_use(textbook):>10.1%}{linear.end_s:>12.2f} s")
        key = name.replace(" ", "_")
        numbers |= {f"{key}_total_s": textbook.end_s, f"{key}_slot_use": slot_use(textbook)}
        numbers[f"{key}_linear_total_s"] = linear.end_s
    numbers["static_total_s"], numbers["continuous_total_s"] = (
        numbers["static_4_total_s"],
        numbers["continuous_8_total_s"],
    )
    numbers["static_slot_use"] = numbers["static_4_slot_use"]
    numbers["continuous_slot_use"] = numbers["continuous_8_slot_use"]
    print(
        f"continuous 8 takes {numbers['continuous_total_s'] / numbers['static_total_s']:.0%} of static 4's time;"
    )
    print(
        "where each sequence costs as much as it would alone, nothing is gained: the gain is the shared pass"
    )
    return numbers


def _real_batching(args: argparse.Namespace) -> Numbers:
    lab, directory = lab_of(args)
    _title(f"The same on a real model, {directory.name}, medians of {args.repeats}")
    totals: dict[str, list[float]] = {name: [] for name in _batchings()}
    for number in range(args.repeats + 1):
        for name, spec in _batchings().items():
            say(f"round {number} of {args.repeats}: {name}")
            end_s = _real_total_s(lab, spec)
            if number:  # the first one warms up
                totals[name].append(end_s)
    numbers: Numbers = {}
    for name, each in totals.items():
        median = statistics.median(each)
        print(f"{name:<14}{median:>10.2f} s  ({min(each):.2f} to {max(each):.2f})")
        numbers[f"real_{name.replace(' ', '_')}_total_s"] = median
    numbers["real_static_total_s"] = numbers["real_static_4_total_s"]
    numbers["real_continuous_total_s"] = numbers["real_continuous_8_total_s"]
    share = numbers["real_continuous_total_s"] / numbers["real_static_total_s"]
    print(f"continuous 8 takes {share:.0%} of static 4's time")
    return numbers


def _real_total_s(lab: Lab, spec: ClusterSpec) -> float:
    run = run_real(batching_trace(), spec, lab)
    return max(record.token_times_s[-1] for record in run.requests)


# -- too much load


def _saturation(num_requests: int) -> Numbers:
    _title("Load from too little to too much, default settings")
    print(_LOAD_HEAD)
    reports = {
        rate: _print_load(f"{rate:g}/s", load_trace_at(rate, num_requests), one_worker()) for rate in _RATES
    }
    overload = _print_load("1.2x", load_trace_at(1.2 * _CAPACITY, num_requests), one_worker())
    twice = _print_load("2x", load_trace_at(2 * _CAPACITY, num_requests), one_worker())
    peak = max(each.output_tokens_per_s for each in reports.values())
    return {
        "overload_throughput_ratio": twice.output_tokens_per_s / peak,
        "preempted_request_share": max(
            each.preempted_request_share for each in (overload, twice, *reports.values())
        ),
        "recomputed_token_share": overload.recomputed_share,
        "peak_output_tokens_per_s": peak,
    }


def _watermarks(num_requests: int) -> Numbers:
    _title("The cushion of free blocks, at 1.2 times the load that fits")
    print(_LOAD_HEAD)
    trace = load_trace_at(1.2 * _CAPACITY, num_requests)
    rows = {
        watermark: _print_load(f"{watermark:.0%}", trace, one_worker(watermark=watermark, watermark_rise=0.0))
        for watermark in _WATERMARKS
    }
    print("the default, 20 % and up to 25 %, is where preemption ends; more only lowers throughput")
    return {
        "watermark_sweep": {
            f"{watermark:g}": {
                "output_tokens_per_s": each.output_tokens_per_s,
                "preempted_request_share": each.preempted_request_share,
            }
            for watermark, each in rows.items()
        }
    }


def _victims(num_requests: int) -> Numbers:
    _title("Who loses its blocks, without a cushion, at 1.2 times the load that fits")
    print(_LOAD_HEAD)
    trace = load_trace_at(1.2 * _CAPACITY, num_requests)
    rows = {
        victim: _print_load(victim, trace, one_worker(victim=victim, **_NO_CUSHION))
        for victim in VICTIM_POLICIES
    }
    swapped = _print_load("swap", trace, one_worker(num_swap_blocks=600, **_NO_CUSHION))
    return {
        "recomputed_token_share_by_victim": {name: each.recomputed_share for name, each in rows.items()},
        "recomputed_token_share_swap": swapped.recomputed_share,
    }


_LOAD_HEAD = (
    f"{'':<14}{'tokens/s':>10}{'preempted':>11}{'recomputed':>12}{'TTFT p50':>11}{'p99':>10}{'ITL p99':>10}"
)


def _print_load(name: str, trace: Trace, spec: ClusterSpec) -> Report:
    numbers = report(simulate(trace, spec, TEXTBOOK))
    print(
        f"{name:<14}{numbers.output_tokens_per_s:>10.0f}{numbers.preempted_request_share:>11.1%}"
        f"{numbers.recomputed_share:>12.1%}{numbers.ttft_s.p50:>9.2f} s{numbers.ttft_s.p99:>8.2f} s"
        f"{1e3 * numbers.itl_s.p99:>7.0f} ms"
    )
    return numbers


# -- long and short together


def _head_of_line(_: int) -> Numbers:
    _title("A prompt of 4,096 tokens among 50 short ones, too many to fit")
    print(f"{'':<34}{'alone':>10}{'with it':>10}{'ratio':>8}{'its TTFT':>10}")
    ratios = {}
    for name, settings in (
        ("as it is", {}),
        ("without the fast lane", {"fast_lane_share": 0.0}),
        ("and without overtaking", {"fast_lane_share": 0.0, "max_overtakes": 0}),
    ):
        spec = one_worker(4480, **settings)
        alone, both = (
            simulate(head_of_line_trace(with_long=with_long), spec, TEXTBOOK) for with_long in (False, True)
        )
        p95_s = [percentile(_ttfts_s(each, is_short_one), 0.95) for each in (alone, both)]
        (long_s,) = _ttfts_s(both, lambda record: not is_short_one(record))
        ratios[name] = p95_s[1] / p95_s[0]
        print(f"{name:<34}{p95_s[0]:>8.2f} s{p95_s[1]:>8.2f} s{ratios[name]:>8.2f}{long_s:>8.2f} s")
    return {"head_of_line_ttft_p95_ratio": ratios["as it is"]}


def _fast_lane(_: int) -> Numbers:
    _title("Short requests while long ones saturate the normal lane (at about 4/s); their TTFT p99")
    rates = (0.5, 2.0, 4.0, 8.0)
    print(f"{'part of the step':<18}" + "".join(f"{f'{rate:g}/s':>10}" for rate in rates))
    p99_s: dict[tuple[float, float], float] = {}
    for share in (0.0, 0.2, 0.3, 0.35):
        for rate in rates:
            result = simulate(
                fast_lane_trace(rate, 40.0), one_worker(32_000, fast_lane_share=share), TEXTBOOK
            )
            p99_s[share, rate] = percentile(_ttfts_s(result, is_short_one), 0.99)
        print(f"{share:<18.0%}" + "".join(f"{p99_s[share, rate]:>8.2f} s" for rate in rates))
    ratio = p99_s[0.3, 8.0] / p99_s[0.3, 4.0]
    print(
        f"from saturation to twice as much: {ratio:.2f} with the lane, {p99_s[0.0, 8.0] / p99_s[0.0, 4.0]:.0f} without"
    )
    return {
        "fast_lane_ttft_p99_ratio": ratio,
        "no_fast_lane_ttft_p99_ratio": p99_s[0.0, 8.0] / p99_s[0.0, 4.0],
    }


def is_short_one(record: RequestRecord) -> bool:
    """See is_short."""
    return is_short(record.request)


def _ttfts_s(result: Result, of: Callable[[RequestRecord], bool]) -> list[float]:
    return [record.ttft_s for record in result.finished if of(record)]


# -- real time


def _own_cost() -> Numbers:
    _title("The scheduler itself: schedule() and update(), 256 decode and 1,000 wait")
    print(f"{'they wait for':<16}{'schedule':>10}{'update':>10}{'both p50':>10}{'p95':>10}")
    rows: dict[str, SchedulerCost] = {}
    for name, short in (("seats", False), ("blocks", True)):
        rows[name] = cost = measure_scheduler(256, 1000, is_short_of_blocks=short)
        each = (cost.schedule_us, cost.update_us, cost.total_us_p50, cost.total_us_p95)
        print(f"{name:<16}" + "".join(f"{number:>7.0f} us" for number in each))
    return {
        "scheduler_step_us_p50": rows["seats"].total_us_p50,
        "scheduler_step_blocked_us_p50": rows["blocks"].total_us_p50,
    }


def _experts(num_repeats: int) -> Numbers:
    _title("A small mixture of experts: 32 sequences decode, all or 8 a step")
    costs = measure_groups(num_repeats)
    print("\n".join(group_table(costs)))
    return {"expert_groups": {way: asdict(cost) for way, cost in costs.items()}}


def _title(text: str) -> None:
    print(f"\n{text}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("./run bench scheduling", description=__doc__)
    add_lab_flags(parser)
    parser.add_argument("--requests", type=int, default=400, help="requests of each load (default: 400)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each real run (default: 3)")
    parser.add_argument("--no-real", action="store_true", help="virtual runs only: no model is loaded")
    parser.set_defaults(max_num_seqs=8, max_context=300)
    return parser
