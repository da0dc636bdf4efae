"""`./run bench serve`: starts a cluster, or takes one that runs, and puts the same load on it and on others, by turns."""

import argparse
import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.serve.drive import Life, drive
from benchmarks.serve.figures import figures, medians, table
from benchmarks.serve.flags import make_parser
from benchmarks.serve.memory import watch_peak
from benchmarks.serve.targets import OURS, PacelineTarget, Target, completions_target
from benchmarks.serve.workloads import Asked, Workload, chosen, traced
from benchmarks.simulator.options import say, write_json
from benchmarks.simulator.readers import load_trace
from benchmarks.simulator.records import Result
from benchmarks.simulator.slo import Slo
from benchmarks.simulator.trace import Trace
from paceline.client import PacelineClient
from paceline.client_error import PacelineRpcError
from paceline.core.errors import ConfigError
from paceline.launcher.cluster import LocalCluster
from paceline.launcher.config import UpConfig
from paceline.launcher.models import resolve_model


@dataclass(slots=True)
class _Found:
    """What was measured, so far: of each server, figures run by run; and the last run's lives, by workload and server."""

    runs: defaultdict[str, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))
    lives: defaultdict[str, dict[str, list[Life]]] = field(default_factory=lambda: defaultdict(dict))
    of_start: dict[str, float] = field(default_factory=dict)

    def note_memory(self, num_bytes: int) -> None:
        """What our processes take now."""
        self.of_start["peak_rss_mb"] = max(self.of_start.get("peak_rss_mb", 0.0), num_bytes / 1e6)


def main(argv: Sequence[str]) -> int:
    """Prints the table; 1 when a request of ours failed."""
    args = make_parser().parse_args(argv)
    found = asyncio.run(_run(args, load_trace(args.trace) if args.trace else None))
    ours = {**found.of_start, **medians(found.runs.pop(OURS))}
    others = {name: medians(runs) for name, runs in found.runs.items()}
    print(table(ours, others))
    numbers: dict[str, Any] = dict(ours)
    for name, theirs in others.items():
        numbers |= {f"{name}_{key}": number for key, number in theirs.items()}
    write_json(args.json, numbers)
    _draw(args.plots, args.slo, found.lives)
    return int(any(number for key, number in ours.items() if key.endswith("_failed")))


async def _run(args: argparse.Namespace, trace: Trace | None) -> _Found:
    found = _Found()
    async with AsyncExitStack() as stack:
        targets: list[Target] = [
            await stack.enter_async_context(completions_target(text)) for text in args.against
        ]
        _require_different([target.name for target in targets])
        ours, vocab_size = await stack.enter_async_context(_our_server(args, found))
        for run in range(args.repeats):
            asked = Asked(time.time_ns(), vocab_size, args.concurrency, args.rate)
            workloads = chosen(args.workloads, asked)
            if trace:
                workloads.append(traced(trace, asked))
            # Who is first has a turn each time: whatever warms up or slows down meets all.
            order = [ours, *targets] if run % 2 == 0 else [*targets, ours]
            await _take_turns(found, workloads, order, args, f"run {run + 1} of {args.repeats}")
    return found


async def _take_turns(
    found: _Found, workloads: Sequence[Workload], order: Sequence[Target], args: argparse.Namespace, when: str
) -> None:
    """One run: each workload on each server."""
    numbers: dict[str, dict[str, float]] = {target.name: {} for target in order}
    for workload in workloads:
        for target in order:
            say(f"{when}: {workload.key}, {workload.num_turns} requests, on {target.name}")
            lives = await drive(workload, target)
            numbers[target.name] |= figures(workload.key, lives, args.slo)
            found.lives[workload.key][target.name] = lives
            for reason in sorted({life.record.reason for life in lives if life.record.reason}):
                say(f"  failed: {reason}")
    for name, each in numbers.items():
        found.runs[name].append(each)


@asynccontextmanager
async def _our_server(args: argparse.Namespace, found: _Found) -> AsyncIterator[tuple[PacelineTarget, int]]:
    """Ours, and how many tokens its model knows."""
    if args.address:
        async with PacelineClient(args.address, api_key=args.api_key) as client:
            await _require_answer(client, args.address)
            yield PacelineTarget(client), args.vocab_size
        return
    model = resolve_model(args.model, say)
    facts = json.loads((model / "config.json").read_text(encoding="utf-8"))
    # Of a model of text and more, it is its text part's.
    vocab_size = int(facts.get("vocab_size") or facts["text_config"]["vocab_size"])
    config = UpConfig(
        topology=args.topology, dtype=args.dtype, runner=args.runner, config=args.config, port=0
    )
    begin_s = time.perf_counter()
    async with LocalCluster(config, model, say=say) as cluster, PacelineClient(cluster.address) as client:
        await _require_answer(client, cluster.address)
        found.of_start["start_to_first_answer_s"] = time.perf_counter() - begin_s
        watching = asyncio.create_task(watch_peak(lambda: list(cluster.pids.values()), found.note_memory))
        try:
            yield PacelineTarget(client), vocab_size
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def _require_answer(client: PacelineClient, address: str) -> None:
    """Raises ConfigError when there is none, before minutes pass in asking for others."""
    try:
        await client.generate_text("The sky is", max_tokens=1)
    except PacelineRpcError as error:
        raise ConfigError(f"the server at {address} does not answer: {error}") from error


def _require_different(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        raise ConfigError(
            f"--against: two servers are called {max(names, key=names.count)}; say NAME=URL of each"
        )


def _draw(directory: Path | None, slo: Slo | None, lives: Mapping[str, Mapping[str, Sequence[Life]]]) -> None:
    if directory is None:
        return
    from benchmarks.simulator.plots import plot_latencies  # noqa: PLC0415 - it takes a second to load

    directory.mkdir(parents=True, exist_ok=True)
    for key, by_target in lives.items():
        for name, some in by_target.items():
            result = Result(tuple(life.record for life in some), (), ())
            plot_latencies(result, slo, directory / f"{key}-{name}.svg")
