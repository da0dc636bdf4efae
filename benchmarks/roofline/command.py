"""`./run bench roofline`: the limits of this machine and our steps on it, measured by turns."""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from benchmarks.roofline.limits import Limits, measure_limits
from benchmarks.roofline.profiles import profile_of, profile_table
from benchmarks.roofline.shares import Steps, shares_of
from benchmarks.roofline.work import ModelSize, model_size
from benchmarks.simulator.measure import Cell, Lab, lab_of, measure_round
from benchmarks.simulator.options import OneLineParser, say, write_json
from benchmarks.simulator.spec import scheduler_config
from paceline.engine.model_loader import load_model
from paceline.launcher.config import usable_cores
from paceline.launcher.models import DEFAULT_MODEL, resolve_model

_DTYPE, _ITEM_BYTES, _BLOCK_SIZE = "bfloat16", 2, 16
_BATCH, _PROMPT = 32, 2048


def main(argv: Sequence[str]) -> int:
    """Prints the limits and our shares of them; always 0: a measurement breaks no promise."""
    args = make_parser().parse_args(argv)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # transformers has no annotations here
    torch.set_num_threads(args.threads)
    directory = args.model or resolve_model(DEFAULT_MODEL.name, say)
    loaded = load_model(directory, _DTYPE, _BLOCK_SIZE)
    size = model_size(directory, loaded.layout, _ITEM_BYTES)
    lab = lab_of(loaded, _BATCH * (args.context + 4 * _BLOCK_SIZE) + _PROMPT)
    _print_head(directory.name, size, args)
    rounds = list(_rounds(lab, size, args))
    numbers: dict[str, Any] = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    for key, number in numbers.items():
        print(f"{key:<32}{number:>12.3f}   {_spread([each[key] for each in rounds])}")
    if args.profile:
        numbers["profile"] = dict(_profiles(lab, args))
    write_json(args.json, numbers | {"rounds": rounds})
    return 0


def _rounds(lab: Lab, size: ModelSize, args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Limits and steps by turns, after a round that warms up: what a machine can do changes while it is measured."""
    _steps(lab, args)
    for number in range(args.rounds):
        say(f"round {number + 1} of {args.rounds}")
        limits = measure_limits(args.threads, size.shapes)
        yield _limit_numbers(limits, size) | shares_of(size, limits, _steps(lab, args))


def _steps(lab: Lab, args: argparse.Namespace) -> Steps:
    return Steps(
        measure_round(lab, [Cell(1, args.context, num_steps=16)]),
        measure_round(lab, [Cell(_BATCH, args.context, num_steps=8)]),
        measure_round(lab, [Cell(num_prompts=1, num_prompt_tokens=_PROMPT, budget=args.chunk)]),
    )


def _limit_numbers(limits: Limits, size: ModelSize) -> dict[str, float]:
    by_threads = {f"memory_gb_s_{n}_threads": rate / 1e9 for n, rate in limits.memory_by_threads.items()}
    by_shape = {f"bf16_gflop_s_{shape}": rate / 1e9 for shape, rate in limits.gemm_by_shape.items()}
    num_weights = sum(shape.num_weights for shape in size.layers)
    layers_s = sum(shape.num_weights / limits.gemm_by_shape[shape] for shape in size.layers)
    return {
        "memory_gb_s": limits.memory / 1e9,
        **by_threads,
        "bf16_gflop_s": limits.gemm / 1e9,
        "bf16_gflop_s_of_layers": num_weights / layers_s / 1e9,
        **by_shape,
    }


def _profiles(lab: Lab, args: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    cells = {f"decode_b{batch}": Cell(batch, args.context, num_steps=8) for batch in (1, 8, _BATCH)}
    cells["chunk_512"] = Cell(num_prompts=1, num_prompt_tokens=512, budget=512)
    for name, cell in cells.items():
        by_name = profile_of(lab, cell)
        print("\n" + profile_table(name, by_name))
        yield name, by_name


def _print_head(name: str, size: ModelSize, args: argparse.Namespace) -> None:
    print(
        f"{name}, {_DTYPE}, {args.threads} threads, decodes at {args.context} tokens, prompts in chunks of {args.chunk}: "
        f"a step reads {size.weight_bytes / 1e6:.0f} MB of weights and {size.kv_bytes_per_token:,} bytes a token of context"
    )


def _spread(numbers: Sequence[float]) -> str:
    return f"{min(numbers):.3f} to {max(numbers):.3f}"


def make_parser() -> argparse.ArgumentParser:
    """The flags of `./run bench roofline`."""
    parser = OneLineParser("./run bench roofline", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory (default: the default model)")
    parser.add_argument(
        "--threads",
        type=int,
        default=usable_cores(),
        help="compute threads (default: as many as there are cores)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="of which medians are told (default: 5)")
    parser.add_argument(
        "--context", type=int, default=256, help="tokens that decodes attend to (default: 256)"
    )
    parser.add_argument(
        "--chunk",
        type=int,
        default=scheduler_config().max_num_batched_tokens,
        help="tokens of a step of the prompt (default: %(default)s, as of a worker)",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also where the time goes, by operator: decodes of 1, 8 and 32, chunks of 512",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the numbers, for programs")
    return parser
