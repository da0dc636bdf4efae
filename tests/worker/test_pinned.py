"""Pinned prefixes: what a file may say, what fits, and that they outlive everything else in the cache."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError, EngineFailedError
from paceline.core.kv_layout import KVLayout, LayerKV
from paceline.engine.events import NewTokens, Started
from paceline.engine.fake import FakeModelRunner, fake_layout
from paceline.engine.sequence import SequenceRole
from paceline.v1 import inference_pb2
from paceline.worker.capacity import Capacity
from paceline.worker.config import WorkerConfig
from paceline.worker.events import EventQueue
from paceline.worker.pinned import PinnedPlan, pin, pin_unless_stopped, plan_pinned, read_pinned
from paceline.worker.runner import load_runner
from paceline.worker.worker import Worker, open_worker
from tests.engine.harness import oracle
from tests.engine.runners import BrokenRunner, GatedRunner
from tests.factories import BLOCK_SIZE, make_spec
from tests.worker.bench import DECODE, EOS, NUM_BLOCKS, PREFILL, VOCAB_SIZE, serving_worker, until

PINNED = tuple(range(100, 120))  # 5 blocks of 4
TWIN = tuple(range(200, 220))
LAYOUT = fake_layout(BLOCK_SIZE)
CAPACITY = Capacity(NUM_BLOCKS, 64, 64, NUM_BLOCKS * BLOCK_SIZE, 1)


def plan(*prefixes: tuple[int, ...], layout: KVLayout = LAYOUT, capacity: Capacity = CAPACITY) -> PinnedPlan:
    """Of a small pool, in steps of 8 tokens."""
    return plan_pinned(prefixes, layout, capacity, VOCAB_SIZE, 8)


def write(directory: Path, *lines: str) -> str:
    """A file with these lines."""
    file = directory / "pinned.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    return str(file)


# -- the file


def test_a_file_is_read_line_by_line(tmp_path: Path) -> None:
    """One prefix a line, in order; empty lines are none, and without a file there is none."""
    file = write(tmp_path, '{"token_ids": [1, 2]}', "", '{"token_ids": [3]}', "")
    assert read_pinned(file) == ((1, 2), (3,))
    assert read_pinned("") == ()


@pytest.mark.parametrize(
    "line",
    [
        "[1, 2]",
        '{"token_ids": []}',
        '{"token_ids": [1, -1]}',
        '{"token_ids": [1.5]}',
        '{"token_ids": [true]}',
        '{"token_ids": "1 2"}',
        '{"token_ids": [1], "text": "hello"}',
        '{"tokens": [1]}',
        '{"token_ids": [1',
        '{"token_ids": ' * 100_000,
    ],
)
def test_a_line_that_is_no_prefix_is_refused_by_number(tmp_path: Path, line: str) -> None:
    """It names file and line and shows the form; nothing of the line itself, which may be a prompt."""
    file = write(tmp_path, '{"token_ids": [1]}', line)
    with pytest.raises(ConfigError, match=r"pinned\.jsonl, line 2 is not of the form") as caught:
        read_pinned(file)
    assert "hello" not in str(caught.value)


def test_a_file_without_a_prefix_is_refused(tmp_path: Path) -> None:
    """Missing, empty, or not text: each with the setting's name."""
    for file in (str(tmp_path / "nowhere"), write(tmp_path, "", " ")):
        with pytest.raises(ConfigError, match="--pinned-prefixes"):
            read_pinned(file)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read"):
        read_pinned(str(tmp_path / "binary"))


# -- what fits


def test_prefixes_are_cut_to_whole_blocks() -> None:
    """Only full blocks can be found again; what another prefix begins with is held once, and comes first."""
    assert plan(PINNED) == PinnedPlan((PINNED,), 5)
    assert plan((*PINNED, 1, 2, 3), PINNED) == PinnedPlan((PINNED,), 5)
    longer = (*PINNED, 1, 2, 3, 4)
    assert plan(longer, PINNED) == PinnedPlan((PINNED, longer), 6)
    fork = (*PINNED[:8], *TWIN[:8])
    assert plan(fork, PINNED).num_blocks == 7
    assert plan() == PinnedPlan()


