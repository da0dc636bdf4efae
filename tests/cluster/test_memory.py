"""What a request leaves behind in the processes of a cluster: nothing."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest

from tests.cluster.support import Cluster, fake_tokens, random_prompts, running_cluster
from tests.tiny_model import EOS_ID, VOCAB_SIZE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

NUM_WARM_UP, NUM_MORE = 2000, 8000
NUM_AT_ONCE = 16
# A process that kept half a kilobyte of each request would pass it; its allocator's own ups and downs are a tenth of it.
MAX_GROWTH_BYTES = NUM_MORE * 512


async def test_memory_stays_flat_over_ten_thousand_requests(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """After a warm-up, 8,000 short requests add less to any process than half a kilobyte each, and hold nothing."""
    async with running_cluster(tmp_path, tiny_tokenizer_dir, runner="fake", disaggregate="always") as cluster:
        await serve(cluster, NUM_WARM_UP, seed=1)
        before = await resident_bytes(cluster)
        await serve(cluster, NUM_MORE, seed=2)
        after = await resident_bytes(cluster)
    grown = {name: after[name] - before[name] for name in before}
    assert grown.keys() == {"redis", "prefill-0", "decode-0", "router"}
    assert max(grown.values()) < MAX_GROWTH_BYTES, grown


async def serve(cluster: Cluster, num_requests: int, *, seed: int) -> None:
    """Short prompts, some with a common beginning, a few at once; every twentieth client leaves early."""
    prompts = enumerate(random_prompts(seed, num_requests, 60, VOCAB_SIZE))

    async def client() -> None:
        """One of those who ask, one request after the other."""
        for number, prompt in prompts:
            if number % 20 == 0:
                await leave_early(cluster, prompt)
                continue
            answer = await cluster.client.generate_text(prompt, max_tokens=4, temperature=0)
            assert answer.token_ids == fake_tokens(prompt, 4, VOCAB_SIZE, EOS_ID)

    async with asyncio.TaskGroup() as clients:
        for _ in range(NUM_AT_ONCE):
            clients.create_task(client())


async def leave_early(cluster: Cluster, prompt: tuple[int, ...]) -> None:
    """Reads the first event of an answer."""
    async with aclosing(cluster.client.generate(prompt, max_tokens=50, temperature=0)) as events:
        await anext(events)


async def resident_bytes(cluster: Cluster) -> dict[str, int]:
    """What each process holds of the machine's memory once nothing is under way any more."""
    await cluster.until_idle()
    return {name: psutil.Process(pid).memory_info().rss for name, pid in cluster.local.pids.items()}
