"""How fast blocks pass between two processes of this machine, by each transport, beside a plain copy of as many bytes.

What is timed is a whole hand-over of blocks that are all computed: pull, copy into the receiver's pool, checksum over it, release.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.kv_owner import BOOT_EPOCH, FINGERPRINT, fill
from kvtransfer.block_store import MemoryBlockStore
from kvtransfer.chunks import MAX_MESSAGE_BYTES
from kvtransfer.receiver import KVReceiver
from kvtransfer.transports.base import KVTransport
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.negotiated import NegotiatedTransport
from kvtransfer.transports.nixl import Nixl
from kvtransfer.transports.shm import SharedMemory
from paceline.core.kv_layout import BlockId
from paceline.core.ticket import KvTicket
from paceline.runtime.channels import Channels
from paceline.runtime.wire_internal import fingerprint_to_proto, ticket_from_proto
from paceline.v1 import kv_transfer_pb2
from paceline.v1.kv_transfer_pb2_grpc import KvTransferServiceStub

_PULL_BYTES = 64 << 20  # of one hand-over; neither pool fits into a cache
_NUM_ROUNDS = 9
_NUM_WARM_UP = 2
# A block of the default model in bfloat16, a quarter of it, and four times as much; and how large a message may be.
_BLOCK_BYTES = 368_640
_SETUPS = (
    (_BLOCK_BYTES, MAX_MESSAGE_BYTES),
    (_BLOCK_BYTES // 4, MAX_MESSAGE_BYTES),
    (_BLOCK_BYTES * 4, MAX_MESSAGE_BYTES),
    (_BLOCK_BYTES, 512 << 10),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One way of moving bytes, in GB/s: the median of the rounds, the slowest, the fastest; and beside memcpy of the same round."""

    transport: str
    block_bytes: int
    message_bytes: int  # of gRPC, at most; whoever reads a pool itself asks for no bytes
    gb_s: float
    min_gb_s: float
    max_gb_s: float
    over_memcpy: float


def measure(say: Callable[[str], None]) -> dict[str, Any]:
    """The table, and its numbers: those of the default model's block have keys of their own."""
    rows = [row for setup in _SETUPS for row in asyncio.run(_measure(*setup, say))]
    print(f"{_PULL_BYTES >> 20} MiB a hand-over, two processes, medians of {_NUM_ROUNDS} interleaved rounds")
    print(f"{'way':<8}{'block':>10}{'message':>10}{'GB/s':>8}{'min':>7}{'max':>7}{'/ memcpy':>10}")
    for row in rows:
        print(
            f"{row.transport:<8}{row.block_bytes:>10}{row.message_bytes:>10}{row.gb_s:>8.2f}{row.min_gb_s:>7.2f}"
            f"{row.max_gb_s:>7.2f}{row.over_memcpy:>10.2f}"
        )
    own = {row.transport: row for row in rows if (row.block_bytes, row.message_bytes) == _SETUPS[0]}
    return {
        **{f"{name}_gb_s": row.gb_s for name, row in own.items()},
        **{f"{name}_over_memcpy": row.over_memcpy for name, row in own.items() if name != "memcpy"},
        "transports": [asdict(row) for row in rows],
    }


async def _measure(block_bytes: int, message_bytes: int, say: Callable[[str], None]) -> list[Row]:
    num_blocks = _PULL_BYTES // block_bytes
    say(f"{num_blocks} blocks of {block_bytes} bytes, messages of at most {message_bytes}")
    store = MemoryBlockStore(num_blocks, block_bytes)
    source = MemoryBlockStore(num_blocks, block_bytes)
    fill(source, num_blocks)
    fill(store, num_blocks)
    async with running_owner(num_blocks, block_bytes, message_bytes) as owner:
        ways = _ways(owner.channels, store)
        rates: dict[str, list[float]] = {name: [] for name in ("memcpy", *ways)}
        for _ in range(_NUM_WARM_UP + _NUM_ROUNDS):
            rates["memcpy"].append(_timed_copy(source, store, num_blocks))
            for name, way in ways.items():
                rates[name].append(await _timed_hand_over(way, owner, store, num_blocks))
    return list(_rows(rates, block_bytes, message_bytes))


