"""`./run conformance`: prints how far each path of each model lies from plain transformers; 1 where it is too far."""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from transformers.utils import logging

from paceline.core.errors import ConfigError
from paceline.engine.conformance.matrix import Row, model_row, tiny_names, tiny_rows
from paceline.engine.conformance.paths import TOLERANCE
from paceline.engine.conformance.report import as_json, summary, table_head, table_line
from paceline.engine.native_attention import attention_name

_DESCRIPTION = """\
Compares every path through the engine (whole prompts, chunks, mixed batches, prefix hits, preemption, hand-over) with
the plain forward pass of transformers, in fp32: each logit within 1e-4, each greedy token equal. A cell is the largest
difference of the path; "!2" behind it says that it failed, with 2 wrong tokens; "!crash" has its reason below.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; gives the exit status."""
    args = _parsed(argv)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # transformers has no annotations here
    logging.set_verbosity_error()  # type: ignore[no-untyped-call] # the same
    if not args.model:
        torch.set_num_threads(1)  # tiny tensors are slower on many
    start_s = time.perf_counter()
    try:
        rows = _print_rows(_rows(args))
    except ConfigError as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 2
    print(summary(rows))
    numbers = as_json(rows, duration_s=time.perf_counter() - start_s)
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    return int(numbers["failed"] > 0)


def _rows(args: argparse.Namespace) -> Iterable[Row]:
    attention = attention_name(args.attention)
    if args.model:
        tolerance = args.tolerance or TOLERANCE
        return [model_row(args.model, args.prompt_tokens, _say, tolerance=tolerance, attention=attention)]
    return tiny_rows(args.architectures or tiny_names(), _say, attention)


def _print_rows(rows: Iterable[Row]) -> list[Row]:
    """Each as soon as it is there."""
    print(table_head())
    done = []
    for row in rows:
        _say("")
        print(table_line(row), flush=True)
        done.append(row)
    return done


def _say(what: str) -> None:
    """One line of progress, written over the last one; a file or a pipe gets none."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    args = parser.parse_args(argv)
    for option in ("prompt_tokens", "tolerance"):
        value = getattr(args, option)
        if value is not None and not args.model:
            parser.error(f"--{option.replace('_', '-')} is for a model of your own: it needs --model")
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{option.replace('_', '-')} must be a number above 0, not {value}")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "./run conformance", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "architectures",
        nargs="*",
        metavar="ARCHITECTURE",
        choices=[*tiny_names(), []],
        help="tiny models with random weights; without any: all of them",
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="a model of your own instead")
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="with --model: length of the long prompt"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help=f"with --model: largest difference of a logit that passes (default: {TOLERANCE:g})",
    )
    parser.add_argument(
        "--attention",
        choices=("auto", "native", "torch"),
        default="auto",
        help="as of a worker: the kernel that this machine compiles, or torch's functions (default: auto)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to a file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
