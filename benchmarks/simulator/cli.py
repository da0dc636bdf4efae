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
    writing,
)
from benchmarks.simulator.records import Result
from benchmarks.simulator.report import as_json, report, table
from benchmarks.simulator.search import HEAD, Search, Trial, grid_table, verdict
from benchmarks.simulator.spec import ClusterSpec
from benchmarks.simulator.sweep import sweep, sweep_table
from paceline.core.errors import ConfigError, PacelineError

_ABOUT = """\
Replays a trace on a cluster of workers whose scheduler, block pool and placement are the real ones, on a virtual clock,
with a cost model in place of the model. The same trace and settings always give the same result.
"""
_EXAMPLES = """\
examples:
  ./run simulate --trace chat --topology 1P2D
  ./run bench fit --json cost.json
  ./run simulate --trace requests.jsonl --cost cost.json --kv-memory 1GiB --slo ttft=800ms,itl=100ms --search
  ./run simulate --trace gamma:rate=8,requests=1000 --sweep
"""
_INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    """0 when it ran, 1 when no cluster keeps the promise, 2 for what cannot be simulated, 130 after Ctrl-C."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        return _run(scene_of(args), args)
    except PacelineError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        say("stopped")
        return _INTERRUPTED


def _run(scene: Scene, args: argparse.Namespace) -> int:
    if args.search:
        return _search(scene, args)
    if args.sweep:
        return _sweep(scene, args)
    return _replay(scene, args)


# -- one run


def _replay(scene: Scene, args: argparse.Namespace) -> int:
    start_s = time.perf_counter()
    result = simulate(scene.trace, scene.cluster, scene.cost, log_decisions=args.decisions is not None)
    duration_s = time.perf_counter() - start_s
    numbers = report(result, scene.slo)
    print(f"{scene.trace.name} on {scene.cluster.topology}, cost model {scene.cost.name}")
    print(table(numbers, scene.slo))
    say(f"simulated {len(result.requests)} requests and {len(result.steps)} steps in {duration_s:.1f} s")
    if args.decisions is not None:
        with writing("--decisions", args.decisions):
            args.decisions.write_text("".join(f"{line}\n" for line in result.decisions), encoding="utf-8")
    if args.plot is not None:
        with writing("--plot", args.plot):
            _plot(scene, result, args.plot)
    write_json(args.json, as_json(numbers))
    return 0


def _plot(scene: Scene, result: Result, directory: Path) -> None:
    # Imported here: it takes as long as a small simulation.
    from benchmarks.simulator.plots import load_curve, plot_latencies, plot_load  # noqa: PLC0415

    directory.mkdir(parents=True, exist_ok=True)
    plot_latencies(result, scene.slo, directory / "latencies.png")
    say("simulating other loads, for the curve")
    points = load_curve(scene.trace, scene.cluster, scene.cost, scene.slo)
    plot_load(points, scene.slo, directory / "load.png")
    say(f"wrote latencies.png and load.png into {directory}")


# -- many runs


def _search(scene: Scene, args: argparse.Namespace) -> int:
    if scene.slo is None:
        raise ConfigError("--search needs --slo: what is it to look for?")
    search = Search(scene.trace, scene.cluster, scene.cost, scene.slo, say)
    say(f"     {HEAD}")
    try:
        winner = search.run(args.max_workers)
    except KeyboardInterrupt:
        print(grid_table(search.trials))
        say("stopped before the end of the search")
        return _INTERRUPTED
    print(grid_table(search.trials))
    print(verdict(winner, search.trials, scene.slo))
    write_json(
        args.json,
        {
            "winner": None if winner is None else _as_json(winner),
            "trials": [_as_json(trial) for trial in search.trials],
        },
    )
    return 0 if winner is not None else 1


def _as_json(trial: Trial) -> dict[str, object]:
    return {**trial.cluster.as_json(), "meets": trial.meets, **as_json(trial.report)}


def _sweep(scene: Scene, args: argparse.Namespace) -> int:
    points = []
    for point in sweep(scene.trace, scene.cluster, scene.cost):
        points.append(point)
        say(f"{point.setting} {point.value}: {point.host_s:.1f} s")
    print(sweep_table(points, ClusterSpec(), scene.cost))
    write_json(args.json, {"points": [point.as_json() for point in points]})
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = OneLineParser(
        "./run simulate",
        description=_ABOUT,
        epilog=FORMATS + "\n" + _EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_scene_flags(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--search",
        action="store_true",
        help="how many workers of each tier, which token budget and block size keep the --slo at p95",
    )
    what.add_argument(
        "--sweep", action="store_true", help="block sizes and token budgets, one after the other"
    )
    what.add_argument("--plot", type=Path, metavar="DIR", help="curves: latencies, and goodput over the load")
    parser.add_argument("--max-workers", type=int, default=4, help="of a --search (default: 4)")
    parser.add_argument(
        "--decisions",
        type=Path,
        metavar="FILE",
        help="the decision log of one run: one line a step of each worker",
    )
    return parser
