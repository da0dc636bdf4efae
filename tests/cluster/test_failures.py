"""Processes that die, stop or leave, at any moment, change no token and leave nothing held."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.client import Completion
from paceline.client_error import PacelineRpcError
from paceline.core.request import SamplingParams, TokenLogprob
from paceline.engine.fake import fake_prompt_logprobs
from paceline.runtime.wire_internal import logprob_from_proto
from paceline.v1 import inference_pb2
from tests.cluster.support import PATIENCE_S, Cluster, fake_tokens, running_cluster
from tests.tiny_model import VOCAB_SIZE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.thorough]

# Slow enough for something to happen in the middle, quick enough to wait for.
SLOW_STEPS = {"fake_step_ms": 5}
PROMPT = tuple((3 * i + 1) % VOCAB_SIZE for i in range(300))
NUM_TOKENS = 200
# Computed in about a hundred steps.
LONG_PROMPT = tuple((5 * i + 2) % VOCAB_SIZE for i in range(1500))

STREAMING_CLIENT = """
import asyncio, sys
from paceline.client import PacelineClient

async def main():
    async with PacelineClient(sys.argv[1]) as client:
        async for event in client.generate("hello", max_tokens=1500, ignore_eos=True):
            print(event.WhichOneof("event"), flush=True)

asyncio.run(main())
"""


@pytest_asyncio.fixture(loop_scope="session")
async def pair(tmp_path: Path, tiny_tokenizer_dir: Path) -> AsyncIterator[Cluster]:
    """Two slow fake workers in each tier, so that there is always another one to go to."""
    async with running_cluster(
        tmp_path,
        tiny_tokenizer_dir,
        sections={"prefill": SLOW_STEPS | {"max_num_batched_tokens": 16}, "decode": SLOW_STEPS},
        runner="fake",
        disaggregate="always",
        topology="2P2D",
    ) as cluster:
        yield cluster


async def stream(
    cluster: Cluster, seen: asyncio.Queue[inference_pb2.GenerateResponse], num_tokens: int = NUM_TOKENS
) -> list[int]:
    """The tokens of one long request; its events go to `seen` as they come."""
    token_ids: list[int] = []
    events = cluster.client.generate(PROMPT, max_tokens=num_tokens, temperature=0, ignore_eos=True)
    async for event in events:
        seen.put_nowait(event)
        token_ids += event.delta.token_ids
    return token_ids


async def first_event(
    seen: asyncio.Queue[inference_pb2.GenerateResponse], kind: str
) -> inference_pb2.GenerateResponse:
    """The next event of this kind."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            event = await seen.get()
            if event.WhichOneof("event") == kind:
                return event


async def finish_of(
    seen: asyncio.Queue[inference_pb2.GenerateResponse],
) -> tuple[inference_pb2.Finish, list[inference_pb2.Migrated]]:
    """The end of the stream, and how often it migrated on the way."""
    migrations = []
    while True:
        event = seen.get_nowait()
        if event.WhichOneof("event") == "migrated":
            migrations.append(event.migrated)
        if event.WhichOneof("event") == "finish":
            return event.finish, migrations


@pytest.mark.parametrize(
    ("tier", "moment"),
    [
        ("prefill", "progress"),
        ("decode", "delta"),
        pytest.param("prefill", "prefill_done", marks=pytest.mark.slow),
        pytest.param("prefill", "delta", marks=pytest.mark.slow),
        pytest.param("decode", "progress", marks=pytest.mark.slow),
        pytest.param("decode", "prefill_done", marks=pytest.mark.slow),
    ],
)
async def test_a_killed_worker_changes_no_token(pair: Cluster, tier: str, moment: str) -> None:
    """A worker is killed while it computes, hands over or generates: the stream goes on with the oracle's tokens."""
    seen: asyncio.Queue[inference_pb2.GenerateResponse] = asyncio.Queue()
    async with asyncio.TaskGroup() as group:
        answer = group.create_task(stream(pair, seen))
        await first_event(seen, moment)
        busy = await kill_busy(pair, tier)
    assert answer.result() == list(fake_tokens(PROMPT, NUM_TOKENS, VOCAB_SIZE, None))
    finish, migrations = await finish_of(seen)
    assert finish.timeline.attempts == 1 + len(migrations)
    if tier == "decode" and moment == "delta":
        assert busy
        assert [migrated.attempt for migrated in migrations] == [1]


