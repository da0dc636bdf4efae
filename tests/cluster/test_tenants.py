"""Tenants through real processes: whose key is whose, what each may have, and what none learns of the others."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.client import Completion, GenerateOptions, PacelineClient, Priority
from paceline.client_error import PacelineRpcError
from paceline.v1 import generation_pb2, inference_pb2
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from router.tenants import new_key
from tests.cluster.scraping import scrape, series
from tests.cluster.support import PATIENCE_S, Cluster, fake_tokens, running_cluster
from tests.tiny_model import VOCAB_SIZE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.thorough]

PROMPT = tuple((7 * i + 3) % VOCAB_SIZE for i in range(100))
# What a busy machine does not use up.
PATIENT = {"limiter_budget_s": 20.0}
ACME, ACME_HASH = new_key()
OTHER, OTHER_HASH = new_key()


def tenants_file(tmp_path: Path, acme: str = "", other: str = "") -> Path:
    """Two tenants, each with its own lines."""
    path = tmp_path / "tenants.toml"
    path.write_text(
        f'[tenants.acme]\nkey_hashes = ["{ACME_HASH}"]\n{acme}\n[tenants.other]\nkey_hashes = ["{OTHER_HASH}"]\n{other}\n'
    )
    return path


@asynccontextmanager
async def tenant_cluster(
    tmp_path: Path, model: Path, file: Path, **sections: dict[str, Any]
) -> AsyncIterator[tuple[Cluster, PacelineClient, PacelineClient]]:
    """A cluster with these tenants, and a client of each."""
    merged = {"router": PATIENT} | sections
    async with (
        running_cluster(
            tmp_path, model, sections=merged, runner="fake", disaggregate="always", tenants=str(file)
        ) as cluster,
        PacelineClient(cluster.address, api_key=ACME) as acme,
        PacelineClient(cluster.address, api_key=OTHER) as other,
    ):
        yield cluster, acme, other


def asked(max_tokens: int = 4, priority: Priority | None = None) -> GenerateOptions:
    """Greedy, and of a known length."""
    return GenerateOptions(max_tokens=max_tokens, temperature=0, ignore_eos=True, priority=priority)


async def cached(client: PacelineClient) -> int:
    """How many tokens of the prompt were cached; its answer is the oracle's."""
    answer = await client.generate_text(PROMPT, **asked())
    assert answer.token_ids == fake_tokens(PROMPT, 4, VOCAB_SIZE, None)
    return answer.cached_tokens


async def refused(
    client: PacelineClient, max_tokens: int = 4, priority: Priority | None = None
) -> PacelineRpcError:
    """What a request hears that is not taken."""
    with pytest.raises(PacelineRpcError) as caught:
        await client.generate_text(PROMPT, **asked(max_tokens, priority))
    return caught.value


async def test_tenants_do_not_see_each_others_cache(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """What one has asked is computed anew for the other, and cached for itself; no salt has to be configured. No log shows a key."""
    file = tenants_file(tmp_path)
    async with tenant_cluster(tmp_path, tiny_tokenizer_dir, file) as (cluster, acme, other):
        assert await cached(acme) == 0
        assert await cached(acme) == 96
        assert await cached(other) == 0
        assert await cached(other) == 96
        logs = cluster.logs()
        assert '"tenant": "acme"' in logs
        assert ACME not in logs
        assert OTHER not in logs
        assert ACME_HASH.removeprefix("sha256:") not in logs


async def test_what_a_client_claims_changes_nothing(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Another tenant's name, a salt, a token of a cluster, a request id: the key alone says whose blocks are shared and who is charged."""
    claims = tuple(
        (name, value)
        for value in ("acme", "public:96:", "x" * 64)
        for name in (
            *(
                "paceline-tenant",
                "tenant",
                "paceline-cache-scope",
                "cache_scope",
                "paceline-cache-salt",
                "cache-salt",
            ),
            *("paceline-cluster-token", "paceline-request-id", "x-request-id", "paceline-tenant-weight"),
        )
    )
    message = inference_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=PROMPT),
        sampling=generation_pb2.SamplingParams(temperature=0),
        stopping=generation_pb2.StopConditions(max_tokens=4, ignore_eos=True),
    )
    async with tenant_cluster(tmp_path, tiny_tokenizer_dir, tenants_file(tmp_path)) as (cluster, acme, _):
        assert [await cached(acme), await cached(acme)] == [0, 96]
        async with grpc.aio.insecure_channel(cluster.address) as channel:
            for expected in (0, 96):
                call = InferenceServiceStub(channel).Generate(
                    message, metadata=(("authorization", f"Bearer {OTHER}"), *claims), timeout=60
                )
                events = [event async for event in call]
                token_ids = tuple(token for event in events for token in event.delta.token_ids)
                assert token_ids == fake_tokens(PROMPT, 4, VOCAB_SIZE, None)
                assert events[-1].finish.usage.cached_tokens == expected
                assert len(bytes.fromhex(events[0].accepted.request_id)) == 16
        logs = cluster.logs()
        assert logs.count('"tenant": "other"') == 2
        assert "x" * 64 not in logs


