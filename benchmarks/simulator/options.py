"""The flags that `./run simulate` and `./run tune` share, and what they mean."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.simulator.cost import CostModel, load_cost
from benchmarks.simulator.readers import load_trace
from benchmarks.simulator.slo import Slo
from benchmarks.simulator.spec import ClusterSpec, defaults_of, scheduler_config
from benchmarks.simulator.trace import Trace
from paceline.core.errors import ConfigError
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.launcher.config import Topology
from paceline.runtime.memory import MemorySize
from router.config import RouterConfig
from router.in_time import Bounds
from router.policies import POLICIES

FORMATS = """\
traces (the content of a file says which it is; docs/simulator.md has examples):
  FILE               our JSON Lines: {"arrival_s": 0.5, "prompt_tokens": 812, "output_tokens": 120,
                     "prefix": [["system", 256]], "priority": "standard", "tenant": "a"}
                     the public Azure CSV: TIMESTAMP,ContextTokens,GeneratedTokens
                     the public Mooncake JSON Lines: timestamp, input_length, output_length, hash_ids
  poisson, gamma, chat, zipf
                     made up: chat:requests=500,rate=4,prompt=256,output=64,system=128,turns=4,seed=1
"""


@dataclass(frozen=True, slots=True)
class Scene:
    """What every simulation needs."""

    trace: Trace
    cluster: ClusterSpec
    cost: CostModel
    slo: Slo | None


class OneLineParser(argparse.ArgumentParser):
    """A wrong flag is answered with one line; the usage is what --help shows."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help explains the flags)\n")


def add_scene_flags(parser: argparse.ArgumentParser) -> None:
    """Trace, SLO, cluster and cost."""
    spec = ClusterSpec()
    parser.add_argument("--trace", required=True, metavar="T", help="a file, or a made-up trace by its name")
    parser.add_argument(
        "--slo", type=slo_flag, metavar="ttft=800ms,itl=100ms", help="what users are promised"
    )
    parser.add_argument(
        "--cost",
        default="textbook",
        metavar="MODEL",
        help="textbook (5 ms a step, 0.3 ms a decoding sequence, 0.2 ms a prompt token), linear (batching cannot help), "
        "or the file of `./run bench fit` (default: textbook)",
    )
    parser.add_argument("--topology", default="1P1D", help="workers of each tier, xPyD (default: 1P1D)")
    parser.add_argument(
        "--disaggregate",
        default=spec.disaggregate,
        choices=("always", "auto", "never"),
        help="as of the router",
    )
    parser.add_argument(
        "--placement", default=spec.placement, choices=tuple(POLICIES), help="as of the router"
    )
    parser.add_argument(
        "--kv-tokens",
        type=int,
        default=spec.num_kv_tokens,
        help=f"tokens that a worker's KV cache holds (default: {spec.num_kv_tokens})",
    )
    parser.add_argument(
        "--kv-memory", help="the same in bytes, such as 1GiB; needs a cost model that was fitted"
    )
    parser.add_argument(
        "--block-size",
        type=int,
        default=spec.block_size,
        help=f"tokens of a block (default: {spec.block_size})",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="[TIER.]NAME=VALUE",
        help=f"a setting of the schedulers, of both tiers or of prefill or decode: {', '.join(settable())}",
    )
    parser.add_argument(
        "--max-requests",
        type=int,
        default=defaults_of(RouterConfig)["max_requests"],
        help="as of the router: more requests under way are refused; 0: no bound",
    )
    parser.add_argument(
        "--max-delay-s",
        type=float,
        default=0.0,
        help="as of the router: longer waits are refused, and so is what misses its deadline; 0: no bound (default: 0)",
    )
    parser.add_argument(
        "--realtime-ttft-s",
        type=float,
        default=0.0,
        help="as of the router: what REALTIME requests are promised; 0: nothing (default: 0)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the numbers, for programs")


def scene_of(args: argparse.Namespace) -> Scene:
    """What the flags mean; raises ConfigError."""
    cost = load_cost(args.cost)
    settings = list(map(_setting, args.set))
    cluster = ClusterSpec(
        topology=Topology.parse(args.topology),
        prefill=scheduler_config(**{name: value for tier, name, value in settings if tier != "decode"}),
        decode=scheduler_config(**{name: value for tier, name, value in settings if tier != "prefill"}),
        block_size=args.block_size,
        num_kv_tokens=_kv_tokens(args, cost),
        disaggregate=args.disaggregate,
        placement=args.placement,
        max_requests=args.max_requests or None,
        bounds=_bounds(args),
    )
    return Scene(load_trace(args.trace), cluster, cost, args.slo)


def slo_flag(text: str) -> Slo:
    """For argparse."""
    try:
        return Slo.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def settable() -> dict[str, type]:
    """The scheduler's settings that are plain numbers, switches or names."""
    defaults = scheduler_config()
    values = {field.name: getattr(defaults, field.name) for field in fields(SchedulerConfig)}
    return {name: type(value) for name, value in values.items() if type(value) in {int, float, str, bool}}


def write_json(file: Path | None, numbers: dict[str, Any]) -> None:
    """For `--json`."""
    if file is None:
        return
    text = json.dumps(numbers, indent=1)
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        # They may have taken minutes.
        print(text)
        raise ConfigError(f"--json {file}: {error.strerror}; the numbers are above") from error


@contextmanager
def writing(flag: str, place: Path) -> Iterator[None]:
    """For other flags that name where to write: what cannot be written there is a wrong flag."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag} {place}: {error.strerror}") from error


def say(text: str) -> None:
    """Progress: everything that is no result goes to stderr."""
    print(text, file=sys.stderr, flush=True)


def _setting(text: str) -> tuple[str, str, Any]:
    """Of which tier, empty for both; its name; its value."""
    place, _, value = text.partition("=")
    tier, _, name = place.rpartition(".")
    if tier not in {"", "prefill", "decode"}:
        raise ConfigError(f"--set {text}: {tier!r} is no tier; prefill and decode are")
    kinds = settable()
    if name not in kinds:
        raise ConfigError(f"--set {text}: the scheduler has no setting {name!r}; it has {', '.join(kinds)}")
    try:
        return (
            tier,
            name,
            {"true": True, "false": False}[value] if kinds[name] is bool else kinds[name](value),
        )
    except (ValueError, KeyError) as error:
        raise ConfigError(f"--set {text}: {name} must be of type {kinds[name].__name__}") from error


def _bounds(args: argparse.Namespace) -> Bounds:
    for name in ("max_delay_s", "realtime_ttft_s"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} must be 0 or more, not {getattr(args, name):g}")
    return Bounds(args.max_delay_s, args.realtime_ttft_s)


def _kv_tokens(args: argparse.Namespace, cost: CostModel) -> int:
    if args.kv_memory is None:
        return int(args.kv_tokens)
    if not cost.kv_bytes_per_token:
        raise ConfigError(
            f"--kv-memory: the cost model {cost.name} does not say how large a token is; use --kv-tokens"
        )
    size = MemorySize.parse(args.kv_memory, "--kv-memory")
    return size.of(0) // cost.kv_bytes_per_token
