"""`./run tune`: what a trace is made of, and the settings that fit it."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

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
from benchmarks.simulator.prefixes import Coverage, Pins, choose_pins, coverage
from benchmarks.simulator.search import HEAD, Search, Trial, grid_table, row
from benchmarks.simulator.slo import percentile
from benchmarks.simulator.trace import Trace
from paceline.core.errors import ConfigError, PacelineError

_ABOUT = """\
Prints how long the requests of a trace are, how much of them begins alike, and whether it pays to pin those beginnings in the
cache. With --slo it also tries token budgets and block sizes in the simulator, and proposes those that serve it best.
"""
_EXAMPLES = """\
examples:
  ./run tune --trace chat:requests=500
  ./run tune --trace requests.jsonl --slo ttft=800ms,itl=100ms --cost cost.json --topology 1P2D --pinned pinned.jsonl
"""
# A pin takes blocks from everybody; below this share of the requests it is better left to the cache.
PAYS_FROM = 0.5


def main(argv: Sequence[str]) -> int:
    """0 when it could say something, 2 for what it cannot read or write, 130 after Ctrl-C."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        return _run(scene_of(args), args)
    except PacelineError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        say("stopped")
        return 130


def _run(scene: Scene, args: argparse.Namespace) -> int:
    trace = scene.trace
    if args.max_pins < 1:
        raise ConfigError(f"--max-pins must be at least 1, not {args.max_pins}")
    found = coverage(trace, scene.cluster.block_size)
    pins = choose_pins(trace, found, args.max_pins, PAYS_FROM)
    print(lengths_table(trace))
    print(coverage_table(found))
    print(pins_advice(pins, scene, found))
    if args.pinned is not None:
        _write_pins(pins, args.pinned)
    best = _settings(scene) if scene.slo is not None else None
    write_json(
        args.json,
        {
            "lengths": {name: list(_quantiles(values)) for name, values in _lengths(trace).items()},
            "coverage": [each.as_json() for each in found],
            "pins": None if pins is None else pins.as_json(),
            "proposal": None if best is None else best.cluster.as_json(),
        },
    )
    return 0


# -- lengths and prefixes


def lengths_table(trace: Trace) -> str:
    """P50, P95 and P99 of prompts and outputs."""
    head = f"{len(trace.requests)} requests, {trace.request_rate:.2f} a second"
    rows = [
        f"{name:<8}" + "".join(f"{value:>10}" for value in _quantiles(values))
        for name, values in _lengths(trace).items()
    ]
    return "\n".join([head, f"{'tokens':<8}{'P50':>10}{'P95':>10}{'P99':>10}", *rows])


def _lengths(trace: Trace) -> dict[str, list[int]]:
    return {
        "prompt": [request.num_prompt_tokens for request in trace.requests],
        "output": [request.num_output_tokens for request in trace.requests],
    }


def _quantiles(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(percentile(values, share)) for share in (0.5, 0.95, 0.99))


def coverage_table(found: Sequence[Coverage]) -> str:
    """What share of the requests begins with the most frequent beginnings of each length."""
    if not found:
        return "prefixes: no two requests begin alike, as far as this trace says"
    rows = [
        f"{each.num_tokens:<8}{each.num_distinct:>10}"
        + "".join(f"{each.share_of(count):>10.1%}" for count in (1, 4, 16))
        for each in found
    ]
    return "\n".join(
        [
            "prefixes, and the requests that the most frequent of each length cover",
            f"{'tokens':<8}{'shared':>10}{'first':>10}{'first 4':>10}{'first 16':>10}",
            *rows,
        ]
    )


def pins_advice(pins: Pins | None, scene: Scene, found: Sequence[Coverage]) -> str:
    """Whether pinning pays, and what it costs."""
    if pins is None:
        best = max((each.share_of(1) for each in found), default=0.0)
        return f"pinning does not pay: no few prefixes cover over {PAYS_FROM:.0%} of the requests (the most frequent one: {best:.1%})"
    share = pins.num_tokens_held / scene.cluster.num_kv_tokens
    return (
        f"pinning pays: {len(pins.prefixes)} of {pins.num_tokens} tokens cover {pins.share:.1%} of the requests, and hold "
        f"{pins.num_tokens_held} tokens, {share:.1%} of a worker's KV cache"
    )


def _write_pins(pins: Pins | None, file: Path) -> None:
    if pins is None:
        raise ConfigError("--pinned: no prefix is worth pinning; nothing was written")
    if not pins.is_real:
        raise ConfigError(
            "--pinned: this trace has lengths and names only, and a pin needs the tokens themselves; "
            "give prompt_ids in the trace (docs/simulator.md)"
        )
    with writing("--pinned", file):
        file.write_text(
            "".join(json.dumps({"token_ids": list(prefix)}) + "\n" for prefix in pins.prefixes),
            encoding="utf-8",
        )
    say(f"wrote {len(pins.prefixes)} prefixes into {file}")


# -- settings


def _settings(scene: Scene) -> Trial:
    """Budgets, then block sizes and watermarks, of the one topology that was given."""
    assert scene.slo is not None
    search = Search(scene.trace, scene.cluster, scene.cost, scene.slo, say)
    say(f"     {HEAD}")
    best = search.tuned(scene.cluster.topology)
    print(grid_table(search.trials))
    kept = "keeps" if best.meets else "comes closest to"
    print(f"proposal, which {kept} {scene.slo} at p95:\n{HEAD}\n{row(best)}")
    for name, value in best.cluster.as_json().items():
        print(f"  {name} = {value}")
    return best


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = OneLineParser(
        "./run tune",
        description=_ABOUT,
        epilog=FORMATS + "\n" + _EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_scene_flags(parser)
    parser.add_argument("--max-pins", type=int, default=4, help="most prefixes to pin (default: 4)")
    parser.add_argument(
        "--pinned",
        type=Path,
        metavar="FILE",
        help="write the prefixes to pin: one object with token_ids a line",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
