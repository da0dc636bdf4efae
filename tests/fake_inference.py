"""A small InferenceService for tests of clients: it echoes, and does what the prompt tells it to."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection

from paceline.core.errors import PacelineError, PromptTooLongError, QueueFullError, TenantUnknownError
from paceline.runtime.grpc_status import abort_with
from paceline.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

# What a prompt may ask for; any other prompt is echoed word by word.
ENDLESS = "endless"  # one word, then silence until the call is cancelled
FLOOD = "flood"  # words without end
TOO_LONG = "too long"
NO_KEY = "no key"
FULL = "full"

# Of a prompt whose log probabilities are asked for.
PROMPT_LOGPROBS = [
    generation_pb2.TokenLogprob(
        token_id=7, logprob=-0.5, top=[generation_pb2.TopLogprob(token_id=8, logprob=-0.25)]
    ),
    generation_pb2.TokenLogprob(token_id=9, logprob=-2),
]

_ERRORS: dict[str, PacelineError] = {
    TOO_LONG: PromptTooLongError(limit=4096, given=5120),
    NO_KEY: TenantUnknownError("this API key is not known"),
    FULL: QueueFullError("the queue is full", retry_after_s=1.5),
}


class FakeInference(inference_pb2_grpc.InferenceServiceServicer):
    """Keeps the requests, and says when one was cancelled. `address` is where it listens."""

    def __init__(self) -> None:
        self.address = ""
        self.requests: list[inference_pb2.GenerateRequest] = []
        # What each call said of its key; None: nothing.
        self.keys: list[str | bytes | None] = []
        self.cancelled = asyncio.Event()

    async def Generate(  # noqa: N802 - the contract's name
        self, request: inference_pb2.GenerateRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Accepted, a delta for each word, PrefillDone behind the first one, Finish."""
        self.requests.append(request)
        self._note_key(context)
        prompt = _last_words(request)
        if prompt in _ERRORS:
            await abort_with(context, _ERRORS[prompt])
        events = _answer(prompt, request.n or 1, tells_prompt=request.logprobs.prompt)
        done = False
        try:
            async for event in events:
                yield event
            done = True
        finally:
            if not done:
                self.cancelled.set()

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> inference_pb2.TokenizeResponse:
        """One id a byte of the text, one a message of the chat."""
        self._note_key(context)
        ids = request.text.encode() or range(len(request.chat.messages))
        return inference_pb2.TokenizeResponse(token_ids=ids, max_prompt_tokens=100)

    async def GetServerInfo(  # noqa: N802
        self, request: inference_pb2.GetServerInfoRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> inference_pb2.GetServerInfoResponse:
        """A name."""
        self._note_key(context)
        return inference_pb2.GetServerInfoResponse(model_id="fake-model")

    def _note_key(self, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        self.keys.append(dict(context.invocation_metadata() or ()).get("authorization"))


@asynccontextmanager
async def serve_fake_inference(
    credentials: grpc.ServerCredentials | None = None,
) -> AsyncIterator[FakeInference]:
    """The service on a free port of loopback, with reflection; with credentials over TLS."""
    service = FakeInference()
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    reflection.enable_server_reflection(["paceline.v1.InferenceService", reflection.SERVICE_NAME], server)
    anywhere = "127.0.0.1:0"
    port = (
        server.add_secure_port(anywhere, credentials) if credentials else server.add_insecure_port(anywhere)
    )
    service.address = f"127.0.0.1:{port}"
    await server.start()
    yield service
    await server.stop(None)


def _last_words(request: inference_pb2.GenerateRequest) -> str:
    if request.WhichOneof("prompt") == "chat":
        return request.chat.messages[-1].content
    return request.text or " ".join(str(token_id) for token_id in request.token_ids.ids)


async def _answer(
    prompt: str, n: int, *, tells_prompt: bool
) -> AsyncIterator[inference_pb2.GenerateResponse]:
    yield inference_pb2.GenerateResponse(accepted=inference_pb2.Accepted(request_id=secrets.token_hex(16)))
    first, *words = prompt.split(" ")
    for index in range(n):
        yield _delta(first, 0, index)
    yield inference_pb2.GenerateResponse(
        prefill_done=inference_pb2.PrefillDone(
            prompt_tokens=3, prompt_logprobs=PROMPT_LOGPROBS * tells_prompt
        )
    )
    for position, word in enumerate(words, 1):
        for index in range(n):
            yield _delta(f" {word}", position, index)
    while prompt == FLOOD:
        yield _delta(" water" * 100, 0)
    if prompt == ENDLESS:
        await asyncio.Event().wait()
    for index in range(n):
        # Candidates differ by a last word of their own.
        if index > 0:
            yield _delta(f" {index}", len(words) + 1, index)
        yield inference_pb2.GenerateResponse(index=index, finish=_finish(len(words) + 1))


def _delta(text: str, token_id: int, index: int = 0) -> inference_pb2.GenerateResponse:
    delta = inference_pb2.Delta(text=text, token_ids=[token_id])
    return inference_pb2.GenerateResponse(index=index, delta=delta)


def _finish(num_tokens: int) -> inference_pb2.Finish:
    return inference_pb2.Finish(
        reason=generation_pb2.FINISH_REASON_STOP,
        stop="###",
        usage=inference_pb2.Usage(prompt_tokens=3, cached_tokens=2, output_tokens=num_tokens),
        timeline=inference_pb2.Timeline(
            kv_bytes=1 << 40, prefill_worker="prefill-0", decode_worker="decode-0"
        ),
    )
