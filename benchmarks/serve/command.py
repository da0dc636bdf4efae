"""`./run bench serve`: starts a cluster, or takes one that runs, and puts the same load on it and on others, by turns."""

import argparse
import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.serve.drive import Life, drive
from benchmarks.serve.figures import figures, medians, ratios, table
from benchmarks.serve.flags import make_parser
from benchmarks.serve.peers import Peer, peers_of
from benchmarks.serve.servers import (
    Server,
    own_server,
    peer_server,
    require_peers,
    running_server,
    vocab_size_of,
)
from benchmarks.serve.targets import OURS
from benchmarks.serve.workloads import Asked, Workload, chosen, traced, warm_up
from benchmarks.simulator.options import say, write_json
from benchmarks.simulator.readers import load_trace
from benchmarks.simulator.records import Result
from benchmarks.simulator.slo import Slo
from benchmarks.simulator.trace import Trace
from paceline.core.errors import ConfigError
from paceline.launcher.config import UpConfig
from paceline.launcher.models import resolve_model

Opener = Callable[[], AbstractAsyncContextManager[Server]]


@dataclass(slots=True)
class _Found:
    """What was measured, so far: of each server, figures run by run; and the last run's lives, by workload and server."""

    runs: defaultdict[str, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))
    lives: defaultdict[str, dict[str, list[Life]]] = field(default_factory=lambda: defaultdict(dict))


def main(argv: Sequence[str]) -> int:
    """Prints the table; 1 when a request of ours failed."""
    args = make_parser().parse_args(argv)
    peers = peers_of(args.against, args.start)
    require_peers(peers)
    found = asyncio.run(_run(args, peers, load_trace(args.trace) if args.trace else None))
    ours = medians(found.runs[OURS])
    others = {name: medians(runs) for name, runs in found.runs.items() if name != OURS}
    print(table(ours, others))
    write_json(args.json, _numbers(ours, others) | {"runs": found.runs})
    _draw(args.plots, args.slo, found.lives)
    return int(any(number for key, number in ours.items() if key.endswith("_failed")))


def _numbers(ours: Mapping[str, float], others: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """For programs: ours by their keys, others' with a name in front, and ours over theirs."""
    numbers: dict[str, Any] = dict(ours)
    for name, theirs in others.items():
        numbers |= {f"{name}_{key}": number for key, number in theirs.items()}
        numbers |= {f"{key}_over_{name}": ratio for key, ratio in ratios(ours, theirs).items()}
    return numbers


async def _run(args: argparse.Namespace, peers: Sequence[Peer], trace: Trace | None) -> _Found:
    """Each run starts anew what the benchmark starts: what a start takes is measured as often as all the rest."""
    found = _Found()
    ours, vocab_size = _our_opener(args)
    for run in range(args.repeats):
        asked = Asked(time.time_ns(), vocab_size, args.concurrency, args.rate)
        workloads = chosen(args.workloads, asked)
        if trace:
            workloads.append(traced(trace, asked))
        # Who is first has a turn each time: whatever warms up or slows down meets all.
        openers: list[Opener] = [*(partial(peer_server, peer) for peer in peers), ours]
        async with _all_open(openers if run % 2 == 0 else openers[::-1]) as servers:
            await _warm_up(servers, asked)
            await _take_turns(found, workloads, servers[::-1], args.slo, f"run {run + 1} of {args.repeats}")
    return found


@asynccontextmanager
async def _all_open(openers: Sequence[Opener]) -> AsyncIterator[list[Server]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(opener()) for opener in openers]


async def _warm_up(servers: Sequence[Server], asked: Asked) -> None:
    for server in servers:
        await drive(warm_up(asked), server.target)


async def _take_turns(
    found: _Found, workloads: Sequence[Workload], servers: Sequence[Server], slo: Slo | None, when: str
) -> None:
    """One run: each workload on each server."""
    numbers: dict[str, dict[str, float]] = {server.target.name: {} for server in servers}
    for workload in workloads:
        for server in servers:
            name = server.target.name
            say(f"{when}: {workload.key}, {workload.num_turns} requests, on {name}")
            if (lives := await _lives_of(workload, server)) is None:
                continue
            numbers[name] |= figures(workload.key, lives, slo)
            found.lives[workload.key][name] = lives
            for reason in sorted({life.record.reason for life in lives if life.record.reason}):
                say(f"  failed: {reason}")
    for server in servers:
        found.runs[server.target.name].append(server.figures | numbers[server.target.name])


async def _lives_of(workload: Workload, server: Server) -> list[Life] | None:
    """None of a workload that another server cannot be asked for."""
    try:
        async with server.watched():
            return await drive(workload, server.target)
    except ConfigError as error:
        say(f"  left out: {error}")
        return None


def _our_opener(args: argparse.Namespace) -> tuple[Opener, int]:
    """Ours, and how many tokens its model knows."""
    if args.address:
        return partial(running_server, args.address, args.api_key), args.vocab_size
    model = resolve_model(args.model, say)
    config = UpConfig(
        topology=args.topology,
        dtype=args.dtype,
        quantization=args.quantization,
        runner=args.runner,
        config=args.config,
        port=0,
    )
    return partial(own_server, config, model), vocab_size_of(model)


def _draw(directory: Path | None, slo: Slo | None, lives: Mapping[str, Mapping[str, Sequence[Life]]]) -> None:
    if directory is None:
        return
    from benchmarks.simulator.plots import plot_latencies  # noqa: PLC0415 - it takes a second to load

    directory.mkdir(parents=True, exist_ok=True)
    for key, by_target in lives.items():
        for name, some in by_target.items():
            result = Result(tuple(life.record for life in some), (), ())
            plot_latencies(result, slo, directory / f"{key}-{name}.svg")
