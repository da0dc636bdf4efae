"""Pinned prefixes of a whole cluster of real processes."""

import asyncio
import json
from pathlib import Path

import pytest

from paceline.core.errors import ProcessLostError
from tests.cluster.scraping import moved, scrape, series
from tests.cluster.support import Cluster, fake_tokens, running_cluster
from tests.tiny_model import VOCAB_SIZE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.thorough]

PINNED = tuple(range(100, 164))  # 4 blocks of 16
TWIN = tuple(range(200, 264))
SMALL = {"num_blocks": 40}


async def cached_tokens(cluster: Cluster, prompt: tuple[int, ...]) -> int:
    """How much of a prompt its prefill finds; the output is what it always is."""
    answer = await cluster.client.generate_text(prompt, max_tokens=3, temperature=0, ignore_eos=True)
    assert answer.token_ids == fake_tokens(prompt, 3, VOCAB_SIZE, None)
    return answer.cached_tokens


async def test_every_worker_keeps_them(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """From the first request on and after pressure the pinned prefix is hit; its twin, asked for as often, is not."""
    file = tmp_path / "pinned.jsonl"
    file.write_text(json.dumps({"token_ids": PINNED}))
    async with running_cluster(
        tmp_path,
        tiny_tokenizer_dir,
        sections={"prefill": SMALL, "decode": SMALL},
        runner="fake",
        disaggregate="always",
        max_model_len=400,
        pinned_prefixes=str(file),
    ) as cluster:
        for worker in ("prefill-0", "decode-0"):
            assert (await scrape(cluster, worker))[series("kv_pinned_blocks")] == 4
        assert await cached_tokens(cluster, (*PINNED, 1)) == len(PINNED)
        assert await cached_tokens(cluster, (*TWIN, 1)) == 0
        assert await cached_tokens(cluster, (*TWIN, 1)) == len(TWIN)
        for number in range(300, 304):
            await cached_tokens(cluster, (number,) * 350)
        before = await scrape(cluster, "prefill-0")
        assert await cached_tokens(cluster, (*PINNED, 1)) == len(PINNED)
        middle = await scrape(cluster, "prefill-0")
        assert await cached_tokens(cluster, (*TWIN, 1)) == 0
        after = await scrape(cluster, "prefill-0")
        assert moved(before, middle, "kv_hit_blocks_total") == 4
        assert moved(middle, after, "kv_hit_blocks_total") == 0
        await cluster.until("prefill-0", lambda load: load.num_free_blocks == SMALL["num_blocks"] - 4)


async def test_a_file_that_cannot_be_pinned_ends_the_start(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """The worker's one line says which setting and what to do, and the cluster does not come up."""
    file = tmp_path / "pinned.jsonl"
    file.write_text(json.dumps({"token_ids": [VOCAB_SIZE] * 16}))
    with pytest.raises(ProcessLostError, match=rf"--pinned-prefixes: token {VOCAB_SIZE} is outside"):
        async with (
            asyncio.timeout(60),
            running_cluster(tmp_path, tiny_tokenizer_dir, runner="fake", pinned_prefixes=str(file)),
        ):
            raise AssertionError("it must not come up")
