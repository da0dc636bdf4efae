"""What cannot be served is refused with its reason, and the service goes on serving."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from paceline.client_error import PacelineRpcError, from_rpc_error
from paceline.v1 import generation_pb2, inference_pb2
from tests.cluster.support import Cluster, fake_tokens, raw_generate
from tests.tiny_model import EOS_ID, VOCAB_SIZE

pytestmark = pytest.mark.asyncio(loop_scope="session")

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def request(**fields: Any) -> bytes:
    """A GenerateRequest's bytes; the prompt is "hello" unless given."""
    if not fields.keys() & {"text", "token_ids", "chat"}:
        fields["text"] = "hello"
    return inference_pb2.GenerateRequest(**fields).SerializeToString()


def chat(role: str, content: str = "hello") -> inference_pb2.Chat:
    """A chat of one message."""
    return inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role=role, content=content)])


def sampling(**fields: Any) -> bytes:
    """A request with these sampling parameters."""
    return request(sampling=generation_pb2.SamplingParams(**fields))


def stopping(**fields: Any) -> bytes:
    """A request with these stop conditions."""
    return request(stopping=generation_pb2.StopConditions(**fields))


REFUSALS: dict[str, tuple[bytes, grpc.StatusCode, str]] = {
    "no prompt": (b"", INVALID, "BAD_PROMPT"),
    "empty text": (request(text=""), INVALID, "BAD_PROMPT"),
    "no token": (request(token_ids=generation_pb2.TokenIds()), INVALID, "BAD_PROMPT"),
    "empty chat": (request(chat=inference_pb2.Chat()), INVALID, "BAD_PROMPT"),
    "prompt over the limit": (request(text="word " * 3000), INVALID, "PROMPT_TOO_LONG"),
    "tokens over the limit": (
        request(token_ids=generation_pb2.TokenIds(ids=[5] * 2048)),
        INVALID,
        "PROMPT_TOO_LONG",
    ),
    "10 MB prompt": (request(text="x" * 10_000_000), INVALID, "PROMPT_TOO_LONG"),
    "10 MB chat": (request(chat=chat("user", "x" * 10_000_000)), INVALID, "PROMPT_TOO_LONG"),
    "unknown role": (request(chat=chat("wizard")), INVALID, "BAD_PROMPT"),
    "temperature -1": (sampling(temperature=-1), INVALID, "BAD_SAMPLING"),
    "temperature nan": (sampling(temperature=float("nan")), INVALID, "BAD_SAMPLING"),
    "temperature inf": (sampling(temperature=float("inf")), INVALID, "BAD_SAMPLING"),
    "top_p 0": (sampling(top_p=0), INVALID, "BAD_SAMPLING"),
    "top_p 1.5": (sampling(top_p=1.5), INVALID, "BAD_SAMPLING"),
    "n 0": (request(n=0), INVALID, "BAD_SAMPLING"),
    "n 17": (request(n=17), INVALID, "BAD_SAMPLING"),
    "max_tokens 0": (stopping(max_tokens=0), INVALID, "BAD_STOP"),
    "max_tokens over the model": (stopping(max_tokens=2047), INVALID, "BAD_STOP"),
    "empty stop string": (stopping(stop=[""]), INVALID, "BAD_STOP"),
    "too many stop strings": (stopping(stop=["a"] * 99), INVALID, "BAD_STOP"),
    "invalid UTF-8": (b"\x12\x04\xff\xfe\xfd\xfc", INVALID, "BAD_PROMPT"),
    "not a message": (b"\xff" * 9, INVALID, "BAD_PROMPT"),
    "unknown token id": (request(token_ids=generation_pb2.TokenIds(ids=[VOCAB_SIZE])), INVALID, "BAD_PROMPT"),
    "21 logprobs": (request(logprobs=generation_pb2.LogprobOptions(num_top=21)), INVALID, "BAD_SAMPLING"),
    "bias on an unknown token": (sampling(logit_bias={VOCAB_SIZE: 1.0}), INVALID, "BAD_SAMPLING"),
    "min_tokens over max_tokens": (stopping(min_tokens=9, max_tokens=8), INVALID, "BAD_STOP"),
    "a label of a page": (request(client_request_id="x" * 257), INVALID, "BAD_FIELD"),
    "bias on all tokens and more": (
        sampling(logit_bias=dict.fromkeys(range(1025), 1.0)),
        INVALID,
        "BAD_SAMPLING",
    ),
    "unknown priority": (request(priority=99), INVALID, "BAD_SAMPLING"),
    "unknown public prefix": (
        request(cache=inference_pb2.CacheOptions(public_prefix="x")),
        INVALID,
        "BAD_PROMPT",
    ),
}


@pytest_asyncio.fixture(loop_scope="session")
async def channel(idle_fake_cluster: Cluster) -> AsyncIterator[grpc.aio.Channel]:
    """A plain channel to the router."""
    async with grpc.aio.insecure_channel(idle_fake_cluster.address) as channel:
        yield channel


@pytest.mark.parametrize("case", REFUSALS)
async def test_a_request_that_cannot_be_served_is_refused(channel: grpc.aio.Channel, case: str) -> None:
    """The refusal has its code and its reason, and comes instead of any event."""
    raw, code, reason = REFUSALS[case]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(raw_generate(channel)(raw, timeout=30)))
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (code, reason)
    assert error.message


async def test_the_service_serves_on_after_every_refusal(
    idle_fake_cluster: Cluster, channel: grpc.aio.Channel
) -> None:
    """After all refusals, one upon another, a good request gets its tokens."""
    for raw, _, _ in REFUSALS.values():
        with pytest.raises(grpc.aio.AioRpcError):
            await anext(aiter(raw_generate(channel)(raw, timeout=30)))
    answer = await idle_fake_cluster.client.generate_text((1, 3, 5), max_tokens=8, temperature=0)
    assert answer.token_ids == fake_tokens((1, 3, 5), 8, VOCAB_SIZE, EOS_ID)


async def test_a_deadline_that_has_passed_is_an_error(idle_fake_cluster: Cluster) -> None:
    """A request without time left fails as DEADLINE_EXCEEDED, and nothing of it stays behind."""
    with pytest.raises(PacelineRpcError) as caught:
        await idle_fake_cluster.client.generate_text("hello", timeout_s=1e-6)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    answer = await idle_fake_cluster.client.generate_text("hello", max_tokens=3, temperature=0)
    assert answer.finish_reason in ("length", "eos")


async def test_a_prompt_at_the_limit_is_served(idle_fake_cluster: Cluster) -> None:
    """The longest prompt leaves room for one token, and gives it."""
    info = await idle_fake_cluster.client.server_info()
    prompt = (9,) * info.limits.max_prompt_tokens
    answer = await idle_fake_cluster.client.generate_text(prompt, temperature=0, ignore_eos=True)
    assert answer.token_ids == fake_tokens(prompt, 1, VOCAB_SIZE, None)
    assert answer.finish_reason == "length"
