"""What the hand-over adds to a real request, and from which length on blocks are pulled sooner than they are computed.

A real 1P1D cluster answers prompts that nobody has seen, one at a time. Then this process asks its prefill worker for the same
prompts' blocks, as another worker would: what that takes stands beside what computing them took.
"""

import argparse
import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kvtransfer.block_store import MemoryBlockStore
from kvtransfer.borrower import PrefixBorrower
from kvtransfer.lending import PrefixRequest
from kvtransfer.receiver import KVReceiver
from kvtransfer.transports.base import KVTransport
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.negotiated import NegotiatedTransport
from kvtransfer.transports.shm import SharedMemory
from paceline.client import PacelineClient
from paceline.core.block_hash import chain_root, hash_full_blocks
from paceline.core.kv_layout import BlockId
from paceline.core.prefix import PrefixOwner
from paceline.core.request import BootEpoch, RequestId, SequenceId, WorkerId
from paceline.launcher.cluster import LocalCluster
from paceline.launcher.config import UpConfig
from paceline.launcher.models import DEFAULT_MODEL, resolve_model
from paceline.runtime.wire_internal import fingerprint_from_proto
from paceline.v1 import worker_pb2
from paceline.v1.worker_pb2_grpc import WorkerServiceStub

LENGTHS = (16, 64, 128, 512, 1024, 2048, 3000, 4096, 8000)
_NUM_OUTPUT = 12
_REPEATS = 3
_LEAST_S = 1e-6
_NUM_PULLS = 5
# Enough for all prompts on either worker, so that nothing is evicted.
_KV_MEMORY = "3GiB"


@dataclass(frozen=True, slots=True)
class Request:
    """One answer, in seconds. `hand_over_s` is how much longer than the others the gap after the first token was."""

    ttft_s: float
    prefill_s: float
    first_gap_s: float
    itl_s: float

    @property
    def hand_over_s(self) -> float:
        """What the client waits for the blocks; they have moved meanwhile, as far as they were computed."""
        return max(0.0, self.first_gap_s - self.itl_s)


@dataclass(frozen=True, slots=True)
class Row:
    """All of one length: medians."""

    num_tokens: int
    ttft_s: float
    prefill_s: float
    hand_over_s: float
    hand_over_share_of_ttft: float
    first_gap_itls: float
    shm_pull_s: float
    grpc_pull_s: float


def measure(say: Callable[[str], None], args: argparse.Namespace) -> dict[str, Any]:
    """The keys of --json, after the table."""
    model = args.model or resolve_model(DEFAULT_MODEL.name, say)
    rows = asyncio.run(measured(say, model, args.lengths, args.repeats))
    _print(rows, model.name, args.repeats)
    return numbers_of(rows)


