"""`./run bench simulator`: a simulated run beside a real one of the same trace, made in the same call; and its speed.

Steps are measured right before and right after the real run, never during it: what is compared is a prediction.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.fit import add_lab_flags, fit_of, lab_of, numbers_of, print_fit, say
from benchmarks.simulator.cluster import simulate
from benchmarks.simulator.cost import TEXTBOOK, CostModel
from benchmarks.simulator.measure import Cell, Lab, StepSample, grid, measure_round, medians
from benchmarks.simulator.readers import load_trace
from benchmarks.simulator.real_run import run_real
from benchmarks.simulator.records import RequestRecord
from benchmarks.simulator.report import Quantiles
from benchmarks.simulator.slo import percentile
from benchmarks.simulator.spec import ClusterSpec, scheduler_config
from benchmarks.simulator.trace import Trace
from paceline.launcher.config import Topology

# Half to two thirds of what the default model does on two cores: requests wait for each other, and the queue is stable.
_TRACE = "poisson:requests=60,rate=1.2,prompt=128,output=32,seed=1"
_SPEED_TRACE = "poisson:requests={},rate=8,prompt=512,output=200,seed=1"
_ROUNDS_EACH_SIDE = 2


def main(argv: Sequence[str]) -> int:
    """Prints both runs; always 0: the errors are measurements."""
    args = _parser().parse_args(argv)
    lab, name = lab_of(args)
    trace = load_trace(args.trace)
    spec = _spec(args, lab)
    cells = grid(args.max_num_seqs, args.max_num_batched_tokens, args.max_context)
    measure_round(lab, cells)
    rounds = _rounds(lab, cells)
    say(f"the real run: {len(trace.requests)} requests over {trace.duration_s:.0f} s")
    real = run_real(trace, spec, lab)
    rounds += _rounds(lab, cells)
    found = fit_of(medians(rounds), lab, name)
    print_fit(found)
    simulated = simulate(trace, spec, found.model, vocab_size=lab.vocab_size)
    errors = _compare(real.requests, simulated.requests)
    steps = _step_errors(real.steps, found.model)
    numbers = {**errors, **steps, "sim_requests_per_s": _speed(args.sim_requests), "fit": numbers_of(found)}
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    return 0


def _rounds(lab: Lab, cells: Sequence[Cell]) -> list[list[StepSample]]:
    say(f"measuring {len(cells)} kinds of steps")
    return [measure_round(lab, cells) for _ in range(_ROUNDS_EACH_SIDE)]


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
        ours, theirs = Quantiles.of(values(simulated)), Quantiles.of(values(real))
        for share in ("p50", "p95"):
            predicted, measured = getattr(ours, share), getattr(theirs, share)
            errors[f"{kind}_{share}_error"] = predicted / measured - 1
            label = f"{kind.upper()} {share}"
            print(
                f"{label:<10}{measured * 1e3:>9.1f} ms{predicted * 1e3:>9.1f} ms{predicted / measured - 1:>+10.1%}"
            )
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
    parser.add_argument("--max-num-seqs", type=int, default=16, help="as of a worker (default: 16)")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=256, help="as of a worker (default: 256)"
    )
    parser.add_argument(
        "--max-context", type=int, default=512, help="longest context measured (default: 512)"
    )
    parser.add_argument("--sim-requests", type=int, default=10_000, help="for the simulator's own speed")
    return parser
