"""The length of a request and the memory for its KV, as they are set on the command line of a whole cluster."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from paceline.client_error import PacelineRpcError
from paceline.core.errors import ProcessLostError
from paceline.launcher.capacity import capacity_lines
from tests.cluster.support import Cluster, fake_tokens, running_cluster
from tests.tiny_model import VOCAB_SIZE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.thorough]

MAX_MODEL_LEN = 100
# Memory decides, not the number of blocks that test clusters have otherwise.
BY_MEMORY = {"num_blocks": 0}
SECTIONS = {"prefill": BY_MEMORY, "decode": {**BY_MEMORY, "max_num_seqs": 10}}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path
) -> AsyncIterator[Cluster]:
    """A cluster whose requests have at most 100 tokens."""
    async with running_cluster(
        tmp_path_factory.mktemp("limits"),
        tiny_tokenizer_dir,
        sections=SECTIONS,
        runner="fake",
        disaggregate="always",
        max_model_len=MAX_MODEL_LEN,
    ) as cluster:
        yield cluster


def loaded(cluster: Cluster, worker: str) -> dict[str, Any]:
    """What a worker logged when its model was loaded."""
    lines = (cluster.local.log_dir / f"{worker}.log").read_text(encoding="utf-8").splitlines()
    events: list[dict[str, Any]] = [json.loads(line) for line in lines if line.startswith("{")]
    return next(event for event in events if event["event"] == "model_loaded")


async def test_a_prompt_over_the_limit_is_refused_with_both_numbers(cluster: Cluster) -> None:
    """PROMPT_TOO_LONG says how long the prompt is and how long it may be, in its facts and in its sentence."""
    with pytest.raises(PacelineRpcError) as caught:
        await cluster.client.generate_text((9,) * MAX_MODEL_LEN)
    error = caught.value
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG")
    assert error.facts == {"limit": "99", "given": "100", "unit": "tokens"}
    assert "has 100 tokens" in error.message
    assert "the limit is 99" in error.message


async def test_a_request_that_fills_the_limit_is_served(cluster: Cluster) -> None:
    """Prompt and output together may have all of the tokens, and not one more."""
    prompt = (9,) * 90
    answer = await cluster.client.generate_text(prompt, temperature=0, ignore_eos=True)
    assert answer.token_ids == fake_tokens(prompt, 10, VOCAB_SIZE, None)
    with pytest.raises(PacelineRpcError, match="90 tokens 10 fit"):
        await cluster.client.generate_text(prompt, max_tokens=11)


async def test_blocks_are_for_as_many_sequences_as_can_run(cluster: Cluster) -> None:
    """A worker takes 7 blocks for each sequence of 100 tokens, out of memory for millions."""
    info = await cluster.client.server_info()
    assert info.limits.max_model_tokens == MAX_MODEL_LEN
    assert {worker.worker_id: worker.num_blocks for worker in info.workers} == {
        "prefill-0": 448,
        "decode-0": 70,
    }


async def test_what_is_held_is_said_at_start(cluster: Cluster) -> None:
    """Log and launcher name blocks, tokens and requests at once: the shorter limit, where requests are shorter."""
    event = loaded(cluster, "decode-0")
    assert (event["num_blocks"], event["num_kv_tokens"], event["num_2k_requests"]) == (70, 1000, 10)
    assert event["kv_bytes"] == 70 * event["block_bytes"]
    lines = await capacity_lines(cluster.local.worker_addresses, cluster.local.channels())
    assert lines[1] == "  decode-0: 70 KV blocks (8.75 KiB), 1,000 tokens, 10 requests of 100 at once"
    assert lines[2].startswith(
        "  longest request: 100 tokens, prompt and output together; the model could take 2,048"
    )


async def test_a_context_that_memory_does_not_hold_is_lowered_and_said(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    """The cluster's memory is split; a worker whose share holds no longest request says so, and the router knows."""
    async with running_cluster(
        tmp_path, tiny_tokenizer_dir, sections=SECTIONS, runner="fake", kv_memory=f"{2 * 20 * 128}B"
    ) as cluster:
        info = await cluster.client.server_info()
        assert info.limits.max_model_tokens == 20 * 16
        assert [worker.num_blocks for worker in info.workers] == [20, 20]
        assert cluster.logs().count('"context_lowered"') == 2


async def test_a_limit_that_memory_does_not_hold_ends_the_start(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    """When the limit was asked for, the cluster does not start with less; the error has the numbers."""
    options: dict[str, Any] = {
        "sections": SECTIONS,
        "runner": "fake",
        "max_model_len": 400,
        "kv_memory": f"{2 * 20 * 128}B",
    }
    with pytest.raises(ProcessLostError, match=r"one request of --max-model-len 400 needs 25 .* to 320"):
        async with asyncio.timeout(60), running_cluster(tmp_path, tiny_tokenizer_dir, **options):
            raise AssertionError("it must not come up")