def numbers_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Shares of the prefill are those of a pull of all blocks at once, without any overlap: the most that a hand-over can take."""
    by_length = {row.num_tokens: row for row in rows}
    numbers: dict[str, Any] = {
        "handover": [asdict(row) for row in rows],
        "pull_beats_compute_from_tokens": crossover(rows),
    }
    if 2048 in by_length:
        numbers["handover_share_of_prefill_2048"] = by_length[2048].shm_pull_s / by_length[2048].prefill_s
        numbers["grpc_handover_share_of_prefill_2048"] = (
            by_length[2048].grpc_pull_s / by_length[2048].prefill_s
        )
    if 3000 in by_length:
        numbers["first_gap_itls_3000"] = by_length[3000].first_gap_itls
    return numbers


def crossover(rows: Sequence[Row]) -> int | None:
    """The least length measured from which on, at every one, the pull takes less than the computing; None if there is none."""
    cheaper = [row.shm_pull_s < row.prefill_s for row in rows]
    from_there = [row.num_tokens for index, row in enumerate(rows) if all(cheaper[index:])]
    return from_there[0] if from_there else None


async def measured(
    say: Callable[[str], None], model: Path, lengths: Sequence[int], repeats: int, runner: str = "torch"
) -> list[Row]:
    """A row for each length, of a cluster that is started for it."""
    async with _cluster(model, runner) as (local, client):
        say("warming up")
        vocab_size = (await _info(local)).vocab_size
        numbers = itertools.count()
        for _ in range(2):
            await _ask(client, _prompt(next(numbers), 256, vocab_size))
        rows = []
        async with _pulls(local, max(lengths)) as pull:
            for length in lengths:
                say(f"{length} tokens")
                asked = [_prompt(next(numbers), length, vocab_size) for _ in range(repeats)]
                requests = [await _ask(client, prompt) for prompt in asked]
                pulls = [
                    [await pull(transport, asked[-1]) for _ in range(_NUM_PULLS)]
                    for transport in ("shm", "grpc")
                ]
                rows.append(_row(length, requests, *map(median, pulls)))
    return rows


def _row(length: int, requests: Sequence[Request], shm_pull_s: float, grpc_pull_s: float) -> Row:
    return Row(
        num_tokens=length,
        ttft_s=median(request.ttft_s for request in requests),
        prefill_s=median(request.prefill_s for request in requests),
        hand_over_s=median(request.hand_over_s for request in requests),
        hand_over_share_of_ttft=median(request.hand_over_s / request.ttft_s for request in requests),
        first_gap_itls=median(request.first_gap_s / request.itl_s for request in requests),
        shm_pull_s=shm_pull_s,
        grpc_pull_s=grpc_pull_s,
    )


# -- requests


@asynccontextmanager
async def _cluster(model: Path, runner: str) -> AsyncIterator[tuple[LocalCluster, PacelineClient]]:
    with tempfile.TemporaryDirectory() as directory:
        config = UpConfig(
            runner=runner, disaggregate="always", kv_memory=_KV_MEMORY, threads=1, port=0, log_dir=directory
        )
        async with LocalCluster(config, model) as local, PacelineClient(local.address) as client:
            yield local, client


def _prompt(number: int, length: int, vocab_size: int) -> tuple[int, ...]:
    """Two numbers have no block in common."""
    return tuple(random.Random(number).choices(range(vocab_size), k=length))  # noqa: S311 - lengths count, no secrets


async def _ask(client: PacelineClient, prompt: tuple[int, ...]) -> Request:
    begin_s, times, prefill_s = time.perf_counter(), [], 0.0
    async for event in client.generate(prompt, max_tokens=_NUM_OUTPUT, temperature=0, ignore_eos=True):
        times += [time.perf_counter()] * len(event.delta.token_ids)
        prefill_s += event.finish.timeline.prefill_s
    # In the mean: what comes together has been made one after the other. A fake model makes them all at once.
    itl_s = max(_LEAST_S, (times[-1] - times[1]) / (len(times) - 2))
    return Request(times[0] - begin_s, prefill_s, times[1] - times[0], itl_s)


# -- pulls


async def _info(local: LocalCluster) -> worker_pb2.GetInfoResponse:
    channels = local.channels()
    try:
        stub = WorkerServiceStub(channels.get(local.worker_addresses["prefill-0"]))
        return await stub.GetInfo(worker_pb2.GetInfoRequest())
    finally:
        await channels.aclose()


@asynccontextmanager
async def _pulls(local: LocalCluster, longest: int) -> AsyncIterator[Callable[[str, tuple[int, ...]], Any]]:
    """A function that pulls a prompt's full blocks, and gives the seconds that it took from the question to the release."""
    info = await _info(local)
    fingerprint = fingerprint_from_proto(info.fingerprint)
    size = fingerprint.block_size
    owner = PrefixOwner(
        WorkerId(info.worker_id), local.worker_addresses["prefill-0"], BootEpoch(info.boot_epoch)
    )
    store = MemoryBlockStore(longest // size, info.block_bytes)
    for index in range(longest // size):
        store.write(BlockId(index), 0, bytes(info.block_bytes))
    channels, numbers = local.channels(), itertools.count()
    grpc = GrpcTransport(channels, fingerprint)
    shm = NegotiatedTransport(grpc, [SharedMemory(grpc)], is_required=True)
    transports: dict[str, KVTransport] = {"shm": shm, "grpc": grpc}

    async def pull(name: str, prompt: tuple[int, ...]) -> float:
        """Of one prompt."""
        receiver = KVReceiver(transports[name], store, fingerprint)
        token_ids = prompt[: len(prompt) // size * size]
        hashes = hash_full_blocks(chain_root(fingerprint.digest(), ""), token_ids, size)
        request = PrefixRequest(SequenceId(RequestId(f"bench-{next(numbers)}"), 0), "", token_ids)
        block_ids = [BlockId(index) for index in range(len(hashes))]
        begin_s = time.perf_counter()
        come = await PrefixBorrower(channels, receiver, fingerprint).borrow(
            owner, request, hashes, block_ids, 0
        )
        assert come == len(hashes), "the prefill worker has computed all of it a moment ago"
        return time.perf_counter() - begin_s

    try:
        yield pull
    finally:
        await shm.aclose()
        await channels.aclose()


def _print(rows: Sequence[Row], model: str, repeats: int) -> None:
    print(
        f"\nA hand-over beside the prefill, {model}, one thread a worker, medians of {repeats}; pulls of all blocks at once"
    )
    print("tokens     TTFT    waited for blocks   first gap   pull: shm   of prefill      gRPC")
    for row in rows:
        print(
            f"{row.num_tokens:>6} {row.ttft_s * 1e3:>8.0f} ms {row.hand_over_s * 1e3:>6.1f} ms "
            f"{row.hand_over_share_of_ttft:>6.1%} {row.first_gap_itls:>7.2f} ITLs {row.shm_pull_s * 1e3:>8.1f} ms"
            f" {row.shm_pull_s / row.prefill_s:>9.2%} {row.grpc_pull_s * 1e3:>9.1f} ms"
        )
    found = crossover(rows)
    print(
        "pulling takes less than computing at no length"
        if found is None
        else f"pulling takes less than computing from {found} tokens on, of the lengths above"
    )
