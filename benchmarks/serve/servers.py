"""Servers under measurement, of one run: those that the benchmark starts are timed and their memory is watched."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.serve.memory import resident_bytes, watch_peak
from benchmarks.serve.openvino_target import openvino_target, require_openvino
from benchmarks.serve.peers import CompletionsPeer, OpenVinoPeer, Peer
from benchmarks.serve.processes import StartedProcess, started
from benchmarks.serve.targets import (
    CompletionsTarget,
    PacelineTarget,
    Target,
    completions_target,
    http_client,
    require_answer,
)
from benchmarks.simulator.options import say
from paceline.client import PacelineClient
from paceline.core.errors import ConfigError
from paceline.launcher.cluster import LocalCluster
from paceline.launcher.config import UpConfig

# From the start of a command to its first answer.
_START_TIMEOUT_S = 600.0
_ASK_EVERY_S = 0.1


@dataclass(slots=True)
class Server:
    """A target; of one that was started here also its processes, and the numbers of its start."""

    target: Target
    pids: Callable[[], Collection[int]] = tuple
    figures: dict[str, float] = field(default_factory=dict)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Notes what its processes take, for as long as the block lasts."""
        watching = asyncio.create_task(watch_peak(self.pids, self._note_memory))
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            # However short the block was.
            self._note_memory(await asyncio.to_thread(resident_bytes, self.pids()))

    def _note_memory(self, num_bytes: int) -> None:
        if num_bytes:
            self.figures["peak_rss_mb"] = max(self.figures.get("peak_rss_mb", 0.0), num_bytes / 1e6)


def require_peers(peers: Collection[Peer]) -> None:
    """Raises ConfigError for what cannot be started on this machine."""
    if any(isinstance(peer, OpenVinoPeer) for peer in peers):
        require_openvino()


@asynccontextmanager
async def peer_server(peer: Peer) -> AsyncIterator[Server]:
    """Another server, which has answered once if it was started here; raises ConfigError when it does not."""
    if isinstance(peer, OpenVinoPeer):
        opening = _openvino_server(peer)
    elif peer.command:
        opening = _started_server(peer)
    else:
        opening = _reached_server(peer)
    async with opening as server:
        yield server


@asynccontextmanager
async def _openvino_server(peer: OpenVinoPeer) -> AsyncIterator[Server]:
    begin_s = time.perf_counter()
    async with openvino_target(peer) as (target, child):
        await require_answer(target, f"openvino:{peer.directory}")
        yield _timed(target, child, begin_s)


@asynccontextmanager
async def _reached_server(peer: CompletionsPeer) -> AsyncIterator[Server]:
    async with http_client() as http:
        yield Server(await completions_target(http, peer.name, peer.url))


@asynccontextmanager
async def _started_server(peer: CompletionsPeer) -> AsyncIterator[Server]:
    await _require_free(peer)
    say(f"starting {peer.name}")
    begin_s = time.perf_counter()
    async with http_client() as http, started(peer.command) as child:

        async def first_answer() -> CompletionsTarget:
            """As soon as there is one."""
            target = await completions_target(http, peer.name, peer.url)
            await require_answer(target, peer.url)
            return target

        yield _timed(await _as_soon_as(first_answer, peer, child), child, begin_s)


async def _require_free(peer: CompletionsPeer) -> None:
    """Or what is timed would be another server's answer."""
    async with http_client() as http:
        try:
            await completions_target(http, peer.name, peer.url)
        except ConfigError:
            return
    raise ConfigError(f"--start {peer.name}: a server answers at {peer.url} already; end it")


async def _as_soon_as(
    first_answer: Callable[[], Awaitable[CompletionsTarget]], peer: CompletionsPeer, child: StartedProcess
) -> CompletionsTarget:
    deadline_s = time.perf_counter() + _START_TIMEOUT_S
    while True:
        try:
            return await first_answer()
        except ConfigError as error:
            if child.has_ended:
                raise ConfigError(f"--start {peer.name}: it has ended: {child.last_words()}") from error
            if time.perf_counter() > deadline_s:
                raise
        await asyncio.sleep(_ASK_EVERY_S)


def _timed(target: Target, child: StartedProcess, begin_s: float) -> Server:
    figures = {"start_to_first_answer_s": time.perf_counter() - begin_s}
    return Server(target, lambda: [child.process.pid], figures)


@asynccontextmanager
async def running_server(address: str, api_key: str | None) -> AsyncIterator[Server]:
    """One of ours that runs already."""
    async with PacelineClient(address, api_key=api_key) as client:
        target = PacelineTarget(client)
        await require_answer(target, address)
        yield Server(target)


@asynccontextmanager
async def own_server(config: UpConfig, model: Path) -> AsyncIterator[Server]:
    """One of ours that is started."""
    begin_s = time.perf_counter()
    async with LocalCluster(config, model, say=say) as cluster, PacelineClient(cluster.address) as client:
        target = PacelineTarget(client)
        await require_answer(target, cluster.address)
        figures = {"start_to_first_answer_s": time.perf_counter() - begin_s}
        yield Server(target, lambda: list(cluster.pids.values()), figures)


def vocab_size_of(model: Path) -> int:
    """How many tokens it knows."""
    facts = json.loads((model / "config.json").read_text(encoding="utf-8"))
    # Of a model of text and more, it is its text part's.
    return int(facts.get("vocab_size") or facts["text_config"]["vocab_size"])
