"""`./run bench simulator`: a simulated run beside a real one of the same trace, made in the same call; and its speed.

The trace is cut into parts. The real steps of every other one give the cost model, and its noise, by which the part between them
is simulated: what is compared is a prediction, for a machine that is as busy as it was a moment before and after.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.fit import add_lab_flags, fit_of, lab_of, numbers_of, print_fit, say
from benchmarks.simulator.cluster import simulate
from benchmarks.simulator.cost import TEXTBOOK, CostModel
from benchmarks.simulator.fitting import Fit, with_noise
from benchmarks.simulator.measure import Lab, StepSample, grid, measure_round
from benchmarks.simulator.options import write_json
from benchmarks.simulator.readers import load_trace
from benchmarks.simulator.real_cluster import compare_on_cluster
from benchmarks.simulator.real_run import RealRun, run_real
from benchmarks.simulator.records import RequestRecord
from benchmarks.simulator.slo import percentile
from benchmarks.simulator.spec import ClusterSpec, scheduler_config
from benchmarks.simulator.trace import Trace, TraceRequest
from paceline.core.errors import ConfigError
from paceline.launcher.config import Topology

_TRACE = "poisson:requests=108,rate=1,prompt=96,output=24,seed=1"
_SPEED_TRACE = "poisson:requests={},rate=8,prompt=512,output=200,seed=1"
# Every prompt is one chunk, so that all steps are alike; shorter and longer ones than the router hands over.
_CLUSTER_TRACE = "poisson:requests=80,rate=5,prompt=60,output=20,seed=1"
# Requests wait for each other, and the queue is stable.
_BUSY_SHARE = 0.85
# Of the sizes of a step that are measured, each is so many times the one before: coarse, but soon done.
_FACTOR = 4


def main(argv: Sequence[str]) -> int:
    """Prints real and simulated runs; always 0: the errors are measurements."""
    args = _parser().parse_args(argv)
    lab, directory = lab_of(args)
    numbers = _engine_errors(args, lab, directory.name)
    if args.cluster:
        numbers |= _cluster_errors(args, lab, directory)
    numbers["sim_requests_per_s"] = _speed(args.sim_requests)
    write_json(args.json, numbers)
    return 0


def _engine_errors(args: argparse.Namespace, lab: Lab, name: str) -> dict[str, Any]:
    """One engine on a real model. Every other part of the trace is only there to be measured, and predicts the one between."""
    spec = _spec(args, lab)
    trace = _fitting(load_trace(args.trace), spec, _first_fit(args, lab, name).model)
    parts, real = _parts(trace, 2 * args.parts + 1), []
    for number, part in enumerate(parts):
        what = "compared" if number % 2 else "measured"
        say(
            f"part {number + 1} of {len(parts)}, {what}: {len(part.requests)} requests over {part.duration_s:.0f} s"
        )
        real.append(run_real(part, spec, lab))
    fits = [
        _fit_around(list(zip(parts, real, strict=True))[number - 1 : number + 2 : 2], spec, lab, name)
        for number in range(1, len(parts), 2)
    ]
    simulated = [
        simulate(part, spec, found.model, vocab_size=lab.vocab_size)
        for part, found in zip(parts[1::2], fits, strict=True)
    ]
    print_fit(fits[0])
    print(f"\none engine, {name}:")
    compared = real[1::2]
    errors = _compare(
        [record for run in compared for record in run.requests],
        [record for run in simulated for record in run.requests],
    )
    errors |= _step_errors(
        [(step, found.model) for run, found in zip(compared, fits, strict=True) for step in run.steps]
    )
    return {**errors, "fit": numbers_of(fits[0])}


def _fit_around(measured: Sequence[tuple[Trace, RealRun]], spec: ClusterSpec, lab: Lab, name: str) -> Fit:
    """What the parts before and after one say: steps, their noise, and what a request waits for beside steps."""
    samples = [step for _, run in measured for step in run.steps]
    found = with_noise(fit_of(samples, lab, name), samples)
    late_s = [
        theirs.ttft_s - ours.ttft_s
        for trace, run in measured
        for ours, theirs in zip(
            simulate(trace, spec, found.model, vocab_size=lab.vocab_size).requests, run.requests, strict=True
        )
    ]
    overhead_s = max(0.0, statistics.median(late_s))
    return replace(found, model=replace(found.model, request_overhead_s=overhead_s))


def _first_fit(args: argparse.Namespace, lab: Lab, name: str) -> Fit:
    """How fast this machine is, so that the trace can be slowed to what it can serve."""
    cells = grid(args.max_num_seqs, args.max_num_batched_tokens, args.max_context, _FACTOR)
    measure_round(lab, cells)
    say(f"measuring {len(cells)} kinds of steps")
    return fit_of(measure_round(lab, cells), lab, name)


def _cluster_errors(args: argparse.Namespace, lab: Lab, directory: Path) -> dict[str, Any]:
    """Processes, router and hand-overs, whose steps all take one time."""
    topology, trace = Topology.parse(args.topology), load_trace(_CLUSTER_TRACE)
    say(f"a real {topology} of fake runners: {len(trace.requests)} requests over {trace.duration_s:.0f} s")
    real, cost = compare_on_cluster(trace, topology, directory, lab.vocab_size)
    simulated = simulate(trace, ClusterSpec(topology), cost, vocab_size=lab.vocab_size).requests
    print(f"\n{topology} of fake runners, {cost.base_s * 1e3:.1f} ms a step:")
    errors = _compare(real, simulated)
    same = sum(ours.mode == theirs.mode for ours, theirs in zip(simulated, real, strict=True)) / len(real)
    print(f"{same:.0%} of the requests took the same way in both")
    return {**{f"cluster_{name}": value for name, value in errors.items()}, "cluster_same_mode_share": same}


def _parts(trace: Trace, num_parts: int) -> list[Trace]:
    """Runs of consecutive requests, each from 0 s on: the machine is measured anew between them."""
    size = -(-len(trace.requests) // num_parts)
    parts = [trace.requests[start : start + size] for start in range(0, len(trace.requests), size)]
    return [Trace(trace.name, tuple(_earlier(each, part[0].arrival_s) for each in part)) for part in parts]


def _earlier(request: TraceRequest, start_s: float) -> TraceRequest:
    return replace(request, arrival_s=request.arrival_s - start_s)


def _fitting(trace: Trace, spec: ClusterSpec, model: CostModel) -> Trace:
    """The same requests, arriving as fast as this machine can serve them without falling behind."""
    for percent in range(10, 1000, 10):
        slower = Trace(trace.name, tuple(_later(request, percent / 100) for request in trace.requests))
        result = simulate(slower, spec, model)
        busy_s = sum(step.end_s - step.start_s for step in result.steps)
        if busy_s / result.end_s <= _BUSY_SHARE:
            return slower
    raise ConfigError(f"--trace {trace.name}: this machine is far too slow for it")


def _later(request: TraceRequest, factor: float) -> TraceRequest:
    return replace(request, arrival_s=request.arrival_s * factor)


def _spec(args: argparse.Namespace, lab: Lab) -> ClusterSpec:
    config = scheduler_config(
        max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.max_num_batched_tokens
    )
    return ClusterSpec(
        Topology(0, 1),
        decode=config,
        block_size=args.block_size,
        num_kv_tokens=lab.num_blocks * args.block_size,
        groups=lab.layout.groups,
    )


def _compare(real: Sequence[RequestRecord], simulated: Sequence[RequestRecord]) -> dict[str, float]:
    """The keys of the report: how far each quantile of the simulation is from the real one, as a share of that."""
    errors = {}
    print(f"{'':<10}{'real':>12}{'simulated':>12}{'error':>10}")
    for kind, values in (("ttft", _ttfts), ("itl", _itls)):
        for share in (0.5, 0.95):
            predicted, measured = percentile(values(simulated), share), percentile(values(real), share)
            errors[f"{kind}_p{share * 100:.0f}_error"] = predicted / measured - 1
            label = f"{kind.upper()} p{share * 100:.0f}"
            print(
                f"{label:<10}{measured * 1e3:>9.1f} ms{predicted * 1e3:>9.1f} ms{predicted / measured - 1:>+10.1%}"
            )
    return errors


def _step_errors(steps: Sequence[tuple[StepSample, CostModel]]) -> dict[str, float]:
    """How far the cost model is from each step of the real run; what is beyond it is the simulator's own error."""
    predicted = [model.step_s(step.work) for step, model in steps]
    measured = [step.duration_s for step, _ in steps]
    each = [ours / theirs - 1 for ours, theirs in zip(predicted, measured, strict=True)]
    found = {"step_error_p50": percentile(each, 0.5), "step_error_total": sum(predicted) / sum(measured) - 1}
    print(
        f"{len(steps)} steps of the real run: {found['step_error_p50']:+.1%} at p50, {found['step_error_total']:+.1%} in all"
    )
    return found