@pytest.mark.parametrize(("tier", "moment"), [("prefill", "progress"), ("decode", "delta")])
async def test_a_killed_worker_changes_no_token_of_any_candidate(
    pair: Cluster, tier: str, moment: str
) -> None:
    """Three candidates lose their worker: together or each by itself they go on with the oracle's tokens."""
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    ends: list[int] = []
    attempts = 1
    is_killed = False
    events = pair.client.generate(PROMPT, n=3, seed=4, max_tokens=NUM_TOKENS, ignore_eos=True)
    async for event in events:
        kind = event.WhichOneof("event")
        tokens[event.index] += event.delta.token_ids
        attempts += kind == "migrated"
        if kind == "finish":
            ends.append(event.index)
            assert event.finish.timeline.attempts <= attempts
        if kind == moment and not is_killed and (tier == "prefill" or len(tokens[2]) > 3):
            is_killed = True
            await kill_busy(pair, tier)
    assert sorted(ends) == [0, 1, 2]
    for candidate, output in tokens.items():
        assert output == list(
            fake_tokens(
                PROMPT,
                NUM_TOKENS,
                VOCAB_SIZE,
                None,
                sampling=SamplingParams(seed=4),
                candidate=candidate,
            )
        )
    assert attempts == (4 if tier == "decode" else 2)


@pytest.mark.parametrize(("tier", "moment"), [("prefill", "progress"), ("decode", "delta")])
async def test_a_killed_worker_loses_and_repeats_no_log_probability(
    pair: Cluster, tier: str, moment: str
) -> None:
    """Killed in the middle of the prompt or after it: the client gets each prompt token's entry once, and the oracle's tokens."""
    told: list[tuple[TokenLogprob, ...]] = []
    token_ids: list[int] = []
    attempts = 1
    # Whoever has been asked once is asked quickly: the prompt must not be done before a worker is killed.
    assert not [name for name in pair.local.worker_addresses if await is_busy(pair, name)]
    async for event in pair.client.generate(
        LONG_PROMPT,
        max_tokens=100,
        temperature=0,
        ignore_eos=True,
        num_top_logprobs=1,
        prompt_logprobs=True,
    ):
        kind = event.WhichOneof("event")
        token_ids += event.delta.token_ids
        attempts = max(attempts, event.finish.timeline.attempts)
        if kind == "prefill_done":
            told.append(tuple(map(logprob_from_proto, event.prefill_done.prompt_logprobs)))
        if kind == moment:
            moment = "" if await kill_busy(pair, tier) else moment
    assert told == [fake_prompt_logprobs(LONG_PROMPT, 1, VOCAB_SIZE)]
    assert token_ids == list(fake_tokens(LONG_PROMPT, 100, VOCAB_SIZE, None))
    assert attempts == 2


async def kill_busy(cluster: Cluster, tier: str) -> list[str]:
    """Kills the workers of a tier that have something to do, and names them."""
    workers = [name for name in cluster.local.worker_addresses if name.startswith(tier)]
    busy = [name for name in workers if await is_busy(cluster, name)]
    for name in busy:
        cluster.local.kill(name)
    return busy


async def is_busy(cluster: Cluster, worker: str) -> bool:
    """Whether the worker has a sequence or a lease."""
    load = await cluster.load(worker)
    return load.num_running + load.num_waiting + load.num_leases > 0


