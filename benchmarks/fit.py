"""`./run bench fit`: measures real steps of a model on this machine, and fits the simulator's cost model to them."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from benchmarks.simulator.cost import CostModel
from benchmarks.simulator.fitting import COEFFICIENTS, Fit, fit
from benchmarks.simulator.measure import Lab, StepSample, grid, measure_round, medians, open_lab
from benchmarks.simulator.real_cluster import probe_cluster
from paceline.launcher.config import Topology, UpConfig
from paceline.launcher.models import DEFAULT_MODEL, resolve_model


def main(argv: Sequence[str]) -> int:
    """Prints the numbers and how well they fit; always 0."""
    args = parser().parse_args(argv)
    lab, directory = lab_of(args)
    name = directory.name
    cells = grid(args.max_num_seqs, args.max_num_batched_tokens, args.max_context)
    say(f"{name}: {len(cells)} kinds of steps, {args.rounds} rounds and one to warm up")
    measure_round(lab, cells)
    rounds = []
    for number in range(args.rounds):
        rounds.append(measure_round(lab, cells))
        say(f"round {number + 1} of {args.rounds}")
    samples = medians(rounds)
    found = fit_of(samples, lab, name)
    if args.cluster:
        say("probing a cluster of fake runners for what goes on outside of the engines")
        found = replace(found, model=_with_overheads(found.model, directory, lab))
    print_fit(found)
    print_worst(found, samples)
    if args.json:
        args.json.write_text(json.dumps(numbers_of(found), indent=1) + "\n", encoding="utf-8")
    return 0


def add_lab_flags(parser: argparse.ArgumentParser) -> None:
    """The model, and what it is measured with."""
    parser.add_argument("--model", type=Path, help="a Hugging Face directory (default: the default model)")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="as of a worker")
    parser.add_argument("--block-size", type=int, default=16, help="as of a worker (default: 16)")
    parser.add_argument(
        "--threads",
        type=int,
        default=UpConfig().threads_per_worker,
        help="compute threads (default: as many as `./run up` gives each of its two workers here)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the numbers, for programs")


def lab_of(args: argparse.Namespace) -> tuple[Lab, Path]:
    """The model loaded, and where it is."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # transformers has no annotations here
    torch.set_num_threads(args.threads)
    directory = args.model or resolve_model(DEFAULT_MODEL.name, say)
    num_kv_tokens = args.max_num_seqs * (args.max_context + 4 * args.block_size) + args.max_context
    return open_lab(directory, args.dtype, args.block_size, num_kv_tokens), directory


def fit_of(samples: Sequence[StepSample], lab: Lab, name: str) -> Fit:
    """The cost model of what was measured in a lab."""
    return fit(samples, name, lab.layout.block_bytes * len(lab.layout.groups) // lab.layout.block_size)


def _with_overheads(model: CostModel, directory: Path, lab: Lab) -> CostModel:
    """The router's part and the round trips of a hand-over, which are not the model's; bytes keep their default rate."""
    outside = probe_cluster(Topology(1, 1), directory, lab.vocab_size)
    return replace(
        model,
        request_overhead_s=outside.request_overhead_s,
        transfer_latency_s=outside.transfer_latency_s,
    )


def print_fit(found: Fit) -> None:
    """For people."""
    for name in (*COEFFICIENTS, "transfer_latency_s", "request_overhead_s"):
        print(f"{name:<18} {getattr(found.model, name) * 1e6:12.3f} us")
    print(f"{'kv_bytes_per_token':<18} {found.model.kv_bytes_per_token:12d}")
    print(
        f"residuals of {found.num_samples} steps: {found.residual_p50:.1%} at p50, {found.residual_p95:.1%} at p95, "
        f"{found.residual_mean:+.1%} in the mean"
    )


def print_worst(found: Fit, samples: Sequence[StepSample], num_shown: int = 5) -> None:
    """The steps that the model is farthest from."""
    errors = {sample: found.model.step_s(sample.work) / sample.duration_s - 1 for sample in samples}
    print("worst:")
    for sample in sorted(errors, key=lambda each: -abs(errors[each]))[:num_shown]:
        print(f"  {sample.duration_s * 1e3:8.1f} ms {errors[sample]:+6.1%}  {sample.work}")


def numbers_of(found: Fit) -> dict[str, Any]:
    """For programs: `load_cost` reads it."""
    residuals = {name: getattr(found, name) for name in ("residual_p50", "residual_p95", "residual_mean")}
    return {"cost_model": asdict(found.model), "num_samples": found.num_samples, **residuals}


def parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser("./run bench fit", description=__doc__, allow_abbrev=False)
    add_lab_flags(parser)
    parser.add_argument(
        "--cluster",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also measure what router and hand-over take, on a cluster that is started for it",
    )
    parser.add_argument("--rounds", type=int, default=3, help="times that each step is measured (default: 3)")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="largest decoding batch (default: 32)")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=512, help="longest chunk of a prompt (default: 512)"
    )
    parser.add_argument("--max-context", type=int, default=1024, help="longest context (default: 1024)")
    return parser


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)
