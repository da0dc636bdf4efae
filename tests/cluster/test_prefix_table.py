"""The prefix table in Redis: who holds which block, written by workers, read by the router, believed by nobody."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import psutil
import pytest
import pytest_asyncio
import redis.asyncio

from paceline.client import Completion
from paceline.v1 import generation_pb2, inference_pb2
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from router.hash_ring import HashRing, prompt_key, session_key
from tests.cluster.support import PATIENCE_S, Cluster, fake_tokens, running_cluster
from tests.prefix_index.conftest import EmbeddedRedis
from tests.tiny_model import VOCAB_SIZE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.thorough]

FIRST = tuple((5 * i + 1) % VOCAB_SIZE for i in range(640))
SECOND = tuple((9 * i + 2) % VOCAB_SIZE for i in range(640))


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(tmp_path: Path, tiny_tokenizer_dir: Path) -> AsyncIterator[Cluster]:
    """Two prefill workers, slow enough for two prompts to be under way together."""
    slow = {"fake_step_ms": 5, "max_num_batched_tokens": 64}
    async with running_cluster(
        tmp_path,
        tiny_tokenizer_dir,
        sections={"prefill": slow},
        runner="fake",
        disaggregate="always",
        topology="2P1D",
    ) as cluster:
        yield cluster


async def complete(cluster: Cluster, prompt: tuple[int, ...]) -> Completion:
    """A few tokens after the prompt."""
    answer = await cluster.client.generate_text(prompt, max_tokens=4, temperature=0, ignore_eos=True)
    assert answer.token_ids == fake_tokens(prompt, 4, VOCAB_SIZE, None)
    return answer


async def on_two_workers(cluster: Cluster) -> dict[str, tuple[int, ...]]:
    """Which prompt each prefill worker holds, after both have computed one."""
    answers = await asyncio.gather(complete(cluster, FIRST), complete(cluster, SECOND))
    held = {answer.prefill_worker: prompt for answer, prompt in zip(answers, (FIRST, SECOND), strict=True)}
    assert held.keys() == {"prefill-0", "prefill-1"}
    assert [answer.cached_tokens for answer in answers] == [0, 0]
    return held


async def test_a_prompt_goes_where_its_prefix_is(cluster: Cluster) -> None:
    """A repeated prefix is placed on the worker that the table names, and hits there."""
    for worker, prompt in (await on_two_workers(cluster)).items():
        await until_the_router_sees_no_load(cluster)
        answer = await complete(cluster, (*prompt, 7))
        assert (answer.prefill_worker, answer.cached_tokens) == (worker, 640)


async def test_without_the_table_the_ring_keeps_prompts_together(cluster: Cluster) -> None:
    """With Redis gone the router cannot know who holds a prefix, and all that begin with it go to one worker, where they hit."""
    for worker, prompt in (await on_two_workers(cluster)).items():
        (first, *_) = HashRing.of(["prefill-0", "prefill-1"]).walk(prompt_key(prompt, ""))
        cluster.local.kill("redis")
        await until_the_router_sees_no_load(cluster)
        answers = [await complete(cluster, (*prompt, last)) for last in (7, 8)]
        assert [answer.prefill_worker for answer in answers] == [first, first]
        assert [answer.cached_tokens for answer in answers] == [640 if worker == first else 0, 640]


async def test_a_session_stays_together(cluster: Cluster) -> None:
    """Prompts of one session, named in the call's metadata, go to the worker where its id is on the ring, whatever they are."""
    ring = HashRing.of(["prefill-0", "prefill-1"])
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        stub = InferenceServiceStub(channel)
        for number, session in enumerate(("anna", "bert", "carl", "dora")):
            for turn in range(2):
                await until_the_router_sees_no_load(cluster)
                # Nobody has seen any of them, nor do two of them begin alike.
                ids = generation_pb2.TokenIds(
                    ids=[(number + 7 * turn + 3 * i) % VOCAB_SIZE for i in range(40)]
                )
                request = inference_pb2.GenerateRequest(
                    token_ids=ids, stopping=generation_pb2.StopConditions(max_tokens=2)
                )
                call = stub.Generate(request, metadata=(("paceline-session-id", session),))
                workers = [e.prefill_done.prefill_worker async for e in call if e.HasField("prefill_done")]
                assert workers == [next(ring.walk(session_key(session, "")))]


