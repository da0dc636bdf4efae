"""Whole workers in this process, with the fake runner, served over gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc

from decode_service.service import DecodeServicer
from kvtransfer.service import KvTransferServicer, add_kv_transfer_service
from paceline.core.request import SequenceSpec
from paceline.engine.engine import Runner
from paceline.engine.sequence import SequenceRole
from paceline.v1 import inference_pb2
from paceline.v1.decode_pb2_grpc import add_DecodeServiceServicer_to_server
from paceline.v1.prefill_pb2_grpc import add_PrefillServiceServicer_to_server
from paceline.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from paceline.worker.config import WorkerConfig
from paceline.worker.events import EventQueue
from paceline.worker.lender import Lender
from paceline.worker.runner import load_runner
from paceline.worker.service import WorkerServicer
from paceline.worker.worker import Worker, open_worker
from prefill_service.service import PrefillServicer
from tests.engine.harness import oracle
from tests.factories import BLOCK_SIZE, make_spec

NUM_BLOCKS = 32
# Of the tiny tokenizer, from which the fake runner takes them.
VOCAB_SIZE, EOS = 480, frozenset({2})
PREFILL, DECODE = inference_pb2.WORKER_ROLE_PREFILL, inference_pb2.WORKER_ROLE_DECODE


def output_of(spec: SequenceSpec, candidate: int = 0) -> tuple[int, ...]:
    """The oracle's output."""
    return tuple(oracle(spec, vocab_size=VOCAB_SIZE, eos=EOS, candidate=candidate)[0])


@asynccontextmanager
async def serving_worker(
    directory: Path,
    name: str,
    role: inference_pb2.WorkerRole,
    *,
    runner: Runner | None = None,
    num_blocks: int = NUM_BLOCKS,
    lease_ttl_s: float = 30.0,
    victim: str = "cost",
    prefix_pull: str = "always",
    stall_s: float = 120.0,
    overload_wait_s: float = 5.0,
) -> AsyncIterator[Worker]:
    """A worker of one tier that computes 8 tokens a step."""
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    config = WorkerConfig(
        listen=address,
        worker_id=name,
        model=str(directory),
        runner="fake",
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=8,
        max_num_seqs=8,
        lease_ttl_s=lease_ttl_s,
        victim=victim,
        prefix_pull=prefix_pull,
        stall_s=stall_s,
        overload_wait_s=overload_wait_s,
    )
    loaded = load_runner(config)
    if runner is not None:
        loaded = replace(loaded, runner=runner)
    async with open_worker(config, loaded) as worker:
        add_kv_transfer_service(KvTransferServicer(worker.sender, Lender(worker)), server)
        add_WorkerServiceServicer_to_server(WorkerServicer(worker, role), server)
        if role == PREFILL:
            add_PrefillServiceServicer_to_server(PrefillServicer(worker), server)
        else:
            add_DecodeServiceServicer_to_server(DecodeServicer(worker), server)
        await server.start()
        yield worker
        await server.stop(None)


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop run until something holds for which nobody has an event."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - this is the place for it
            await asyncio.sleep(0)


async def require_empty(worker: Worker) -> None:
    """Every block is free, and no lease is out, once the engine has caught up with what it was told."""
    await _caught_up(worker)
    assert worker.engine.stats.num_free_blocks == worker.loaded.capacity.num_blocks
    assert worker.leases.stats().num_active == 0
    assert worker.is_idle


async def _caught_up(worker: Worker) -> None:
    """Two steps: one under way, and one that computes a token of its own."""
    events = EventQueue()
    spec = make_spec(f"probe-{id(events)}", (1,), max_tokens=1, bypass_cache=True)
    worker.engine.submit(spec, SequenceRole.GENERATE, events.put)
    await anext(events)
    await anext(events)
