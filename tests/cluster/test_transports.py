"""How blocks pass between real processes: through shared memory, or over gRPC where that is forced."""

import asyncio
import importlib.util
from pathlib import Path

import pytest

from paceline.core.errors import ProcessLostError
from tests.cluster.scraping import Scrape, moved, scrape, series
from tests.cluster.support import Cluster, fake_tokens, is_idle, random_prompts, running_cluster
from tests.tiny_model import EOS_ID, VOCAB_SIZE

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def _serve(cluster: Cluster, seed: int, num_requests: int = 12) -> None:
    """Some requests at once, each of which has the oracle's tokens."""

    async def ask(prompt: tuple[int, ...]) -> None:
        """One of them."""
        answer = await cluster.client.generate_text(prompt, max_tokens=6, temperature=0)
        assert answer.token_ids == fake_tokens(prompt, 6, VOCAB_SIZE, EOS_ID)

    async with asyncio.TaskGroup() as clients:
        for prompt in random_prompts(seed, num_requests, 120, VOCAB_SIZE):
            clients.create_task(ask(prompt))


async def test_blocks_pass_through_shared_memory(idle_fake_cluster: Cluster) -> None:
    """All hand-overs of a cluster on one host do so, and the tokens are right."""
    before = await scrape(idle_fake_cluster, "decode-0")
    await _serve(idle_fake_cluster, seed=41)
    after = await scrape(idle_fake_cluster, "decode-0")
    assert moved(before, after, "kv_transport_pulls_total", transport="shm") >= 12
    assert moved(before, after, "kv_transport_pulls_total", transport="grpc") == 0
    num_bytes = moved(before, after, "kv_transport_bytes_total", transport="shm")
    assert num_bytes == 16 * 8 * moved(before, after, "kv_pulled_blocks_total")


async def test_grpc_can_be_forced(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Then no block passes in another way."""
    async with running_cluster(
        tmp_path, tiny_tokenizer_dir, runner="fake", disaggregate="always", kv_transport="grpc"
    ) as cluster:
        await _serve(cluster, seed=42)
        found = await scrape(cluster, "decode-0")
        assert _pulls(found, "grpc") >= 12
        assert _pulls(found, "shm") == 0
        assert "kv_transport_fallback" not in cluster.logs()


def _pulls(found: Scrape, transport: str) -> float:
    return found[series("kv_transport_pulls_total", transport=transport)]


async def test_nixl_can_be_forced(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Where it is installed; every block passes by it, and the tokens are right."""
    pytest.importorskip("nixl_cu12", reason="NIXL is an optional extra, and is not installed")
    async with running_cluster(
        tmp_path, tiny_tokenizer_dir, runner="fake", disaggregate="always", kv_transport="nixl"
    ) as cluster:
        await _serve(cluster, seed=43)
        found = await scrape(cluster, "decode-0")
        assert _pulls(found, "nixl") >= 12
        assert _pulls(found, "grpc") == 0
        await cluster.until_idle()
        assert "kv_transport_fallback" not in cluster.logs()


@pytest.mark.slow
async def test_nixl_outlives_a_killed_owner(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Requests whose prefill worker is killed go on with the other one; in the end no block is held by anybody."""
    pytest.importorskip("nixl_cu12", reason="NIXL is an optional extra, and is not installed")
    async with running_cluster(
        tmp_path,
        tiny_tokenizer_dir,
        sections={"prefill": {"fake_step_ms": 20, "max_num_batched_tokens": 32}},
        runner="fake",
        disaggregate="always",
        topology="2P1D",
        kv_transport="nixl",
    ) as cluster:
        serving = asyncio.create_task(_serve(cluster, seed=44, num_requests=40))
        await cluster.until("decode-0", lambda load: load.num_blocks_pulled > 20)
        cluster.local.kill("prefill-0")
        await serving
        for worker in ("decode-0", "prefill-1"):
            await cluster.until(worker, is_idle)
        await _serve(cluster, seed=45)
        assert _pulls(await scrape(cluster, "decode-0"), "grpc") == 0


async def test_a_way_that_is_not_there_is_refused_at_start(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """The message says which, and what to do."""
    if importlib.util.find_spec("nixl_cu12") is not None:
        pytest.skip("NIXL is installed here")
    with pytest.raises(ProcessLostError, match="--kv-transport nixl"):
        async with running_cluster(tmp_path, tiny_tokenizer_dir, runner="fake", kv_transport="nixl"):
            pass
