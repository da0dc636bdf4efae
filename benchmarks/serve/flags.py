"""The flags of `./run bench serve`, and what they mean."""

import argparse
import contextlib
from pathlib import Path

from benchmarks.serve.workloads import WORKLOADS
from benchmarks.simulator.options import OneLineParser, slo_flag
from benchmarks.simulator.spec import defaults_of
from benchmarks.simulator.trace import ANY_VOCAB_SIZE
from paceline.launcher.config import UpConfig
from paceline.launcher.models import DEFAULT_MODEL

_ABOUT = """\
Load on a whole server through its public gRPC API, as users see it. Every answer is greedy and of a fixed length.

workloads:
{workloads}

Without --address a cluster is started, and its start and its memory are measured too. With --against the same prompts go to other
servers, turn by turn; the table shows ours over theirs. What is started here is started anew in each run. Rates and times on a machine that others share are worth their ratios only.
"""


def make_parser() -> argparse.ArgumentParser:
    """The flags of `./run bench serve`."""
    workloads = "\n".join(f"  {name:<14} {about.__doc__}" for name, about in WORKLOADS.items())
    parser = OneLineParser(
        "./run bench serve",
        description=_ABOUT.format(workloads=workloads),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_load(parser)
    _add_servers(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="the numbers, for programs")
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="draw the curves of each workload's last run there"
    )
    return parser


def _add_load(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workloads",
        type=_names,
        default=tuple(WORKLOADS),
        metavar="A,B",
        help="those to run (default: all)",
    )
    parser.add_argument(
        "--concurrency", type=_counts, default=(1, 8, 32), metavar="N,M", help="of mixed (default: 1,8,32)"
    )
    parser.add_argument(
        "--rate", type=_positive, default=1.0, help="requests a second of poisson and burst (default: 1)"
    )
    parser.add_argument(
        "--trace",
        metavar="T",
        help="also a trace, each request when it came; `./run simulate --help` has the formats",
    )
    parser.add_argument(
        "--repeats", type=_count, default=3, metavar="N", help="runs, of which medians are told (default: 3)"
    )
    parser.add_argument(
        "--slo", type=slo_flag, metavar="ttft=800ms,itl=100ms", help="what users are promised; adds goodput"
    )


def _add_servers(parser: argparse.ArgumentParser) -> None:
    up = defaults_of(UpConfig)
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="another server's completions API, such as vllm=http://127.0.0.1:8000/v1; or OpenVINO GenAI in a process "
        "of its own, such as openvino:DIR or ov=openvino:DIR?max_num_batched_tokens=512",
    )
    parser.add_argument(
        "--start",
        action="append",
        default=[],
        metavar="NAME='COMMAND'",
        help="starts one of --against in each run, and measures its start and its memory too",
    )
    parser.add_argument("--address", metavar="HOST:PORT", help="a Paceline server that runs already")
    parser.add_argument("--api-key", metavar="KEY", help="for --address")
    parser.add_argument(
        "--vocab-size",
        type=_count,
        default=ANY_VOCAB_SIZE,
        metavar="N",
        help="for --address: prompts have token ids below it",
    )
    parser.add_argument(
        "--topology", default=up["topology"], help="of the cluster that is started (default: %(default)s)"
    )
    parser.add_argument(
        "--model", default=DEFAULT_MODEL.name, help="the model that it serves (default: %(default)s)"
    )
    parser.add_argument("--dtype", default=up["dtype"], help="what it computes in (default: %(default)s)")
    parser.add_argument(
        "--quantization",
        default=up["quantization"],
        help="its weights, as of ./run up (default: %(default)s)",
    )
    parser.add_argument(
        "--runner",
        default=up["runner"],
        choices=("torch", "fake"),
        help="fake: no model, for trying this out",
    )
    parser.add_argument("--config", metavar="FILE", help="its settings, as of ./run up --config")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := sorted(set(names) - WORKLOADS.keys()):
        raise argparse.ArgumentTypeError(
            f"there is no workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}"
        )
    return names


def _count(text: str) -> int:
    with contextlib.suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(_count, text.split(",")))


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
