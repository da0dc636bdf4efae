"""`./run simulate`: replays a trace on a cluster that is not there, and says what users would have felt."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.simulator.cluster import simulate
from benchmarks.simulator.options import (
    FORMATS,
    OneLineParser,
    Scene,
    add_scene_flags,
    say,
    scene_of,
    write_json,
)
from benchmarks.simulator.report import as_json, report, table
from paceline.core.errors import PacelineError

_ABOUT = """\
Replays a trace on a cluster of workers whose scheduler, block pool and placement are the real ones, on a virtual clock,
with a cost model in place of the model. 10,000 requests take seconds.
"""
_EXAMPLES = """\
examples:
  ./run simulate --trace chat --topology 1P2D
  ./run bench fit --json cost.json && ./run simulate --trace requests.jsonl --cost cost.json --kv-memory 1GiB
"""


def main(argv: Sequence[str]) -> int:
    """0 when it ran, 2 for what cannot be simulated, 130 after Ctrl-C."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return _run(scene_of(args), args)
    except PacelineError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        say("stopped")
        return 130


def _run(scene: Scene, args: argparse.Namespace) -> int:
    return _run_once(scene, args)


def _run_once(scene: Scene, args: argparse.Namespace) -> int:
    start_s = time.perf_counter()
    result = simulate(scene.trace, scene.cluster, scene.cost, log_decisions=args.decisions is not None)
    duration_s = time.perf_counter() - start_s
    numbers = report(result, scene.slo)
    print(f"{scene.trace.name} on {scene.cluster.topology}, cost model {scene.cost.name}")
    print(table(numbers, scene.slo))
    say(f"simulated {len(result.requests)} requests and {len(result.steps)} steps in {duration_s:.1f} s")
    if args.decisions is not None:
        args.decisions.write_text("".join(f"{line}\n" for line in result.decisions), encoding="utf-8")
    write_json(args.json, as_json(numbers))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        "./run simulate",
        description=_ABOUT,
        epilog=FORMATS + "\n" + _EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_scene_flags(parser)
    parser.add_argument(
        "--decisions", type=Path, metavar="FILE", help="the decision log: one line a step of each worker"
    )
    return parser
