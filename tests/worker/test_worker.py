"""What both tiers share: a worker's facts, load, bounds and end."""

import asyncio
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from paceline.core.errors import DrainingError, InvariantError
from paceline.core.request import Priority, SequenceSpec
from paceline.engine.events import Event, NewTokens
from paceline.engine.fake import FakeModelRunner
from paceline.engine.sequence import SequenceRole
from paceline.engine.step import ExpertTokens, SchedulerOutput, StepOutput
from paceline.runtime.channels import Channels
from paceline.v1 import worker_pb2
from paceline.v1.worker_pb2_grpc import WorkerServiceStub
from paceline.worker.events import EventQueue
from tests.engine.runners import GatedRunner
from tests.factories import BLOCK_SIZE, make_id, make_spec
from tests.worker.bench import DECODE, NUM_BLOCKS, PREFILL, VOCAB_SIZE, require_empty, serving_worker

MAX_TOKENS = NUM_BLOCKS * BLOCK_SIZE


async def test_a_worker_says_what_it_is(tiny_tokenizer_dir: Path) -> None:
    """Its facts do not change while it lives, and another life has another boot epoch."""
    infos, channels = [], Channels()
    for role in (PREFILL, PREFILL):
        async with serving_worker(tiny_tokenizer_dir, "worker-0", role) as worker:
            stub = WorkerServiceStub(channels.get(worker.address))
            infos += [await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=10) for _ in range(2)]
    await channels.aclose()
    assert infos[0] == infos[1]
    assert infos[0].boot_epoch != infos[2].boot_epoch
    assert (infos[0].worker_id, infos[0].role) == ("worker-0", PREFILL)
    assert (infos[0].num_blocks, infos[0].block_bytes) == (NUM_BLOCKS, BLOCK_SIZE * 8)
    assert (infos[0].max_model_tokens, infos[0].vocab_size) == (MAX_TOKENS, VOCAB_SIZE)
    assert infos[0].fingerprint == infos[2].fingerprint


async def test_a_worker_without_a_name_is_told_from_those_of_other_hosts(tiny_tokenizer_dir: Path) -> None:
    """Its process id alone would be 1 in every container, and all of them one point on the ring."""
    async with serving_worker(tiny_tokenizer_dir, "", PREFILL) as worker:
        assert worker.key.worker_id == f"worker-{socket.gethostname()}-{os.getpid()}"


async def test_load_is_reported_at_once_and_when_it_changes(tiny_tokenizer_dir: Path) -> None:
    """The first report needs no change; then each change comes, a drain among them."""
    channels = Channels()
    async with serving_worker(tiny_tokenizer_dir, "worker-0", DECODE) as worker:
        stub = WorkerServiceStub(channels.get(worker.address))
        reports = aiter(stub.WatchLoad(worker_pb2.WatchLoadRequest()))
        first = await anext(reports)
        assert (first.num_free_blocks, first.num_steps, first.draining) == (NUM_BLOCKS, 0, False)
        await require_empty(worker)
        assert (await anext(reports)).num_steps == 1
        await stub.Drain(worker_pb2.DrainRequest(), timeout=10)
        assert (await anext(reports)).draining
        await channels.aclose()


async def test_an_idle_worker_says_again_that_it_lives(tiny_tokenizer_dir: Path) -> None:
    """The same load, though nothing has changed: whoever hears nothing takes it for frozen."""
    channels = Channels()
    async with serving_worker(tiny_tokenizer_dir, "worker-0", PREFILL) as worker:
        stub = WorkerServiceStub(channels.get(worker.address))
        reports = aiter(stub.WatchLoad(worker_pb2.WatchLoadRequest()))
        async with asyncio.timeout(10):
            assert await anext(reports) == await anext(reports)
        await channels.aclose()


async def test_the_load_says_who_waits(tiny_tokenizer_dir: Path) -> None:
    """Sequences that have not begun are reported by their class; those that have are not among them."""
    channels, runner = Channels(), GatedRunner(FakeModelRunner(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE))
    async with serving_worker(tiny_tokenizer_dir, "worker-0", DECODE, runner=runner) as worker:
        stub = WorkerServiceStub(channels.get(worker.address))
        runner.close()
        for number in range(8):  # as many as there are seats
            worker.engine.submit(make_spec(f"{number}", (1,), ignore_eos=True), SequenceRole.GENERATE, _deaf)
        await runner.until_arrived()
        for number, priority in enumerate((Priority.REALTIME, Priority.BATCH, Priority.BATCH)):
            spec = make_spec(f"late-{number}", (1,), priority=priority)
            worker.engine.submit(spec, SequenceRole.GENERATE, _deaf)
        for _ in range(2):
            runner.let_one_pass()
            await runner.until_arrived()
        load = await anext(aiter(stub.WatchLoad(worker_pb2.WatchLoadRequest())))
        waiting = (load.num_waiting_realtime, load.num_waiting_standard, load.num_waiting_batch)
        runner.open()
    await channels.aclose()
    assert waiting == (1, 0, 2)


async def test_a_worker_says_how_fast_it_is_once_it_knows(tiny_tokenizer_dir: Path) -> None:
    """Not before it has computed some prompts; what bounds its steps it says from the start."""
    channels = Channels()
    async with serving_worker(tiny_tokenizer_dir, "worker-0", DECODE) as worker:
        stub = WorkerServiceStub(channels.get(worker.address))
        info = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=10)
        reports = aiter(stub.WatchLoad(worker_pb2.WatchLoadRequest()))
        first = await anext(reports)
        for number in range(10):
            ended = asyncio.Event()
            spec = make_spec(f"{number}", (number, 1, 2), max_tokens=1, ignore_eos=True)
            worker.engine.submit(spec, SequenceRole.GENERATE, partial(_note_end, ended))
            await ended.wait()
        load = first
        while not load.HasField("pace"):
            load = await anext(reports)
        await channels.aclose()
    config = worker.scheduling
    assert (info.max_num_batched_tokens, info.fast_lane_share) == (
        config.max_num_batched_tokens,
        config.fast_lane_share,
    )
    assert not first.HasField("pace")
    assert load.HasField("pace")
    assert load.pace.step_s + load.pace.decode_s + load.pace.prompt_token_s > 0
    assert load.pace.standard_tokens_per_s > 0
    assert load.max_seats == config.max_num_seqs


