"""`./run bench router`: what the router adds to a request and to a token, and how much one router process carries.

Behind it a decode worker with a fake model, before it the Python client in this process: all three share the machine's cores, so
the rates are those of the whole. What the router itself took stands beside them as processor time, which others disturb less.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import grpc
import psutil

from benchmarks.simulator.options import say, write_json
from paceline.client import GenerateOptions, PacelineClient
from paceline.core.request import RequestId, SamplingParams, SequenceId, SequenceSpec
from paceline.launcher.cluster import LocalCluster
from paceline.launcher.config import UpConfig
from paceline.launcher.models import DEFAULT_MODEL, resolve_model
from router.decode_link import DecodeLink
from router.tenants import new_key

_PROMPT = "A line of riders goes up the hill, and each one rides in the draft of the one before."
# Of a request whose way is timed: a stream of some tenths of a second.
_NUM_TOKENS = 40
_NUM_TIMED = 16
_TURNS = 3
_KEY, _HASH = new_key()
_TENANTS = f"""
[tenants.bench]
key_hashes = ["{_HASH}"]
requests_per_minute = 10_000_000
burst_requests = 1_000_000
tokens_per_minute = 50_000_000
burst_tokens = 50_000_000
max_concurrent = 100_000
"""
_WORKER = "num_blocks = 40000\nmax_num_seqs = 512\nmax_num_batched_tokens = 4096\n"


@dataclass(frozen=True, slots=True)
class Life:
    """When the tokens of one request came, in seconds since it was sent."""

    first_s: float
    last_s: float
    num_tokens: int

    @property
    def per_token_s(self) -> float:
        """From one token to the next, in the mean."""
        return (self.last_s - self.first_s) / (self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Passed:
    """What went through at a time, and what the router's process took for it."""

    num_requests: int
    num_tokens: int
    num_messages: int
    wall_s: float
    router_cpu_s: float


