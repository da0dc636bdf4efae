"""Workers of several processes in a whole cluster: the tokens of one process, handed over between sizes; and what becomes of them when one dies."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from paceline.engine.model_loader import load_model
from paceline.engine.model_runner import ModelRunner
from tests.cluster.support import PATIENCE_S, Cluster, random_prompts, running_cluster
from tests.engine.whole import whole_reference
from tests.tiny_model import VOCAB_SIZE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

BLOCK_SIZE = 16
NUM_OUTPUT_TOKENS = 12
PROMPT = tuple((3 * i + 1) % VOCAB_SIZE for i in range(100))


@pytest.fixture(scope="module")
def expected(tiny_model_dir: Path) -> dict[tuple[int, ...], tuple[int, ...]]:
    """What one process says to some prompts."""
    loaded = load_model(tiny_model_dir, "float32", BLOCK_SIZE)
    runner = ModelRunner(loaded.model, loaded.layout, num_blocks=8)
    prompts = random_prompts(seed=3, count=4, longest=80, vocab_size=VOCAB_SIZE)
    return {
        prompt: whole_reference(runner, loaded.layout, prompt, NUM_OUTPUT_TOKENS).output_ids
        for prompt in prompts
    }


@pytest.mark.parametrize(
    ("prefill", "decode", "kv_transport"),
    [
        ({"tp": 2}, {"tp": 2}, "auto"),
        ({"tp": 2}, {"tp": 1}, "grpc"),
        ({"tp": 1}, {"tp": 2}, "auto"),
        ({"pp": 2}, {"tp": 2}, "auto"),
        ({"tp": 2}, {"pp": 2}, "grpc"),
    ],
)
async def test_prompts_are_handed_over_between_workers_of_any_size(
    tmp_path: Path,
    tiny_model_dir: Path,
    expected: dict[tuple[int, ...], tuple[int, ...]],
    prefill: dict[str, int],
    decode: dict[str, int],
    kv_transport: str,
) -> None:
    """A block is whole, whoever computes it: what one worker computed goes on in the other one as if nothing had moved."""
    async with running_cluster(
        tmp_path,
        tiny_model_dir,
        sections={"prefill": prefill | {"max_num_batched_tokens": 24}, "decode": decode},
        dtype="float32",
        disaggregate="always",
        kv_transport=kv_transport,
    ) as cluster:
        for prompt, output_ids in expected.items():
            answer = await cluster.client.generate_text(
                prompt, max_tokens=NUM_OUTPUT_TOKENS, temperature=0, ignore_eos=True
            )
            assert answer.token_ids == output_ids
            assert answer.timeline.kv_blocks > 0
            assert answer.timeline.attempts == 1
        await cluster.until_idle()


@pytest_asyncio.fixture(loop_scope="session")
async def pair(
    tmp_path: Path, tiny_model_dir: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Cluster]:
    """Two decode workers of two processes each, so that there is always another one to go to."""
    async with running_cluster(
        tmp_path,
        tiny_model_dir,
        sections={"decode": {"stall_s": 2.0}},
        topology="0P2D",
        dtype="float32",
        **request.param,
    ) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("pair", "rank", "number"),
    [
        ({"tp": 2}, 1, signal.SIGKILL),
        ({"tp": 2}, 1, signal.SIGSTOP),
        ({"tp": 2}, 0, signal.SIGKILL),
        ({"pp": 2}, 1, signal.SIGKILL),
    ],
    indirect=["pair"],
)
async def test_a_rank_that_is_lost_takes_its_worker_down_and_no_stream(
    pair: Cluster, rank: int, number: signal.Signals
) -> None:
    """Killed, or stopped without a word: its worker ends with all of its processes, and every stream goes on elsewhere."""
    num_tokens, seen = 600, asyncio.Event()
    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(_stream(pair, index, num_tokens, seen)) for index in range(4)]
        async with asyncio.timeout(PATIENCE_S):
            await seen.wait()
        worker = await _busy(pair)
        pid = pair.local.pids[worker]
        (follower,) = children(pid)
        os.kill(follower if rank else pid, number)
    for index, answer in enumerate(answers):
        assert answer.result() == await _stream(pair, index, num_tokens, seen)
    if rank:
        assert "exited with status 1" in await pair.obituary(worker)
    await _until_gone(follower)


async def test_a_worker_that_drains_ends_its_followers(tmp_path: Path, tiny_model_dir: Path) -> None:
    """SIGTERM to all of its processes, as some supervisors send it: what is under way ends, and then they do, in peace."""
    async with running_cluster(tmp_path, tiny_model_dir, topology="0P1D", dtype="float32", tp=2) as cluster:
        seen = asyncio.Event()
        answer = asyncio.create_task(_stream(cluster, 0, 300, seen))
        await seen.wait()
        pid = cluster.local.pids["decode-0"]
        (follower,) = children(pid)
        for each in (follower, pid):
            os.kill(each, signal.SIGTERM)
        assert len(await answer) == 300
        assert "exited with status 0" in await cluster.obituary("decode-0")
        await _until_gone(follower)
        assert "follower_lost" not in cluster.logs()


async def _stream(cluster: Cluster, index: int, num_tokens: int, seen: asyncio.Event) -> list[int]:
    token_ids: list[int] = []
    events = cluster.client.generate((index, *PROMPT), max_tokens=num_tokens, temperature=0, ignore_eos=True)
    async for event in events:
        token_ids += event.delta.token_ids
        if len(token_ids) > 20:
            seen.set()
    return token_ids


async def _busy(cluster: Cluster) -> str:
    """A worker that has sequences now."""
    for worker in cluster.local.worker_addresses:
        if (await cluster.load(worker)).num_running:
            return worker
    raise AssertionError("nobody computes")


def children(pid: int) -> list[int]:
    """The processes that this one has started and that are there."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in text.split()]


async def _until_gone(pid: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while Path(f"/proc/{pid}").exists():  # noqa: ASYNC110 - another process has no event to wait for
            await asyncio.sleep(0.05)