def _note_end(ended: asyncio.Event, events: Sequence[Event]) -> None:
    """Hears of the last token."""
    if any(isinstance(event, NewTokens) and event.finish_reason for event in events):
        ended.set()


def _deaf(events: Sequence[Event]) -> None:
    """Hears nothing."""


async def test_a_worker_that_cools_asks_for_less(tiny_tokenizer_dir: Path) -> None:
    """The load says what the engine says."""
    channels = Channels()
    async with serving_worker(tiny_tokenizer_dir, "worker-0", DECODE) as worker:
        stub = WorkerServiceStub(channels.get(worker.address))
        reports = aiter(stub.WatchLoad(worker_pb2.WatchLoadRequest()))
        told = [(await anext(reports)).cooling_down]
        stats = worker.engine.stats
        worker.engine.stats = replace(stats, queues=replace(stats.queues, is_cooling=True))
        told.append((await anext(reports)).cooling_down)
        await channels.aclose()
    assert told == [False, True]


@pytest.mark.parametrize(
    ("spec", "is_taken"),
    [
        (make_spec(prompt_ids=(1,) * (MAX_TOKENS - 8), max_tokens=8), True),
        (make_spec(prompt_ids=(1,) * (MAX_TOKENS - 7), max_tokens=8), False),
        (make_spec(prompt_ids=(1, VOCAB_SIZE - 1)), True),
        (make_spec(prompt_ids=(1, VOCAB_SIZE)), False),
        (make_spec(output_ids=(VOCAB_SIZE,)), False),
    ],
    ids=["longest", "too-long", "last-token", "unknown-token", "unknown-output"],
)
async def test_only_work_that_fits_is_taken(
    tiny_tokenizer_dir: Path, spec: SequenceSpec, is_taken: bool
) -> None:
    """What could never run would wait for ever: it is refused at the door, as our own bug."""
    async with serving_worker(tiny_tokenizer_dir, "worker-0", DECODE) as worker:
        if is_taken:
            worker.require_room_for(spec)
        else:
            with pytest.raises(InvariantError):
                worker.require_room_for(spec)


async def test_a_draining_worker_takes_nothing_new(tiny_tokenizer_dir: Path) -> None:
    """It says so with its name."""
    async with serving_worker(tiny_tokenizer_dir, "worker-0", DECODE) as worker:
        worker.require_room_for(make_spec())
        worker.draining.set()
        with pytest.raises(DrainingError, match="worker-0"):
            worker.require_room_for(make_spec())


async def test_a_drain_waits_for_what_the_engine_has_not_seen_yet(tiny_tokenizer_dir: Path) -> None:
    """A sequence that was taken is finished, also when the engine is in the middle of an earlier step."""
    runner = GatedRunner(FakeModelRunner(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE))
    heard: list[Event] = []
    async with serving_worker(tiny_tokenizer_dir, "worker-0", DECODE, runner=runner) as worker:
        runner.close()
        worker.engine.submit(make_spec("earlier", max_tokens=1), SequenceRole.GENERATE, EventQueue().put)
        await runner.until_arrived()
        worker.engine.submit(make_spec(), SequenceRole.GENERATE, heard.extend)
        draining = asyncio.create_task(worker.drain(grace_s=30))
        await asyncio.sleep(0)
        runner.open()
        await draining
        assert isinstance(heard[-1], NewTokens)
        assert heard[-1].finish_reason is not None
        await require_empty(worker)


async def test_a_drain_waits_for_leases(tiny_tokenizer_dir: Path) -> None:
    """Blocks that somebody may still pull keep the worker there; a grace of nothing does not wait."""
    async with serving_worker(tiny_tokenizer_dir, "worker-0", PREFILL) as worker:
        lease = worker.leases.grant(make_id(), 0, [])
        await worker.drain(grace_s=0)
        draining = asyncio.create_task(worker.drain(grace_s=30))
        await asyncio.sleep(0)
        assert not draining.done()
        worker.leases.release([lease.lease_id])
        await draining


class _MixtureRunner(FakeModelRunner):
    """The fake, which says of every step that it gave three tokens to one expert and one to another."""

    def execute(self, output: SchedulerOutput) -> StepOutput:
        return replace(super().execute(output), expert_tokens=(ExpertTokens(5, (3, 1)),))


async def test_the_load_of_experts_is_told(tiny_tokenizer_dir: Path) -> None:
    """A worker says what each expert was given since its start; a dense model's worker has nothing to say."""
    channels = Channels()
    mixture = _MixtureRunner(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE)
    for runner, expected in ((None, []), (mixture, [(5, [6, 2], 1.5)])):
        async with serving_worker(tiny_tokenizer_dir, "worker-0", DECODE, runner=runner) as worker:
            await require_empty(worker)
            await require_empty(worker)
            stub = WorkerServiceStub(channels.get(worker.address))
            load = await stub.GetExpertLoad(worker_pb2.GetExpertLoadRequest(), timeout=10)
            told = [(layer.layer, list(layer.num_tokens), layer.imbalance) for layer in load.layers]
            assert told == expected
    await channels.aclose()