async def until_the_router_sees_no_load(cluster: Cluster) -> None:
    """Returns when placement has nothing but the table to choose by."""
    async with asyncio.timeout(PATIENCE_S):
        while any(w.num_running + w.num_waiting for w in (await cluster.client.server_info()).workers):
            pass


async def test_entries_name_worker_and_epoch_and_expire(cluster: Cluster) -> None:
    """Each full block is one key with a TTL, its chain's first hash is the hash tag, its fields name the workers."""
    answer = await complete(cluster, FIRST)
    async with redis.asyncio.from_url(cluster.local.redis_url, decode_responses=True) as table:
        async with asyncio.timeout(PATIENCE_S):
            # The workers publish behind the answer's back.
            while set(await holders(table)) != {answer.prefill_worker, answer.decode_worker}:
                pass
        keys = [key async for key in table.scan_iter("paceline:block:*")]
        assert len(keys) == 640 // 16
        assert len({key.split("}")[0] for key in keys}) == 1
        assert all([await table.ttl(key) > 600 for key in keys])


async def holders(table: "redis.asyncio.Redis") -> list[str]:
    """The workers that every entry of the table names, once the table has an entry for each block."""
    fields = [set(map(str, await table.hkeys(key))) async for key in table.scan_iter("paceline:block:*")]
    return sorted(set.intersection(*fields)) if len(fields) == 640 // 16 else []


async def test_lies_in_the_table_cost_no_token(cluster: Cluster) -> None:
    """Entries that name dead epochs, unknown workers or garbage mislead nobody."""
    await complete(cluster, FIRST)
    async with redis.asyncio.from_url(cluster.local.redis_url, decode_responses=True) as table:
        async for key in table.scan_iter("paceline:block:*"):
            await table.delete(key)
            for field, value in (("prefill-1", "12345:3"), ("nobody", "1:1"), ("prefill-0", "garbage")):
                await table.hset(key, field, value)
    assert (await complete(cluster, (*FIRST, 8))).timeline.attempts == 1


async def test_a_redis_of_the_users_own_serves_as_well(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path
) -> None:
    """With --redis no server is started, the table is in the one that was named, and that one outlives the cluster.

    When it was restarted, and has lost everything, workers publish again what they hold. Its password is nowhere to be seen.
    """
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"), password="s3cr3t")
    try:
        async with running_cluster(
            tmp_path, tiny_tokenizer_dir, runner="fake", disaggregate="always", redis=server.url
        ) as cluster:
            assert "redis" not in cluster.local.pids
            await complete(cluster, FIRST)
            async with redis.asyncio.from_url(server.url, decode_responses=True) as table:
                async with asyncio.timeout(PATIENCE_S):
                    while set(await holders(table)) != {"prefill-0", "decode-0"}:
                        pass
            server.kill()
            server.start()
            await table_is_full_again(server.url)
            commands = [" ".join(psutil.Process(pid).cmdline()) for pid in cluster.local.pids.values()]
            assert not any("s3cr3t" in shown for shown in (*commands, cluster.logs()))
        async with redis.asyncio.from_url(server.url) as table:
            assert await table.ping()
    finally:
        server.kill()


async def test_a_flushed_table_is_filled_again(cluster: Cluster) -> None:
    """What workers hold comes back into a table that was emptied, though nothing new is computed."""
    await complete(cluster, FIRST)
    await table_is_full_again(cluster.local.redis_url)
    async with redis.asyncio.from_url(cluster.local.redis_url) as table:
        await table.flushall()
    await table_is_full_again(cluster.local.redis_url)


async def table_is_full_again(url: str) -> None:
    """Returns when a prefill and a decode worker are named for every block of FIRST."""
    async with redis.asyncio.from_url(url, decode_responses=True) as table, asyncio.timeout(PATIENCE_S):
        while len(await holders(table)) != 2:
            pass