async def test_a_killed_client_gives_everything_back(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Kill -9 of a client in the middle of its stream returns both pools to their baseline within two steps."""
    async with running_cluster(
        tmp_path, tiny_tokenizer_dir, sections={"decode": SLOW_STEPS}, runner="fake", disaggregate="always"
    ) as cluster:
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", STREAMING_CLIENT, cluster.address, stdout=subprocess.PIPE
        )
        assert client.stdout is not None
        while await client.stdout.readline() != b"delta\n":
            pass
        await cluster.until("decode-0", lambda load: load.num_running == 1)
        client.kill()
        await client.wait()
        await cluster.until_idle()
        after = await cluster.load("decode-0")
        # Nothing is left to run, and the steps since the cancel are the one under way and no other.
        assert after.max_steps_to_release <= 2
        assert '"ended": "cancelled"' in cluster.logs()


async def test_a_storm_of_leavers_gives_everything_back(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Requests that end by their deadline at any moment leave no block, no lease and no sequence on any worker."""
    async with running_cluster(
        tmp_path, tiny_tokenizer_dir, runner="fake", disaggregate="always", topology="2P2D"
    ) as cluster:
        rng = random.Random(11)
        ends = [rng.uniform(0.055, 0.15) for _ in range(200)]
        results = await asyncio.gather(*(leave_after(cluster, seconds) for seconds in ends))
        assert "deadline_exceeded" in results
        await cluster.until_idle()
        answer = await complete(cluster)
        assert answer.token_ids == fake_tokens(PROMPT, 20, VOCAB_SIZE, None)


async def leave_after(cluster: Cluster, seconds: float) -> str:
    """How a request with so much time ends."""
    try:
        answer = await cluster.client.generate_text(
            PROMPT, max_tokens=400, ignore_eos=True, timeout_s=seconds
        )
    except PacelineRpcError as error:
        return error.code.name.lower()
    return answer.finish_reason


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tier", ["prefill", "decode"])
@pytest.mark.parametrize("moment", ["progress", "delta"])
async def test_a_frozen_worker_changes_no_token(pair: Cluster, tier: str, moment: str) -> None:
    """A worker that is stopped, not killed, is found out by its silence, and another carries on."""
    seen: asyncio.Queue[inference_pb2.GenerateResponse] = asyncio.Queue()
    answer = asyncio.create_task(stream(pair, seen))
    await first_event(seen, moment)
    names = [name for name in pair.local.worker_addresses if name.startswith(tier)]
    frozen = [pair.local.pids[name] for name in names if await is_busy(pair, name)]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert await answer == list(fake_tokens(PROMPT, NUM_TOKENS, VOCAB_SIZE, None))
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)


