"""A conversation computes each of its blocks once in the whole cluster, and moves each once to whoever lacks it."""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from paceline.client import Completion
from tests.cluster.scraping import scrape, series
from tests.cluster.support import PATIENCE_S, Cluster, fake_tokens, running_cluster
from tests.tiny_model import VOCAB_SIZE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.thorough]

BLOCK_SIZE = 16
NUM_TURNS = 10
NUM_OUTPUT = 37
NUM_SAID = 29


def chatting(
    tmp_path: Path, model: Path, topology: str, *, both: dict[str, Any], max_model_len: int = 0
) -> AbstractAsyncContextManager[Cluster]:
    """A cluster of fake runners that hands every prompt over; `both` are settings of workers of either tier."""
    return running_cluster(
        tmp_path,
        model,
        sections={"prefill": both, "decode": both},
        runner="fake",
        disaggregate="always",
        topology=topology,
        max_model_len=max_model_len,
    )


async def turn(cluster: Cluster, prompt: tuple[int, ...]) -> Completion:
    """One answer, which is the oracle's."""
    answer = await cluster.client.generate_text(prompt, max_tokens=NUM_OUTPUT, temperature=0, ignore_eos=True)
    assert answer.token_ids == fake_tokens(prompt, NUM_OUTPUT, VOCAB_SIZE, None)
    return answer


async def until_published(cluster: Cluster, worker: str, num_blocks: int) -> None:
    """The workers publish behind the answer's back: returns when the table says that a worker holds so many blocks."""
    async with redis.asyncio.from_url(cluster.local.redis_url, decode_responses=True) as table:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                keys = [key async for key in table.scan_iter("paceline:block:*")]
                if sum([await table.hexists(key, worker) for key in keys]) >= num_blocks:
                    return


async def num_computed(cluster: Cluster) -> float:
    """Tokens that all workers have computed so far."""
    pages = [await scrape(cluster, worker) for worker in cluster.local.worker_addresses]
    return sum(page[series("step_tokens_sum")] for page in pages)


@pytest.mark.parametrize("topology", ["1P1D", "2P1D"])
async def test_each_block_of_a_chat_is_computed_once_and_sent_once(
    tmp_path: Path, tiny_tokenizer_dir: Path, topology: str
) -> None:
    """Ten turns: a turn computes its new tokens and less than a block again; prefill pulls only what decode has generated."""
    async with chatting(tmp_path, tiny_tokenizer_dir, topology, both={"prefix_pull": "always"}) as cluster:
        prompt = tuple((7 * i + 3) % VOCAB_SIZE for i in range(NUM_SAID))
        # Full blocks that decode holds, and prefill, before a turn.
        num_at_decode = num_at_prefill = num_pulled = 0
        for number in range(NUM_TURNS):
            answer = await turn(cluster, prompt)
            assert answer.cached_tokens == num_at_decode * BLOCK_SIZE
            assert answer.timeline.prefix_blocks == num_at_decode - num_at_prefill
            assert answer.timeline.kv_blocks == -(-len(prompt) // BLOCK_SIZE) - num_at_decode
            num_pulled += answer.timeline.prefix_blocks
            num_at_prefill = len(prompt) // BLOCK_SIZE
            # The last token is no prompt's, and so is never computed.
            num_at_decode = (len(prompt) + NUM_OUTPUT - 1) // BLOCK_SIZE
            await until_published(cluster, "decode-0", num_at_decode)
            prompt += answer.token_ids + tuple((11 * i + number) % VOCAB_SIZE for i in range(NUM_SAID))
        num_known = len(prompt) - NUM_SAID - 1
        assert num_pulled > 10
        assert num_known <= await num_computed(cluster) <= num_known + (NUM_TURNS - 1) * (BLOCK_SIZE + 1)
        await cluster.until_idle()


async def test_without_pulls_a_chat_computes_its_answers_again(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    """The other half of the proof: with --prefix-pull never the prefill worker computes what decode has generated."""
    async with chatting(tmp_path, tiny_tokenizer_dir, "1P1D", both={"prefix_pull": "never"}) as cluster:
        prompt = tuple((7 * i + 3) % VOCAB_SIZE for i in range(NUM_SAID))
        first = await turn(cluster, prompt)
        await until_published(cluster, "decode-0", (len(prompt) + NUM_OUTPUT - 1) // BLOCK_SIZE)
        second = await turn(cluster, (*prompt, *first.token_ids, 1, 2, 3))
        assert second.timeline.prefix_blocks == 0
        assert second.cached_tokens == len(prompt) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.slow
async def test_chats_go_on_whatever_is_stopped_and_killed(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Six chats at a time pull each other's blocks both ways, in small pools; a worker of each tier is stopped, and one killed."""
    narrow = {"prefix_pull": "always", "fake_step_ms": 1, "num_blocks": 80}
    async with chatting(tmp_path, tiny_tokenizer_dir, "2P2D", max_model_len=640, both=narrow) as cluster:
        pids = cluster.local.pids
        # After so many answers.
        plan: dict[int, Callable[[], object]] = {
            6: lambda: os.kill(pids["prefill-1"], signal.SIGSTOP),
            9: lambda: os.kill(pids["prefill-1"], signal.SIGCONT),
            12: lambda: os.kill(pids["decode-1"], signal.SIGSTOP),
            14: lambda: os.kill(pids["decode-1"], signal.SIGCONT),
            18: lambda: cluster.local.kill("decode-1"),
            24: lambda: cluster.local.kill("prefill-0"),
        }
        answers: list[Completion] = []

        async def chat(number: int) -> None:
            """Six turns."""
            prompt = tuple((7 * i + number) % VOCAB_SIZE for i in range(NUM_SAID))
            for _ in range(6):
                answer = await turn(cluster, prompt)
                answers.append(answer)
                plan.get(len(answers), lambda: None)()
                prompt += answer.token_ids + tuple((11 * i + number) % VOCAB_SIZE for i in range(NUM_SAID))

        await asyncio.gather(*map(chat, range(6)))
        assert len(answers) == 36
        assert sum(answer.timeline.prefix_blocks for answer in answers) > 0
        assert any(answer.timeline.attempts > 1 for answer in answers)