def main(argv: Sequence[str]) -> int:
    """Prints the figures; writes them with --json."""
    parser = argparse.ArgumentParser("./run bench router", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each part (default 3)")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    model = resolve_model(DEFAULT_MODEL.name, say)
    numbers = asyncio.run(_run(model, args.repeats))
    for name, value in numbers.items():
        print(f"{name:<32} {value:10.3f}")
    write_json(args.json, dict(numbers))
    return 0


async def _run(model: Path, repeats: int) -> dict[str, float]:
    added = [await _added(model, repeat) for repeat in range(repeats)]
    streams = [await _streams(model) for _ in range(repeats)]
    requests = [await _requests(model) for _ in range(repeats)]
    return {
        "added_ttft_ms_p50": median(each.ttft_s for each in added) * 1e3,
        "added_ttft_ms_least": min(each.ttft_s for each in added) * 1e3,
        "added_ttft_ms_most": max(each.ttft_s for each in added) * 1e3,
        "added_ttft_over_stream_ms_p50": median(each.ttft_over_stream_s for each in added) * 1e3,
        "added_per_token_ms_p50": median(each.per_token_s for each in added) * 1e3,
        "tokens_per_s_256_streams": median(each.num_tokens / each.wall_s for each in streams),
        "tokens_per_s_least": min(each.num_tokens / each.wall_s for each in streams),
        "tokens_a_message": median(each.num_tokens / each.num_messages for each in streams),
        "router_us_a_token": median(each.router_cpu_s / each.num_tokens for each in streams) * 1e6,
        "admissions_per_s": median(each.num_requests / each.wall_s for each in requests),
        "admissions_per_s_least": min(each.num_requests / each.wall_s for each in requests),
        "router_ms_a_request": median(each.router_cpu_s / each.num_requests for each in requests) * 1e3,
    }


@asynccontextmanager
async def _cluster(model: Path, step_ms: float) -> AsyncIterator[LocalCluster]:
    """A decode worker that computes its prompts itself, and a router with a tenant's limits, the table and Redis."""
    with tempfile.TemporaryDirectory() as directory:
        file, tenants = Path(directory) / "paceline.toml", Path(directory) / "tenants.toml"
        file.write_text(f"[router]\nmax_requests = 1000\n[decode]\nfake_step_ms = {step_ms}\n{_WORKER}")
        tenants.write_text(_TENANTS)
        config = UpConfig(
            config=str(file),
            topology="0P1D",
            runner="fake",
            disaggregate="never",
            port=0,
            tenants=str(tenants),
            metrics_port=-1,
        )
        async with LocalCluster(config, model) as cluster:
            yield cluster


# -- what it adds


@dataclass(frozen=True, slots=True)
class Added:
    """Seconds at the median, of 32 streams: beyond a call of the worker itself, and beyond one more sequence on a stream that is there."""

    ttft_s: float
    ttft_over_stream_s: float
    per_token_s: float


async def _added(model: Path, seed: int) -> Added:
    """What the way through the router adds: each way by turns, with pauses of the same lengths."""
    async with (
        _cluster(model, step_ms=10) as cluster,
        PacelineClient(cluster.address, api_key=_KEY) as client,
        _worker(cluster) as channel,
        _carried(channel) as shared,
    ):
        prompt_ids = await client.tokenize(_PROMPT)

        async def through(_: int) -> Life:
            """The client's way."""
            return await _life(_events(client))

        async def called(number: int) -> Life:
            """Without a router: each request is a call of the worker."""
            async with _carried(channel) as link:
                return await _life(_direct(link, prompt_ids, number))

        async def streamed(number: int) -> Life:
            """The router's own way, on the stream that all requests share."""
            return await _life(_direct(shared, prompt_ids, number))

        ways: dict[str, Callable[[int], Awaitable[Life]]] = {
            "through": through,
            "called": called,
            "streamed": streamed,
        }
        lives: dict[str, list[Life]] = {name: [] for name in ways}
        for turn in range(_TURNS):
            for name, way in ways.items():
                rng = random.Random(seed * 10 + turn)  # noqa: S311 - to spread arrivals
                found = await _at_once(way, 32, _NUM_TIMED, rng)
                lives[name] += found if turn else []  # the first turn is to warm up
    ttft = {name: median(life.first_s for life in found) for name, found in lives.items()}
    per_token = {name: median(life.per_token_s for life in found) for name, found in lives.items()}
    return Added(
        ttft["through"] - ttft["called"],
        ttft["through"] - ttft["streamed"],
        per_token["through"] - per_token["called"],
    )


@asynccontextmanager
async def _worker(cluster: LocalCluster) -> AsyncIterator[grpc.aio.Channel]:
    channels = cluster.channels()
    try:
        yield channels.get(cluster.worker_addresses["decode-0"])
    finally:
        await channels.aclose()


@asynccontextmanager
async def _carried(channel: grpc.aio.Channel) -> AsyncIterator[DecodeLink]:
    """A stream to the worker, for as long as the block."""
    link = DecodeLink(channel, "decode-0", 10_000)
    carrying = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        carrying.cancel()
        await asyncio.gather(carrying, return_exceptions=True)


async def _at_once(
    way: Callable[[int], Awaitable[Life]], num_streams: int, num_each: int, rng: random.Random
) -> list[Life]:
    """So many streams, each with some requests one after the other; pauses keep them from coming all at once, or in step with the engine."""

    async def stream(number: int, pauses_s: Sequence[float]) -> list[Life]:
        """One after the other."""
        found = []
        for index, pause_s in enumerate(pauses_s):
            await asyncio.sleep(pause_s)
            found.append(await way(number * num_each + index))
        return found

    pauses = [[rng.uniform(0, 0.4) for _ in range(num_each)] for _ in range(num_streams)]
    found = await asyncio.gather(*(stream(number, pauses_s) for number, pauses_s in enumerate(pauses)))
    return [life for lives in found for life in lives]


async def _life(num_tokens: AsyncIterator[int]) -> Life:
    begin_s, times_s, total = time.perf_counter(), list[float](), 0
    async for count in num_tokens:
        if count:
            times_s.append(time.perf_counter() - begin_s)
            total += count
    return Life(times_s[0], times_s[-1], total)


async def _events(client: PacelineClient, num_tokens: int = _NUM_TOKENS) -> AsyncIterator[int]:
    """How many tokens each event of an answer has."""
    options = GenerateOptions(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
    async for event in client.generate(_PROMPT, **options):
        yield len(event.delta.token_ids)


async def _direct(link: DecodeLink, prompt_ids: tuple[int, ...], number: int) -> AsyncIterator[int]:
    spec = SequenceSpec(
        sequence_id=SequenceId(RequestId(f"direct-{number}-{time.monotonic_ns()}"), 0),
        prompt_ids=prompt_ids,
        sampling=SamplingParams(temperature=0.0),
        max_tokens=_NUM_TOKENS,
        ignore_eos=True,
    )
    async for event in link.submit(spec):
        yield len(event.tokens.token_ids)
        if event.tokens.finish_reason:
            return


# -- how much it carries


async def _streams(model: Path) -> Passed:
    """Tokens of 256 streams at once, of a worker that would give more than the router can pass one by one."""
    async with _cluster(model, step_ms=1) as cluster:
        return await _pass(cluster, num_streams=256, num_each=1, num_tokens=200)


async def _requests(model: Path) -> Passed:
    """Whole requests of 8 tokens, one after the other on 64 streams: tokeniser, limits and table in each of them."""
    async with _cluster(model, step_ms=1) as cluster:
        return await _pass(cluster, num_streams=64, num_each=30, num_tokens=8)


async def _pass(cluster: LocalCluster, *, num_streams: int, num_each: int, num_tokens: int) -> Passed:
    router = psutil.Process(cluster.pids["router"])
    async with PacelineClient(cluster.address, api_key=_KEY) as client:

        async def stream(count: int) -> list[int]:
            """The tokens of each message of so many answers."""
            found: list[int] = []
            for _ in range(count):
                found += [count async for count in _events(client, num_tokens) if count]
            return found

        await asyncio.gather(*(stream(1) for _ in range(num_streams)))
        begin_s, cpu_s = time.perf_counter(), sum(router.cpu_times()[:2])
        messages = await asyncio.gather(*(stream(num_each) for _ in range(num_streams)))
        wall_s = time.perf_counter() - begin_s
        return Passed(
            num_requests=num_streams * num_each,
            num_tokens=sum(map(sum, messages)),
            num_messages=sum(map(len, messages)),
            wall_s=wall_s,
            router_cpu_s=sum(router.cpu_times()[:2]) - cpu_s,
        )