async def test_losing_redis_changes_no_token(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Without Redis the cluster serves on and says so; with it, it says that too."""
    async with running_cluster(tmp_path, tiny_tokenizer_dir, runner="fake", disaggregate="always") as cluster:
        assert (await cluster.client.server_info()).index_mode == "redis"
        before = await complete(cluster)
        cluster.local.kill("redis")
        after = await complete(cluster)
        assert before.token_ids == after.token_ids == fake_tokens(PROMPT, 20, VOCAB_SIZE, None)
        assert after.cached_tokens == 288
        assert {info.worker_id for info in (await cluster.client.server_info()).workers} == {
            "prefill-0",
            "decode-0",
        }


async def complete(cluster: Cluster) -> Completion:
    """Twenty tokens after the usual prompt."""
    return await cluster.client.generate_text(PROMPT, max_tokens=20, temperature=0, ignore_eos=True)


async def test_redis_that_hangs_changes_no_token(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """A Redis that accepts and never answers costs no token and no request."""
    budget = {"router": {"lookup_budget_s": 0.005}}
    async with running_cluster(
        tmp_path, tiny_tokenizer_dir, sections=budget, runner="fake", disaggregate="always"
    ) as cluster:
        os.kill(cluster.local.pids["redis"], signal.SIGSTOP)
        try:
            answers = await asyncio.gather(*(complete(cluster) for _ in range(8)))
            assert {a.token_ids for a in answers} == {fake_tokens(PROMPT, 20, VOCAB_SIZE, None)}
            assert (await cluster.client.server_info()).index_mode == "none"
        finally:
            os.kill(cluster.local.pids["redis"], signal.SIGCONT)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0", "router"])
async def test_sigterm_drains(tmp_path: Path, tiny_tokenizer_dir: Path, name: str) -> None:
    """A process told to end says at once that it is not ready, takes nothing new, finishes what it has, and leaves with status 0."""
    num_tokens = 600
    async with running_cluster(
        tmp_path,
        tiny_tokenizer_dir,
        sections={"prefill": SLOW_STEPS | {"max_num_batched_tokens": 4}, "decode": SLOW_STEPS},
        runner="fake",
        disaggregate="always",
    ) as cluster:
        seen: asyncio.Queue[inference_pb2.GenerateResponse] = asyncio.Queue()
        answer = asyncio.create_task(stream(cluster, seen, num_tokens))
        await first_event(seen, "progress")
        # By now every process has the request.
        await cluster.until("decode-0", lambda load: load.num_running + load.num_waiting == 1)
        address = cluster.address if name == "router" else cluster.local.worker_addresses[name]
        async with health(address) as told, health(address, "liveness") as alive:
            assert (await told(), await alive()) == ("SERVING", "SERVING")
            cluster.local.kill(name, signal.SIGTERM)
            assert await told() == "NOT_SERVING"
            assert not answer.done()
            with pytest.raises(PacelineRpcError) as caught:
                await complete(cluster)
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
            assert caught.value.reason in {"router": {"DRAINING"}}.get(name, {"DRAINING", "NO_ENDPOINT"})
            assert await answer == list(fake_tokens(PROMPT, num_tokens, VOCAB_SIZE, None))
        finish, migrations = await finish_of(seen)
        assert not migrations
        assert finish.timeline.attempts == 1
        assert "exited with status 0" in await cluster.obituary(name)


@pytest.mark.parametrize(("tier", "moment"), [("prefill", "progress"), ("decode", "delta")])
async def test_what_is_left_after_the_grace_goes_on_elsewhere(
    tmp_path: Path, tiny_tokenizer_dir: Path, tier: str, moment: str
) -> None:
    """A worker that is told to end does not wait for longer than that; its request moves, with the oracle's tokens."""
    short = {"grace_s": 0.1, "fake_step_ms": 10}
    async with running_cluster(
        tmp_path,
        tiny_tokenizer_dir,
        sections={"prefill": short | {"max_num_batched_tokens": 4}, "decode": short},
        runner="fake",
        disaggregate="always",
        topology="2P2D",
    ) as cluster:
        seen: asyncio.Queue[inference_pb2.GenerateResponse] = asyncio.Queue()
        answer = asyncio.create_task(stream(cluster, seen))
        await first_event(seen, moment)
        (name,) = [
            name
            for name in cluster.local.worker_addresses
            if name.startswith(tier) and await is_busy(cluster, name)
        ]
        cluster.local.kill(name, signal.SIGTERM)
        assert await answer == list(fake_tokens(PROMPT, NUM_TOKENS, VOCAB_SIZE, None))
        _, migrations = await finish_of(seen)
        assert [migrated.attempt for migrated in migrations] == [1]
        assert "exited with status 0" in await cluster.obituary(name)


async def test_a_worker_whose_engine_makes_no_progress_is_not_alive(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    """It says so by its liveness, and ends, so that somebody starts it again; its request does not hang."""
    stuck = {"decode": {"stall_s": 0.5, "fake_step_ms": 4000}, "router": {"recovery_wait_s": 0.5}}
    async with (
        running_cluster(
            tmp_path, tiny_tokenizer_dir, sections=stuck, runner="fake", disaggregate="always"
        ) as cluster,
        health(cluster.local.worker_addresses["decode-0"], "liveness") as alive,
    ):
        assert await alive() == "SERVING"
        answer = asyncio.create_task(complete(cluster))
        assert await alive() == "NOT_SERVING"
        assert "exited with status 1" in await cluster.obituary("decode-0")
        assert "engine_stalled" in cluster.logs()
        with pytest.raises(PacelineRpcError) as caught:
            await answer
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE


@asynccontextmanager
async def health(address: str, service: str = "") -> AsyncIterator[Callable[[], Awaitable[str]]]:
    """What a process says of itself now, and each time that this changes."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        call = stub.Watch(health_pb2.HealthCheckRequest(service=service))

        async def told() -> str:
            """The next word."""
            async with asyncio.timeout(PATIENCE_S):
                return str(health_pb2.HealthCheckResponse.ServingStatus.Name((await call.read()).status))

        yield told
        call.cancel()
