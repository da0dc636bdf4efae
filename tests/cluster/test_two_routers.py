"""Two routers before the same workers, found by what workers register: they agree, share limits, and neither needs the other."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis

from paceline.client import Completion, PacelineClient
from paceline.client_error import PacelineRpcError
from paceline.v1 import inference_pb2, worker_pb2
from paceline.v1.worker_pb2_grpc import WorkerServiceStub
from router.hash_ring import HashRing, prompt_key
from tests.cluster.support import PATIENCE_S, Cluster, another_worker, fake_tokens, running_cluster
from tests.cluster.test_tenants import ACME, tenants_file
from tests.prefix_index.conftest import EmbeddedRedis
from tests.tiny_model import VOCAB_SIZE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.thorough]

PROMPT = tuple((3 * i + 1) % VOCAB_SIZE for i in range(320))
NUM_TOKENS = 200
SLOW_STEPS = {"fake_step_ms": 5}
Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Pair:
    """A cluster with two routers, a client of each, and a Redis that can be killed and started again."""

    cluster: Cluster
    clients: tuple[PacelineClient, PacelineClient]
    redis: EmbeddedRedis

    async def workers(self) -> list[list[str]]:
        """Whom each router sees."""
        infos = [await client.server_info() for client in self.clients]
        return [sorted(worker.worker_id for worker in info.workers) for info in infos]

    async def until_workers(self, *names: str) -> None:
        """Returns when both routers see exactly these."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.workers() != [sorted(names)] * 2:  # noqa: ASYNC110 - other processes have no event
                await asyncio.sleep(0.05)

    async def until_no_load(self) -> None:
        """Returns when no router knows of anything that a worker has to do."""
        async with asyncio.timeout(PATIENCE_S):
            for client in self.clients:
                while any(
                    each.num_running + each.num_waiting for each in (await client.server_info()).workers
                ):
                    pass


ALL = ("decode-0", "decode-1", "prefill-0", "prefill-1")


@asynccontextmanager
async def pair(
    tmp_path: Path, model: Path, *, sections: Sections | None = None, **options: Any
) -> AsyncIterator[Pair]:
    """Two routers before 2P2D."""
    folder = tmp_path / "redis"
    folder.mkdir()
    redis = EmbeddedRedis(folder)
    options = {"topology": "2P2D", "disaggregate": "always", "routers": 2, "discovery": "redis"} | options
    key = ACME if "tenants" in options else None
    try:
        async with running_cluster(
            tmp_path, model, sections=sections, runner="fake", redis=redis.url, **options
        ) as cluster:
            one, two = cluster.local.router_addresses
            async with PacelineClient(one, api_key=key) as first, PacelineClient(two, api_key=key) as second:
                yield Pair(cluster, (first, second), redis)
    finally:
        redis.kill()


async def complete(
    client: PacelineClient, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 4, **options: Any
) -> Completion:
    """The oracle's tokens."""
    answer = await client.generate_text(
        prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True, **options
    )
    assert answer.token_ids == fake_tokens(prompt, max_tokens, VOCAB_SIZE, None)
    return answer


async def begun(client: PacelineClient) -> tuple["asyncio.Task[list[int]]", inference_pb2.Accepted]:
    """A long request that has its first tokens; the task gives all of them."""
    has_begun: asyncio.Queue[inference_pb2.Accepted] = asyncio.Queue()

    async def read() -> list[int]:
        """All tokens."""
        tokens: list[int] = []
        accepted = inference_pb2.Accepted()
        async for event in client.generate(
            PROMPT, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, client_request_id="the same"
        ):
            accepted.MergeFrom(event.accepted)
            tokens += event.delta.token_ids
            if len(tokens) > 3:
                has_begun.put_nowait(accepted)
        return tokens

    task = asyncio.create_task(read())
    async with asyncio.timeout(PATIENCE_S):
        return task, await has_begun.get()


async def end_well(*streams: "asyncio.Task[list[int]]") -> None:
    """Each has the oracle's tokens."""
    wanted = list(fake_tokens(PROMPT, NUM_TOKENS, VOCAB_SIZE, None))
    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.gather(*streams) == [wanted] * len(streams)


def cold_prompts(count: int) -> list[tuple[int, ...]]:
    """Prompts that begin differently."""
    return [tuple((number + (number % 7 + 1) * i) % VOCAB_SIZE for i in range(48)) for number in range(count)]