@pytest.mark.parametrize(
    ("prefixes", "why"),
    [
        ([(1, VOCAB_SIZE, 2, 3)], f"token {VOCAB_SIZE} is outside of the vocabulary of {VOCAB_SIZE}"),
        ([(1,) * 64], "64 tokens is longer than the 63 that a prompt may have; shorten it"),
        ([(1,) * 3], "3 tokens fills no block of 4"),
        ([(1,) * 60, (2,) * 8], "17 KV blocks for ever, more than half of the 32"),
    ],
    ids=["vocabulary", "length", "no block", "half"],
)
def test_a_prefix_that_cannot_be_is_refused(prefixes: list[tuple[int, ...]], why: str) -> None:
    """With the numbers and what to do; one less of it is taken."""
    with pytest.raises(ConfigError, match=why):
        plan(*prefixes)


def test_the_nearest_that_can_be_is_taken() -> None:
    """The last token of the vocabulary, the longest prompt, one block, half of the pool."""
    assert plan((1, VOCAB_SIZE - 1, 2, 3)).num_blocks == 1
    assert plan((1,) * 63, (2,) * 4).num_blocks == 16


def test_the_longest_request_must_fit_beside_them() -> None:
    """Otherwise it would wait for ever; the length that does fit is named, and is taken."""
    tight = replace(CAPACITY, max_model_tokens=NUM_BLOCKS * BLOCK_SIZE)
    with pytest.raises(ConfigError, match=r"lower --max-model-len to 108"):
        plan(PINNED, capacity=tight)
    assert plan(PINNED, capacity=replace(tight, max_model_tokens=108)).num_blocks == 5


def test_a_window_is_held_for_each_prefix() -> None:
    """A group with a window holds no more than window and step can touch, and shares nothing; the others all of it, once."""
    layers = (LayerKV(1, 1, 1), LayerKV(1, 1, 1, window=4))
    mixed = KVLayout(layers, BLOCK_SIZE, "float32")
    longer = (*PINNED, 1, 2, 3, 4)
    windowed = mixed.groups[1].max_live_blocks(8, BLOCK_SIZE)
    assert windowed < 5
    roomy = replace(CAPACITY, num_blocks=100)
    assert plan(PINNED, longer, layout=mixed, capacity=roomy).num_blocks == 6 + 2 * windowed


# -- what stays


async def cached_tokens(worker: Worker, name: str, prompt: tuple[int, ...], layout: KVLayout = LAYOUT) -> int:
    """How much of a prompt is found in the cache; its output is what it always is."""
    events = EventQueue()
    spec = make_spec(name, prompt, max_tokens=2)
    worker.engine.submit(spec, SequenceRole.GENERATE, events.put)
    started: Started | None = None
    tokens: list[int] = []
    async for event in events:
        match event:
            case Started():
                started = event
            case NewTokens():
                tokens += event.token_ids
        if len(tokens) == 2:
            break
    assert started is not None
    assert tokens == oracle(spec, vocab_size=VOCAB_SIZE, eos=EOS, groups=layout.groups)[0]
    return started.num_cached_tokens


@pytest.mark.parametrize("role", [PREFILL, DECODE])
async def test_a_pinned_prefix_outlives_pressure(
    tiny_tokenizer_dir: Path, role: inference_pb2.WorkerRole
) -> None:
    """After prompts that fill the pool several times over it is still hit; its twin, which was only computed, is not."""
    async with serving_worker(tiny_tokenizer_dir, "worker-0", role) as worker:
        await pin(worker, plan(PINNED))
        assert await cached_tokens(worker, "pinned", (*PINNED, 1)) == len(PINNED)
        assert await cached_tokens(worker, "twin", (*TWIN, 1)) == 0
        assert await cached_tokens(worker, "twin again", (*TWIN, 1)) == len(TWIN)
        for number in range(20):
            await cached_tokens(worker, f"other-{number}", (300 + number,) * 30)
        hits = worker.engine.stats.pool.num_hits
        assert worker.engine.stats.pool.num_evictions > 0
        assert await cached_tokens(worker, "pinned later", (*PINNED, 1)) == len(PINNED)
        assert await cached_tokens(worker, "twin later", (*TWIN, 1)) == 0
        assert worker.engine.stats.pool.num_hits - hits == 5