async def test_without_a_key_nothing_is_served(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Each method of the service wants one that is known; health does not, or nobody could watch the server."""
    async with tenant_cluster(tmp_path, tiny_tokenizer_dir, tenants_file(tmp_path)) as (cluster, acme, _):
        async with PacelineClient(cluster.address, api_key=ACME + "x") as stranger:
            for client in (stranger, cluster.client):
                for call in (client.generate_text("one"), client.tokenize("one"), client.server_info()):
                    with pytest.raises(PacelineRpcError) as caught:
                        await call
                    assert caught.value.code is grpc.StatusCode.UNAUTHENTICATED
                    assert caught.value.reason == "TENANT_UNKNOWN"
        assert await acme.tokenize("one")
        assert (await acme.server_info()).limiter_mode == "redis"


async def test_a_tenant_has_what_it_may_have(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """A priority, an output or a number of tokens that it may not have is refused, and its limits are what the server tells it."""
    limits = 'priorities = ["standard", "batch"]\nmax_output_tokens = 20\ntokens_per_minute = 600000\nburst_tokens = 110'
    file = tenants_file(tmp_path, limits)
    async with tenant_cluster(tmp_path, tiny_tokenizer_dir, file) as (_, acme, other):
        wrong = await refused(acme, priority="realtime")
        assert (wrong.code, wrong.reason) == (grpc.StatusCode.PERMISSION_DENIED, "SCOPE_FORBIDDEN")
        assert wrong.facts == {"field": "priority"}
        assert (await refused(acme, max_tokens=21)).reason == "BAD_STOP"
        assert (await refused(acme, max_tokens=11)).reason == "SCOPE_FORBIDDEN"
        assert (await acme.server_info()).limits.max_output_tokens == 20
        assert (await other.server_info()).limits.max_output_tokens > 20
        assert await cached(acme) == 0
        # Who does not say how much wants no more than it may have.
        answer = await acme.generate_text(PROMPT[:10], temperature=0, ignore_eos=True)
        assert len(answer.token_ids) == 20
        assert (await other.generate_text(PROMPT, **asked(30, "realtime"))).finish_reason == "length"


async def test_who_waits_as_long_as_it_is_told_gets_in(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """RATE_LIMITED comes with a delay that is true, for requests and for tokens; another tenant does not notice."""
    file = tenants_file(
        tmp_path,
        "requests_per_minute = 120\nburst_requests = 1",
        # A request of 100 + 4 tokens; the delay is for what is missing of them.
        "tokens_per_minute = 12000\nburst_tokens = 104",
    )
    async with tenant_cluster(tmp_path, tiny_tokenizer_dir, file) as (cluster, *clients):
        for client, limit in zip(clients, ("requests", "tokens"), strict=True):
            for _ in range(2):
                error = await until_refused(client)
                assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RATE_LIMITED")
                assert error.facts["limit"] == limit
                assert error.retry_after_s is not None
                assert 0 < error.retry_after_s <= 0.52
                await asyncio.sleep(error.retry_after_s)
                await client.generate_text(PROMPT, **asked())
        ended = await scrape(cluster, "router")
        assert ended[series("requests_total", end="RATE_LIMITED")] >= 4
        assert ended[series("limiter_mode", mode="redis")] == 1


async def until_refused(client: PacelineClient) -> PacelineRpcError:
    """One of the refusals of requests that come all at once."""
    coming = [client.generate_text(PROMPT, **asked()) for _ in range(8)]
    answers = await asyncio.gather(*coming, return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, PacelineRpcError)]
    assert len(errors) + sum(isinstance(answer, Completion) for answer in answers) == 8
    return errors[0]


async def test_no_more_than_its_share_is_under_way(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """A tenant with as many requests as it may have hears QUEUE_FULL, another does not, and a place that is left is free again."""
    file = tenants_file(tmp_path, "max_concurrent = 1")
    slow = {"fake_step_ms": 20}
    async with tenant_cluster(tmp_path, tiny_tokenizer_dir, file, decode=slow) as (cluster, acme, other):
        stream = acme.generate(PROMPT, **asked(400))
        await anext(stream)
        error = await refused(acme)
        assert (error.reason, "of this tenant" in error.message) == ("QUEUE_FULL", True)
        assert await cached(other) == 0
        await stream.aclose()
        await cluster.until_idle()
        # One after the other: each one finds the slot of the one before it free.
        for _ in range(5):
            await cached(acme)


async def test_the_file_is_read_again_without_touching_a_stream(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    """A tenant that is taken out ends its stream as it began and is then unknown; a broken file changes nothing and is logged."""
    file = tenants_file(tmp_path)
    slow = {"fake_step_ms": 10}
    async with tenant_cluster(tmp_path, tiny_tokenizer_dir, file, decode=slow) as (cluster, acme, other):
        stream = acme.generate(PROMPT, **asked(60))
        events = [await anext(stream)]
        file.write_text(f'[tenants.other]\nkey_hashes = ["{OTHER_HASH}"]\n')
        await hang_up(cluster, "tenants_loaded")
        assert (await refused(acme)).reason == "TENANT_UNKNOWN"
        file.write_text("[tenants.other")
        await hang_up(cluster, "tenants_refused")
        assert "not valid TOML" in cluster.logs()
        await cached(other)
        events += [event async for event in stream]
        token_ids = tuple(token for event in events for token in event.delta.token_ids)
        assert token_ids == fake_tokens(PROMPT, 60, VOCAB_SIZE, None)


async def hang_up(cluster: Cluster, event: str) -> None:
    """Sends SIGHUP to the router, and waits until its log has the event."""
    cluster.local.kill("router", signal.SIGHUP)
    async with asyncio.timeout(PATIENCE_S):
        while f'"{event}"' not in cluster.logs():  # noqa: ASYNC110 - there is no event: it is another process
            await asyncio.sleep(0.01)


async def test_without_redis_the_limits_are_stricter_and_shown(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    """With Redis killed a tenant has its share and no burst, nobody is without limit, and server and metrics say so."""
    file = tenants_file(tmp_path, "requests_per_minute = 2\nburst_requests = 40")
    async with tenant_cluster(tmp_path, tiny_tokenizer_dir, file) as (cluster, acme, other):
        for _ in range(5):
            await acme.generate_text(PROMPT, **asked())
        cluster.local.kill("redis")
        # One a minute: the first one that Redis does not decide is let in, and no other.
        await acme.generate_text(PROMPT, **asked())
        for _ in range(4):
            error = await refused(acme)
            assert (error.reason, error.facts["limit"]) == ("RATE_LIMITED", "requests")
            assert error.retry_after_s is not None
            assert 0 < error.retry_after_s <= 60
        assert (await acme.server_info()).limiter_mode == "strict"
        seen = await scrape(cluster, "router")
        assert seen[series("limiter_mode", mode="strict")] == 1
        assert seen[series("limiter_mode", mode="redis")] == 0
        assert seen[series("limiter_strict_total")] == 5
        # Who has no rate is not asked about.
        await cached(other)
