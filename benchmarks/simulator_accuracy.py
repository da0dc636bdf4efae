"""`./run bench simulator`: a simulated run beside a real one of the same trace, made in the same call; and its speed.

Steps are measured right before and right after the real run, never during it: what is compared is a prediction.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.fit import add_lab_flags, fit_of, lab_of, numbers_of, print_fit, say
from benchmarks.simulator.cluster import simulate
from benchmarks.simulator.cost import TEXTBOOK, CostModel
from benchmarks.simulator.measure import Lab, StepSample, grid, measure_round, medians
from benchmarks.simulator.options import write_json
from benchmarks.simulator.readers import load_trace
from benchmarks.simulator.real_run import run_real
from benchmarks.simulator.records import RequestRecord
from benchmarks.simulator.slo import percentile
from benchmarks.simulator.spec import ClusterSpec, scheduler_config
from benchmarks.simulator.trace import Trace, TraceRequest
from paceline.core.errors import ConfigError
from paceline.launcher.config import Topology

_TRACE = "poisson:requests=40,rate=1,prompt=128,output=32,seed=1"
_SPEED_TRACE = "poisson:requests={},rate=8,prompt=512,output=200,seed=1"
# Requests wait for each other, and the queue is stable.
_BUSY_SHARE = 0.8


def main(argv: Sequence[str]) -> int:
    """Prints both runs; always 0: the errors are measurements."""
    args = _parser().parse_args(argv)
    lab, name = lab_of(args)
    spec = _spec(args, lab)
    cells = grid(args.max_num_seqs, args.max_num_batched_tokens, args.max_context)
    measure_round(lab, cells)
    say(f"measuring {len(cells)} kinds of steps, before and after each of {args.runs} real runs")
    rounds = [measure_round(lab, cells)]
    trace = _fitting(load_trace(args.trace), spec, fit_of(rounds[0], lab, name).model)
    real = []
    for number in range(args.runs):
        say(f"real run {number + 1}: {len(trace.requests)} requests over {trace.duration_s:.0f} s")
        real.append(run_real(trace, spec, lab))
        rounds.append(measure_round(lab, cells))
    found = fit_of(medians(rounds), lab, name)
    print_fit(found)
    simulated = simulate(trace, spec, found.model, vocab_size=lab.vocab_size)
    errors = _compare([run.requests for run in real], simulated.requests)
    errors |= _step_errors([step for run in real for step in run.steps], found.model)
    numbers = {**errors, "sim_requests_per_s": _speed(args.sim_requests), "fit": numbers_of(found)}
    write_json(args.json, numbers)
    return 0


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


def _compare(runs: Sequence[Sequence[RequestRecord]], simulated: Sequence[RequestRecord]) -> dict[str, float]:
    """The keys of the report: how far each quantile of the simulation is from the real one, as a share of that.

    The real one is the median over the runs: whatever else the machine did during one of them is not to be predicted.
    """
    errors = {}
    print(f"{'':<10}{'real':>12}{'simulated':>12}{'error':>10}   each real run")
    for kind, values in (("ttft", _ttfts), ("itl", _itls)):
        for share in (0.5, 0.95):
            predicted = percentile(values(simulated), share)
            each = [percentile(values(run), share) for run in runs]
            measured = statistics.median(each)
            error = predicted / measured - 1
            errors[f"{kind}_p{share * 100:.0f}_error"] = error
            label, shown = f"{kind.upper()} p{share * 100:.0f}", ", ".join(f"{s * 1e3:.1f}" for s in each)
            print(f"{label:<10}{measured * 1e3:>9.1f} ms{predicted * 1e3:>9.1f} ms{error:>+10.1%}   {shown}")
    return errors


def _step_errors(steps: Sequence[StepSample], model: CostModel) -> dict[str, float]:
    """How far the cost model is from each step of the real run; what is beyond it is the simulator's own error."""
    errors = [model.step_s(step.work) / step.duration_s - 1 for step in steps]
    total = sum(model.step_s(step.work) for step in steps) / sum(step.duration_s for step in steps) - 1
    found = {"step_error_p50": percentile(errors, 0.5), "step_error_total": total}
    print(f"{len(steps)} steps of the real run: {found['step_error_p50']:+.1%} at p50, {total:+.1%} in all")
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
    parser.add_argument("--runs", type=int, default=3, help="real runs, whose median counts (default: 3)")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="as of a worker (default: 16)")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=256, help="as of a worker (default: 256)"
    )
    parser.add_argument(
        "--max-context", type=int, default=512, help="longest context measured (default: 512)"
    )
    parser.add_argument("--sim-requests", type=int, default=10_000, help="for the simulator's own speed")
    return parser
