"""The command line of `./run chaos`, and its report."""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chaos.session import Plan, Report, run_session
from benchmarks.simulator.options import say, write_json
from benchmarks.simulator.slo import percentile
from paceline.core.errors import PacelineError
from paceline.launcher.config import UpConfig
from paceline.launcher.models import DEFAULT_MODEL, resolve_model

_ABOUT = """\
A cluster of real processes under load, while workers are killed, frozen, drained and cut off, routers drained, and Redis
killed, frozen, slowed down and flushed; one of a kind at a time, so that every request has another one to go to. Each answer is
compared with the one that the same request got when all was quiet. Exit status 1 when one is wrong, lost, or leaves
something held."""
# Slow enough for something to happen in the middle of an answer, and little room, so that pressure is normal.
_SETTINGS = {"fake_step_ms": "5", "max_num_batched_tokens": "64", "num_blocks": "640"}
_SHOWN = 5


def main(argv: Sequence[str]) -> int:
    """Prints progress and figures; the status says whether all is well."""
    parser = argparse.ArgumentParser(
        "./run chaos", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0, metavar="M", help="how long (default 1)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of requests and faults (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    parser.add_argument(
        "--topology", default="2P2D", metavar="xPyD", help="workers of each tier (default 2P2D)"
    )
    parser.add_argument("--routers", type=int, default=2, metavar="N", help="routers (default 2)")
    parser.add_argument(
        "--clients", type=int, default=16, metavar="N", help="requests at a time (default 16)"
    )
    parser.add_argument(
        "--runner",
        default="fake",
        choices=("fake", "torch"),
        help="fake: a fake model, which knows whose KV it reads; torch: the real one, in exact mode",
    )
    parser.add_argument(
        "--kv-transport", default="grpc", choices=("grpc", "shm", "auto"), help="how KV moves (default grpc)"
    )
    parser.add_argument("--logs", metavar="DIR", help="keep the processes' logs here")
    args = parser.parse_args(argv)
    if args.minutes <= 0 or args.clients < 1:
        parser.error("--minutes and --clients must be more than 0")
    model = resolve_model(DEFAULT_MODEL.name, say)
    plan = Plan(args.seed, args.minutes * 60, num_clients=args.clients)
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        config = _config(args, Path(directory))
        report = asyncio.run(run_session(plan, config, model, say))
    say(f"took {time.monotonic() - begin_s:.0f} s")
    write_json(args.json, _numbers(report))
    return _print(report)


def run(argv: Sequence[str]) -> int:
    """The same, for a shell: what cannot be, and Ctrl-C, are a status and no traceback."""
    try:
        return main(argv)
    except PacelineError as error:
        print(f"./run chaos: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("./run chaos: interrupted", file=sys.stderr)
        return 130


def _config(args: argparse.Namespace, directory: Path) -> UpConfig:
    file = directory / "paceline.toml"
    settings = "".join(f"{name} = {value}\n" for name, value in _SETTINGS.items())
    file.write_text("".join(f"[{tier}]\n{settings}" for tier in ("prefill", "decode")))
    return UpConfig(
        config=str(file),
        topology=args.topology,
        routers=args.routers,
        runner=args.runner,
        exactness="exact" if args.runner == "torch" else "fast",
        disaggregate="auto",
        kv_transport=args.kv_transport,
        log_dir=args.logs,
        port=0,
    )


def _numbers(report: Report) -> dict[str, object]:
    outcome = report.outcome
    gaps_s = outcome.gaps_s
    return {
        "requests": outcome.num_requests,
        "wrong": len(outcome.wrong),
        "lost": len(outcome.lost),
        "refused": outcome.num_refused,
        "left": outcome.num_left,
        "migrated": outcome.num_migrated,
        "leaking_workers": len(report.leaks),
        "recovery_gap_s_p50": percentile(gaps_s, 0.5) if gaps_s else None,
        "recovery_gap_s_p95": percentile(gaps_s, 0.95) if gaps_s else None,
        "faults": dict(sorted(report.faults.items())),
    }


def _print(report: Report) -> int:
    for name, value in _numbers(report).items():
        print(f"{name:<22} {value}")
    failures = (("wrong", report.outcome.wrong), ("lost", report.outcome.lost), ("leak", report.leaks))
    for kind, texts in failures:
        for text in texts[:_SHOWN]:
            print(f"{kind}: {text}", file=sys.stderr)
    return 1 if any(texts for _, texts in failures) else 0