def _rows(rates: dict[str, list[float]], block_bytes: int, message_bytes: int) -> Iterator[Row]:
    copied = rates["memcpy"][_NUM_WARM_UP:]
    for name, all_rounds in rates.items():
        rounds = all_rounds[_NUM_WARM_UP:]
        beside = median(rate / copy for rate, copy in zip(rounds, copied, strict=True))
        yield Row(name, block_bytes, message_bytes, median(rounds), min(rounds), max(rounds), beside)


def _ways(channels: Channels, store: MemoryBlockStore) -> dict[str, KVTransport]:
    over_grpc = GrpcTransport(channels, FINGERPRINT)
    shm = NegotiatedTransport(over_grpc, [SharedMemory(over_grpc)], is_required=True)
    ways: dict[str, KVTransport] = {"shm": shm, "grpc": over_grpc}
    if Nixl.is_installed():
        agent = f"receiver-{os.getpid()}-{time.time_ns()}"
        nixl = Nixl.open(agent, store.pool, store.block_bytes, over_grpc, lambda: False)
        ways["nixl"] = NegotiatedTransport(over_grpc, [nixl], is_required=True)
    return ways


# -- one round


def _timed_copy(source: MemoryBlockStore, target: MemoryBlockStore, num_blocks: int) -> float:
    """GB/s of a plain copy, block by block."""
    start_s = time.perf_counter()
    for index in range(num_blocks):
        target.write(BlockId(index), 0, source.read(BlockId(index)))
    return num_blocks * source.block_bytes / (time.perf_counter() - start_s) / 1e9


async def _timed_hand_over(
    transport: KVTransport, owner: "Owner", store: MemoryBlockStore, num_blocks: int
) -> float:
    """GB/s of a whole hand-over."""
    ticket = await owner.lease(num_blocks)
    receiver = KVReceiver(transport, store, FINGERPRINT)
    start_s = time.perf_counter()
    received = await receiver.receive(ticket, [BlockId(index) for index in range(num_blocks)], 0)
    return received.num_bytes / (time.perf_counter() - start_s) / 1e9


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that has computed blocks."""

    channels: Channels
    address: str
    pid: int

    async def lease(self, num_blocks: int) -> KvTicket:
        """The right to pull so many of them."""
        request = kv_transfer_pb2.LeasePrefixRequest(
            boot_epoch=BOOT_EPOCH, fingerprint=fingerprint_to_proto(FINGERPRINT), token_ids=range(num_blocks)
        )
        stub = KvTransferServiceStub(self.channels.get(self.address))
        response = await stub.LeasePrefix(request, wait_for_ready=True)
        return ticket_from_proto(response.ticket)


@asynccontextmanager
async def running_owner(
    num_blocks: int, block_bytes: int, message_bytes: int = MAX_MESSAGE_BYTES
) -> AsyncGenerator[Owner, None]:
    """A process with as many blocks; it ends with the body."""
    with tempfile.TemporaryDirectory(prefix=".paceline-bench-") as directory:
        address = f"unix:{Path(directory) / 'owner.sock'}"
        command = (sys.executable, "-P", "-m", "benchmarks.kv_owner", "--listen", address)
        sizes = ("--blocks", num_blocks, "--block-bytes", block_bytes, "--message-bytes", message_bytes)
        owner = subprocess.Popen((*command, *map(str, sizes)), stdin=subprocess.PIPE)  # noqa: ASYNC220 - it starts in a moment
        channels = Channels()
        try:
            yield Owner(channels, address, owner.pid)
        finally:
            await channels.aclose()
            owner.communicate()
