"""Clients that do not read, over real connections: they lose their request, and nobody else loses anything."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from paceline.client_error import from_rpc_error
from paceline.core.request import SequenceSpec
from paceline.runtime.server import GrpcServer
from paceline.v1 import decode_pb2, generation_pb2, inference_pb2
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from router.hash_ring import HashRing, prompt_key
from router.service import SERVICE_NAME
from router.tokenizer import Tokenizer
from tests.router.scripted_workers import (
    DecodeScript,
    ScriptedWorker,
    decode_started,
    good_decode,
    oracle,
    tokens,
)
from tests.router.whole import WholeRouter, whole_router
from tests.worker.bench import until

NUM_TOKENS = 100
# One token's: a hundred of them are far more than a connection holds that nobody reads from.
LOGPROB = generation_pb2.TokenLogprob(top=[generation_pb2.TopLogprob(logprob=-1.0)] * 3000)
# The window does not grow, as it does where somebody reads fast.
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))
# On the ring it belongs to the worker that says too much.
NAMES = ("decode-0", "decode-1")
PROMPT = next(
    ids
    for ids in ((n, 1, 2) for n in range(99))
    if next(HashRing.of(NAMES).walk(prompt_key(ids, ""))) == NAMES[1]
)


async def flood(
    worker: ScriptedWorker, spec: SequenceSpec, has_ticket: bool
) -> AsyncGenerator[decode_pb2.SequenceEvent, None]:
    """All tokens at once, each with many log probabilities."""
    yield decode_started()
    for index, token_id in enumerate(oracle(spec)):
        await asyncio.sleep(0)
        event = tokens(index, (token_id,), ends=index == spec.max_tokens - 1)
        event.tokens.logprobs.append(LOGPROB)
        yield event


class Client:
    """Reads when it likes."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.num_tokens = 0

    async def read(self) -> bool:
        """The next event; whether there was one. Raises what the call ends with."""
        response = await self.call.read()
        if not isinstance(response, inference_pb2.GenerateResponse):
            return False
        self.num_tokens += len(response.delta.token_ids)
        return True

    async def read_on(self) -> None:
        """To the end."""
        async with asyncio.timeout(20):
            while await self.read():
                pass


class Scene:
    """A router at an address, before a decode worker that says too much."""

    def __init__(self, router: WholeRouter, channel: grpc.aio.Channel) -> None:
        self.router = router
        self.worker = router.scripted[NAMES[1]]
        self._stub: Any = InferenceServiceStub(channel)

    async def begin(self, script: DecodeScript, max_tokens: int = NUM_TOKENS) -> Client:
        """A request whose client has read the first event; what its worker says is in the script."""
        self.worker.decode_scripts.append(script)
        request = inference_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=PROMPT),
            stopping=generation_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        )
        client = Client(self._stub.Generate(request))
        assert await client.read()
        return client

    @property
    def num_active(self) -> int:
        """Requests that hold anything of the router."""
        return self.router.admission.stats().num_active


@pytest.fixture
async def scene(tmp_path: Path, tiny_tokenizer_dir: Path, byte_level: Tokenizer) -> AsyncIterator[Scene]:
    """Its patience is short."""
    async with whole_router(
        tiny_tokenizer_dir,
        byte_level,
        scripted=NAMES[1:],
        disaggregate="never",
        max_buffered_events=20,
        max_unread_s=0.5,
    ) as router:
        address = f"unix:{tmp_path / 'router'}"
        server = GrpcServer(address)
        router.service.add_to(server.grpc)
        await server.start([SERVICE_NAME])
        async with grpc.aio.insecure_channel(address, options=NARROW) as channel:
            yield Scene(router, channel)
        await server.stop(grace_s=0)


async def test_a_client_that_does_not_read_loses_its_request_and_nobody_else_does(scene: Scene) -> None:
    """Its worker is told at the bound and its place is free soon after, while it still does not read; then it hears why."""
    stuck = await scene.begin(flood)
    await scene.worker.until(lambda: len(scene.worker.cancels) == 1)
    other = await scene.begin(good_decode, max_tokens=8)
    await other.read_on()
    assert other.num_tokens == 8
    await until(lambda: scene.num_active == 0)
    assert scene.router.registry.num_streams == 0
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stuck.read_on()
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CONSUMER")
    assert error.retry_after_s == 1.0
    # What was on its way came; what waited behind it was dropped.
    assert 0 < stuck.num_tokens < NUM_TOKENS
    assert scene.router.service.stats().num_ended == {"SLOW_CONSUMER": 1, "length": 1}


async def test_a_client_that_does_not_read_may_leave(scene: Scene) -> None:
    """Before it is given up or after that: nothing of it is left, and nobody is told of a bug."""
    with capture_logs() as logs:
        for is_given_up in (False, True):
            stuck = await scene.begin(flood)
            await scene.worker.until(lambda: bool(scene.worker.cancels))
            if is_given_up:
                await until(lambda: scene.num_active == 0)
            stuck.call.cancel()
            await until(lambda: scene.num_active == 0)
            scene.worker.cancels.clear()
    assert {line["event"] for line in logs} <= {"request_done", "request_refused"}


async def test_a_client_that_reads_slowly_hears_everything(scene: Scene) -> None:
    """As long as what waits for it fits into its buffer: it is never further behind than that."""
    client = await scene.begin(paced(client_read := asyncio.Semaphore(5)))
    while await client.read():
        client_read.release()
    assert client.num_tokens == NUM_TOKENS


def paced(may_say: asyncio.Semaphore) -> DecodeScript:
    """As many large tokens as the client has read, and five more."""

    async def script(
        worker: ScriptedWorker, spec: SequenceSpec, has_ticket: bool
    ) -> AsyncGenerator[decode_pb2.SequenceEvent, None]:
        """One after the other."""
        async for event in flood(worker, spec, has_ticket):
            await may_say.acquire()
            yield event

    return script