async def test_a_window_keeps_what_comes_after_the_prefix_needs(tiny_tokenizer_dir: Path) -> None:
    """With layers that let go of old blocks the pinned prefix is hit after pressure too, and its twin is not."""
    layers = (LayerKV(1, 1, 1), LayerKV(1, 1, 1, window=6))
    layout = KVLayout(layers, BLOCK_SIZE, "float32")
    runner = FakeModelRunner(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE, groups=layout.groups)
    config = WorkerConfig(
        model=str(tiny_tokenizer_dir),
        runner="fake",
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=8,
        max_num_seqs=8,
    )
    loaded = replace(load_runner(config), runner=runner, layout=layout)
    async with open_worker(config, loaded) as worker:
        await pin(worker, plan(PINNED, layout=layout))
        for number in range(20):
            await cached_tokens(worker, f"other-{number}", (300 + number,) * 30, layout)
        assert worker.engine.stats.pool.num_evictions > 0
        assert await cached_tokens(worker, "pinned", (*PINNED, 1), layout) == len(PINNED)
        assert await cached_tokens(worker, "twin", (*TWIN, 1), layout) == 0


async def test_pinned_prefixes_hold_what_was_planned(tiny_tokenizer_dir: Path) -> None:
    """Shared beginnings are held once, and nothing more than the plan says."""
    planned = plan(PINNED, (*PINNED, 1, 2, 3, 4), (*PINNED[:8], *TWIN[:8]))
    async with serving_worker(tiny_tokenizer_dir, "worker-0", DECODE) as worker:
        await pin(worker, planned)
        await until(lambda: worker.engine.stats.num_running == 0)
        assert worker.engine.stats.num_free_blocks == NUM_BLOCKS - planned.num_blocks == NUM_BLOCKS - 8


async def test_nobody_waits_for_them_to_go(tiny_tokenizer_dir: Path) -> None:
    """A worker with pinned prefixes is idle, and a drain ends at once; with somebody's sequence it does not."""
    async with serving_worker(tiny_tokenizer_dir, "worker-0", DECODE) as worker:
        await pin(worker, plan(PINNED))
        idle = [worker.is_idle]
        worker.engine.submit(make_spec("held"), SequenceRole.PREFILL_ONLY, EventQueue().put)
        idle.append(worker.is_idle)
        assert idle == [True, False]
        worker.engine.release(make_spec("held").sequence_id)
        async with asyncio.timeout(20):
            await worker.drain(grace_s=3600)


async def test_a_worker_that_pins_can_be_stopped(tiny_tokenizer_dir: Path) -> None:
    """Who is told to stop while a prefix is being computed goes on at once, and a drain does not wait either."""
    runner = GatedRunner(FakeModelRunner(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE))
    async with serving_worker(tiny_tokenizer_dir, "worker-0", DECODE, runner=runner) as worker:
        runner.close()
        stop = asyncio.Event()
        pinning = asyncio.create_task(pin_unless_stopped(worker, plan(PINNED), stop))
        await runner.until_arrived()
        assert not pinning.done()
        stop.set()
        async with asyncio.timeout(20):
            await pinning
            await worker.drain(grace_s=3600)
        assert worker.engine.stats.pool.num_cached == 0
        runner.open()


async def test_an_engine_that_fails_fails_the_start(tiny_tokenizer_dir: Path) -> None:
    """Whoever pins hears of it, and does not wait for ever."""
    broken = BrokenRunner(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE)
    async with serving_worker(tiny_tokenizer_dir, "worker-0", DECODE, runner=broken) as worker:
        with pytest.raises(EngineFailedError):
            await pin_unless_stopped(worker, plan((13,) * 8), asyncio.Event())
