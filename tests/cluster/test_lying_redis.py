"""A prefix table that lies in every way that we could think of: no token changes, no request hangs, no memory is lost."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from tests.cluster.support import PATIENCE_S, Cluster, fake_tokens, random_prompts, running_cluster
from tests.prefix_index.liar import HONEST, LIES, LyingRedis
from tests.tiny_model import VOCAB_SIZE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.thorough]

MAX_GROWTH_BYTES = 64 << 20


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def liar() -> AsyncIterator[tuple[LyingRedis, str]]:
    """A server that lies when told to, and its URL."""
    server = LyingRedis()
    async with server.listening() as url:
        yield server, url


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster(
    liar: tuple[LyingRedis, str], tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path
) -> AsyncIterator[Cluster]:
    """Two prefill workers and a decode worker whose prefix table it is; whatever it says of others is followed."""
    server, url = liar
    pulling = {"prefix_pull": "always"}
    async with running_cluster(
        tmp_path_factory.mktemp("lied-to"),
        tiny_tokenizer_dir,
        sections={"router": {"lookup_budget_s": 0.1}, "prefill": pulling, "decode": pulling},
        runner="fake",
        disaggregate="always",
        topology="2P1D",
        redis=url,
    ) as cluster:
        yield cluster
        server.mood = HONEST


@pytest.mark.parametrize("lie", LIES)
async def test_no_lie_changes_a_token_or_holds_a_request(
    liar: tuple[LyingRedis, str], cluster: Cluster, lie: str
) -> None:
    """While the table is asked and lies, every request gets the oracle's tokens, in the end also with the lie at work."""
    server, _ = liar
    server.mood = HONEST
    await complete(cluster, seed=1)
    resident = resident_bytes(cluster)
    server.mood, before = lie, server.num_lies
    async with asyncio.timeout(PATIENCE_S):
        # A breaker that is still open from the last lie keeps the router from asking; it tries again each second.
        while server.num_lies < before + 3:
            await complete(cluster, seed=3 + server.num_lies)
        await complete(cluster, seed=2)
    grown = {name: number - resident[name] for name, number in resident_bytes(cluster).items()}
    assert max(grown.values()) < MAX_GROWTH_BYTES, grown
    await cluster.until_idle()


async def complete(cluster: Cluster, *, seed: int) -> None:
    """A few prompts at once, some of which begin alike."""
    prompts = random_prompts(seed, 6, 200, VOCAB_SIZE)
    answers = await asyncio.gather(
        *(
            cluster.client.generate_text(each, max_tokens=4, temperature=0, ignore_eos=True)
            for each in prompts
        )
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == fake_tokens(prompt, 4, VOCAB_SIZE, None)


def resident_bytes(cluster: Cluster) -> dict[str, int]:
    """What each process holds of the machine's memory."""
    return {name: psutil.Process(pid).memory_info().rss for name, pid in cluster.local.pids.items()}