def _ttfts(records: Sequence[RequestRecord]) -> list[float]:
    return [record.ttft_s for record in records]


def _itls(records: Sequence[RequestRecord]) -> list[float]:
    return [gap for record in records for gap in record.itls_s]


def _speed(num_requests: int) -> float:
    """Requests a second that the simulator gets through on 1P2D, tokens and all."""
    trace: Trace = load_trace(_SPEED_TRACE.format(num_requests))
    start_s = time.perf_counter()
    spec = replace(ClusterSpec(Topology(1, 2)), disaggregate="always")
    result = simulate(trace, spec, TEXTBOOK)
    duration_s = time.perf_counter() - start_s
    num_tokens = sum(len(record.token_times_s) for record in result.requests)
    print(
        f"{num_requests} requests on 1P2D simulated in {duration_s:.1f} s: {num_tokens / duration_s:.0f} tokens/s"
    )
    return num_requests / duration_s


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("./run bench simulator", description=__doc__, allow_abbrev=False)
    add_lab_flags(parser)
    parser.add_argument("--trace", default=_TRACE, help=f"see ./run simulate --help (default: {_TRACE})")
    parser.add_argument("--topology", default="1P1D", help="of the real cluster (default: 1P1D)")
    parser.add_argument(
        "--cluster",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also compare a real cluster of processes",
    )
    parser.add_argument(
        "--parts",
        type=int,
        default=4,
        help="parts of the trace that are compared; between them others are measured",
    )
    parser.add_argument("--max-num-seqs", type=int, default=16, help="as of a worker (default: 16)")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=256, help="as of a worker (default: 256)"
    )
    parser.add_argument(
        "--max-context", type=int, default=512, help="longest context measured (default: 512)"
    )
    parser.add_argument("--sim-requests", type=int, default=10_000, help="for the simulator's own speed")
    return parser
