"""What a request leaves behind in the processes of a cluster: nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from paceline.v1 import generation_pb2, inference_pb2
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from tests.cluster.scraping import moved, scrape, series
from tests.cluster.support import Cluster, fake_tokens, random_prompts, running_cluster
from tests.tiny_model import EOS_ID, VOCAB_SIZE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

NUM_WARM_UP, NUM_MORE = 2000, 8000
NUM_AT_ONCE = 16
# A process that kept half a kilobyte of each request would pass it; its allocator's own ups and downs are a tenth of it.
MAX_GROWTH_BYTES = NUM_MORE * 512
# A connection that takes no more than it has to.
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))
NUM_STUCK, NUM_LONG = 40, 1900


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


async def test_clients_that_do_not_read_cost_little_more_than_their_buffers(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    """Forty of them ask for more than a hundred megabytes; the router holds a sixth of it at most, and serves others meanwhile."""
    settings = {"router": {"max_buffered_events": 64, "max_unread_s": 5, "max_delay_s": 0}}
    async with (
        running_cluster(
            tmp_path, tiny_tokenizer_dir, sections=settings, runner="fake", disaggregate="never"
        ) as cluster,
        AsyncExitStack() as stack,
    ):
        await serve(cluster, 200, seed=3)
        before = (await resident_bytes(cluster))["router"]
        begun, most = await scrape(cluster, "router"), 0
        for number in range(NUM_STUCK):
            await stack.enter_async_context(stuck_client(cluster, number))
            most = max(most, router_bytes(cluster))
        while (await scrape(cluster, "router"))[series("requests_active")]:
            answer = await cluster.client.generate_text((1, 2, 3), max_tokens=4, temperature=0)
            assert answer.token_ids == fake_tokens((1, 2, 3), 4, VOCAB_SIZE, EOS_ID)
            most = max(most, router_bytes(cluster))
        ended = await scrape(cluster, "router")
        await cluster.until_idle()
    assert moved(begun, ended, "requests_total", end="SLOW_CONSUMER") == NUM_STUCK
    assert most - before < NUM_STUCK * NUM_LONG * 4 * 400 / 6


@asynccontextmanager
async def stuck_client(cluster: Cluster, number: int) -> AsyncIterator[None]:
    """Asks for four long answers with many log probabilities, and reads nothing after the first event."""
    request = inference_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=[number, 7, 7]),
        n=4,
        stopping=generation_pb2.StopConditions(max_tokens=NUM_LONG, ignore_eos=True),
        logprobs=generation_pb2.LogprobOptions(num_top=20),
    )
    async with grpc.aio.insecure_channel(cluster.address, options=NARROW) as channel:
        call: Any = InferenceServiceStub(channel).Generate(request)
        await call.read()
        yield


def router_bytes(cluster: Cluster) -> int:
    """What the router holds now."""
    return int(psutil.Process(cluster.local.pids["router"]).memory_info().rss)


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