async def test_routers_agree_on_where_a_prompt_belongs(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """A prompt that nobody has goes to the same workers through either; what one router had computed is a hit through the other."""
    async with pair(tmp_path, tiny_tokenizer_dir) as both:
        assert await both.workers() == [list(ALL)] * 2
        rings = [HashRing.of([f"{tier}-0", f"{tier}-1"]) for tier in ("prefill", "decode")]
        for prompt in cold_prompts(8):
            for client in both.clients:
                await both.until_no_load()
                answer = await complete(client, prompt, bypass_cache=True)
                owners = [next(ring.walk(prompt_key(prompt, ""))) for ring in rings]
                assert [answer.prefill_worker, answer.decode_worker] == owners
        first, second = both.clients
        computed = await complete(first)
        assert computed.cached_tokens == 0
        await both.until_no_load()
        async with asyncio.timeout(PATIENCE_S):
            # Workers publish behind the answer's back, so that the first ones may find less, but never on another worker.
            while (again := await complete(second, (*PROMPT, 7))).cached_tokens < 320:
                assert again.prefill_worker == computed.prefill_worker
        assert again.prefill_worker == computed.prefill_worker


async def test_what_one_router_gives_up_the_other_keeps(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """The same request through both, one of which is cancelled again and again: no id of one is taken for one of the other's."""
    slow = {"prefill": SLOW_STEPS, "decode": SLOW_STEPS}
    async with pair(tmp_path, tiny_tokenizer_dir, sections=slow, topology="1P1D") as both:
        first, second = both.clients
        kept, accepted = await begun(second)
        for _ in range(5):
            given_up, other = await begun(first)
            assert other.request_id != accepted.request_id
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
        await end_well(kept)
        await both.cluster.until_idle()


async def test_routers_share_a_tenants_rate_and_slots(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """64 clients of two routers get no more than the burst and what time adds; without Redis each gives its share, and less at once."""
    file = tenants_file(tmp_path, "requests_per_minute = 6\nburst_requests = 20\nmax_concurrent = 2")
    router = {"limiter_budget_s": 20.0}
    async with pair(tmp_path, tiny_tokenizer_dir, sections={"router": router}, tenants=str(file)) as both:
        before_s = time.monotonic()
        reasons: list[str] = []

        async def ask(number: int) -> None:
            """Until it is served, or hears that the rate is used up."""
            while True:
                try:
                    await complete(both.clients[number % 2])
                except PacelineRpcError as error:
                    if error.reason == "QUEUE_FULL":
                        continue
                    reasons.append(error.reason)
                else:
                    reasons.append("")
                return

        await asyncio.gather(*(ask(number) for number in range(64)))
        added = (time.monotonic() - before_s) * 6 / 60
        assert set(reasons) == {"", "RATE_LIMITED"}
        assert 20 <= reasons.count("") <= 20 + added
        # Three a minute each, and none at once but the first one that Redis does not decide.
        both.redis.kill()
        for client in both.clients:
            await complete(client)
            for _ in range(3):
                with pytest.raises(PacelineRpcError) as caught:
                    await complete(client)
                assert caught.value.reason == "RATE_LIMITED"
            assert (await client.server_info()).limiter_mode == "strict"
        await both.cluster.until_idle()


async def test_a_killed_router_takes_nothing_with_it(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """The other one's streams go on, workers get their blocks back, and the slots that it held are free once their leases end."""
    file = tenants_file(tmp_path, "max_concurrent = 2")
    sections: Sections = {"router": {"limiter_budget_s": 20.0}, "decode": SLOW_STEPS}
    async with pair(tmp_path, tiny_tokenizer_dir, sections=sections, tenants=str(file)) as both:
        first, second = both.clients
        (lost, _), (kept, _) = await begun(first), await begun(second)
        both.cluster.local.kill("router-0")
        with pytest.raises(PacelineRpcError) as caught:
            await lost
        assert caught.value.code == grpc.StatusCode.UNAVAILABLE
        # Its slot is still held: by the one that is lost.
        with pytest.raises(PacelineRpcError) as caught:
            await complete(second)
        assert caught.value.reason == "QUEUE_FULL"
        await end_well(kept)
        await both.cluster.until_idle()
        other, _ = await begun(second)
        async with Redis.from_url(both.redis.url, decode_responses=True) as table:
            (slots,) = [key async for key in table.scan_iter("paceline:slots:*")]
            held = [str(slot) for slot in await table.zrange(slots, 0, -1)]
            # Half a minute later: what nobody has renewed since has ended first.
            assert (len(held), 0 < await table.ttl(slots) <= 30) == (2, True)
            await table.zadd(str(slots), {held[0]: 1})
        await complete(second)
        await end_well(other)


async def test_redis_may_go_and_come_back(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Killed: streams go on, requests are served through both routers, nobody is forgotten. Started again, empty: the workers are in it again, and so is one that came meanwhile."""
    async with pair(tmp_path, tiny_tokenizer_dir, sections={"decode": SLOW_STEPS}) as both:
        streams = [(await begun(client))[0] for client in both.clients]
        both.redis.kill()
        for client in both.clients:
            await complete(client)
        await end_well(*streams)
        async with another_worker(both.cluster, "decode-2"):
            for client in both.clients:
                await complete(client)
            assert await both.workers() == [list(ALL)] * 2
            both.redis.start()
            await both.until_workers(*ALL, "decode-2")
            async with Redis.from_url(both.redis.url) as table, asyncio.timeout(PATIENCE_S):
                for key, count in (("paceline:workers:prefill", 2), ("paceline:workers:decode", 3)):
                    while await table.hlen(key) != count:
                        pass
                    assert 0 < await table.ttl(key) <= 15
            for client in both.clients:
                await complete(client)
        await both.until_workers(*ALL)


async def test_redis_may_be_silent_or_forget(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Paused or flushed: streams go on, requests are served, nobody is forgotten."""
    sections: Sections = {"router": {"lookup_budget_s": 0.05}, "decode": SLOW_STEPS}
    async with pair(tmp_path, tiny_tokenizer_dir, sections=sections) as both:
        streams = [(await begun(client))[0] for client in both.clients]
        both.redis.pause()
        for client in both.clients:
            await complete(client)
        assert await both.workers() == [list(ALL)] * 2
        both.redis.resume()
        async with Redis.from_url(both.redis.url) as table:
            await table.flushall()
            for client in both.clients:
                await complete(client)
            assert await both.workers() == [list(ALL)] * 2
            await end_well(*streams)
            async with asyncio.timeout(PATIENCE_S):
                while await table.hlen("paceline:workers:decode") != 2:
                    pass
        assert await both.workers() == [list(ALL)] * 2


async def test_one_more_worker_takes_its_share_of_the_prompts(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    """Through both routers a third of the prompts goes to the third worker, and all others stay where they were; when it ends they go back."""
    prompts = cold_prompts(60)
    async with pair(tmp_path, tiny_tokenizer_dir, disaggregate="never", topology="0P2D") as both:

        async def owners() -> list[str]:
            """Where each prompt goes, asked through one router or the other."""
            names = []
            for number, prompt in enumerate(prompts):
                await both.until_no_load()
                client = both.clients[number % 2]
                names.append((await complete(client, prompt, max_tokens=1, bypass_cache=True)).decode_worker)
            return names

        before = await owners()
        async with another_worker(both.cluster, "decode-2") as third:
            await both.until_workers("decode-0", "decode-1", "decode-2")
            after = await owners()
            # Asked to end it leaves the table, drains and is gone.
            await third.stop(PATIENCE_S)
        moved = [now for was, now in zip(before, after, strict=True) if was != now]
        assert set(moved) == {"decode-2"}
        # 20 expected; the ring is always the same one, and so are the prompts.
        assert 10 <= len(moved) <= 30
        await both.until_workers("decode-0", "decode-1")
        assert await owners() == before


async def test_a_drain_is_seen_by_both(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """A worker that drains gets nothing new through either router, finishes what it has, and is not named in Redis any more."""
    async with pair(tmp_path, tiny_tokenizer_dir, sections={"decode": SLOW_STEPS}, topology="1P2D") as both:
        streams = [(await begun(client))[0] for client in both.clients for _ in range(2)]
        address = both.cluster.local.worker_addresses["decode-0"]
        channels = both.cluster.local.channels()
        await WorkerServiceStub(channels.get(address)).Drain(worker_pb2.DrainRequest(), timeout=20)
        await channels.aclose()
        async with Redis.from_url(both.redis.url) as table, asyncio.timeout(PATIENCE_S):
            while await table.hlen("paceline:workers:decode") != 1:
                pass
        for prompt in cold_prompts(6):
            for client in both.clients:
                assert (await complete(client, prompt)).decode_worker == "decode-1"
        await end_well(*streams)


async def test_what_is_no_worker_of_ours_is_refused_and_harms_nobody(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    """A worker of another model, the router itself, a port that nobody has: named once in each router's log, and every request is served."""
    async with pair(tmp_path, tiny_tokenizer_dir, topology="1P1D") as both:
        router = both.cluster.local.router_addresses[0]
        # Workers in exact mode compute other numbers.
        async with another_worker(both.cluster, "decode-1", "--exactness", "exact"):
            async with Redis.from_url(both.redis.url) as table:
                now, _ = await table.time()
                for address in (router, "127.0.0.1:1", "garbage"):
                    await table.hset("paceline:workers:decode", address, f"1:{now + 60}:ab:liar")
            named = (both.cluster.local.layout.worker_address("decode-1"), router, "127.0.0.1:1")
            async with asyncio.timeout(PATIENCE_S):
                while any(refusals(both.cluster, address) < len(both.clients) for address in named):
                    for client in both.clients:
                        await complete(client)
            for client in both.clients:
                await complete(client)
            assert [refusals(both.cluster, address) for address in named] == [2, 2, 2]
            assert await both.workers() == [["decode-0", "prefill-0"]] * 2


def refusals(cluster: Cluster, address: str) -> int:
    """How many lines of both routers' logs say that nobody of ours is at an address."""
    lines = [line for line in cluster.logs().splitlines() if "worker_unreachable" in line]
    return sum(f'"address": "{address}"' in line for line in lines)


async def test_a_client_of_both_survives_one(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """A client that is given both addresses asks each in turn, and when one router is killed the other."""
    async with (
        pair(tmp_path, tiny_tokenizer_dir, topology="1P1D") as both,
        PacelineClient(",".join(both.cluster.local.router_addresses)) as client,
    ):
        for _ in range(4):
            await complete(client)
        both.cluster.local.kill("router-0")
        async with asyncio.timeout(PATIENCE_S):
            num_in_a_row = 0
            while num_in_a_row < 8:
                try:
                    await complete(client)
                    num_in_a_row += 1
                except PacelineRpcError:
                    num_in_a_row = 0
