"""A small async client for a Paceline server; it needs grpcio and protobuf and nothing else.

async with PacelineClient("127.0.0.1:50051") as client:
    async for event in client.generate([{"role": "user", "content": "Hello!"}], max_tokens=50):
        print(event.delta.text, end="", flush=True)
"""

from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self, TypedDict, TypeGuard, Unpack, cast, get_args

import grpc

from paceline.client_channel import Tls, key_metadata, open_channel
from paceline.client_error import from_rpc_error
from paceline.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 600.0

# A message of a chat: {"role": "system" | "user" | "assistant", "content": text}.
Message = Mapping[str, str]
# Text is taken as it stands; messages go through the model's chat template; token ids are used unchanged.
Prompt = str | Sequence[Message] | Sequence[int]
Priority = Literal["realtime", "standard", "batch"]
_Events = AsyncGenerator[inference_pb2.GenerateResponse, None]


class GenerateOptions(TypedDict, total=False):
    """What a request may say besides its prompt. What is absent or None, the server decides."""

    max_tokens: int | None
    temperature: float | None  # 0 is greedy; the server's default is 1
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None  # added to the logits of these tokens
    seed: int | None  # the same seed, prompt and options give the same answer
    stop: Sequence[str] | None  # the answer ends before the first of these
    stop_token_ids: Sequence[int] | None
    n: int | None  # how many candidates; they differ by chance, so only with a temperature above 0
    min_tokens: int | None  # no end before so many
    ignore_eos: bool | None
    include_stop: bool | None  # show the stop string that ended the answer
    num_top_logprobs: int | None  # log probabilities of output tokens and their best alternatives, 0 to 20
    prompt_logprobs: bool | None  # those of prompt tokens, from the second on, and of output tokens
    priority: Priority | None  # "standard" when absent
    bypass_cache: bool | None  # neither read nor fill the prefix cache
    public_prefix: str | None  # the operator's name for what the prompt begins with, and tenants share
    client_request_id: str | None  # a label for the server's log
    timeout_s: float | None  # DEFAULT_TIMEOUT_S when absent; None is no deadline


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer, or one candidate of several. `finish_reason` is "stop", "length", "eos" or "aborted"; `logprobs` are there when asked for."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    matched_stop: str | int | None
    logprobs: tuple[generation_pb2.TokenLogprob, ...]
    prompt_logprobs: tuple[generation_pb2.TokenLogprob, ...]
    usage: inference_pb2.Usage
    timeline: inference_pb2.Timeline

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came out of a prefix cache."""
        return self.usage.cached_tokens

    @property
    def prefill_worker(self) -> str:
        """The worker that computed the prompt."""
        return self.timeline.prefill_worker

    @property
    def decode_worker(self) -> str:
        """The worker that generated the last token."""
        return self.timeline.decode_worker


@dataclass(slots=True)
class _Gathered:
    """One candidate's events, put together."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[generation_pb2.TokenLogprob] = field(default_factory=list)
    finish: inference_pb2.Finish = field(default_factory=inference_pb2.Finish)

    def take(self, event: inference_pb2.GenerateResponse) -> None:
        """The next one."""
        self.texts.append(event.delta.text)
        self.token_ids.extend(event.delta.token_ids)
        self.logprobs.extend(event.delta.logprobs)
        self.finish.MergeFrom(event.finish)

    def completion(
        self, accepted: inference_pb2.Accepted, prefill_done: inference_pb2.PrefillDone
    ) -> Completion:
        """The whole, with what all candidates have in common."""
        matched = self.finish.WhichOneof("matched")
        return Completion(
            request_id=accepted.request_id,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            finish_reason=_reason_name(self.finish.reason),
            matched_stop=getattr(self.finish, matched) if matched else None,
            logprobs=tuple(self.logprobs),
            prompt_logprobs=tuple(prefill_done.prompt_logprobs),
            usage=self.finish.usage,
            timeline=self.finish.timeline,
        )


class PacelineClient:
    """One connection to a server, or to several that are named with commas, for any number of requests at once.

    Make it where the event loop runs. A call that fails raises PacelineRpcError. `api_key` and `tls` are for servers that want them.
    """

    def __init__(
        self, address: str = DEFAULT_ADDRESS, *, api_key: str | None = None, tls: Tls | None = None
    ) -> None:
        self._metadata = key_metadata(api_key)
        self._channel = open_channel(address, tls)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends the connection; requests that still run are cancelled on the server."""
        await self._channel.close()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> _Events:
        """The events of one answer as they come: `event.delta.text` is new text, `event.finish` the end.

        With `n` above 1 the events of all candidates come mixed: `event.index` says whose one is.
        Leaving the loop early, or cancelling the task, cancels the request on the server. If you keep a reference
        to the generator, use `contextlib.aclosing`: Python closes a generator only when nobody holds it.
        """
        request = _generate_request(prompt, options)
        return self._events(request, options.get("timeout_s", DEFAULT_TIMEOUT_S))

    async def generate_text(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer, once it is complete."""
        if (options.get("n") or 1) != 1:
            raise TypeError("generate_text gives one answer; generate_texts gives n")
        (completion,) = await self.generate_texts(prompt, **options)
        return completion

    async def generate_texts(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> tuple[Completion, ...]:
        """All `n` candidates, by their index, once the last one is complete."""
        accepted, prefill_done = inference_pb2.Accepted(), inference_pb2.PrefillDone()
        candidates: defaultdict[int, _Gathered] = defaultdict(_Gathered)
        async for event in self.generate(prompt, **options):
            # An event holds one kind of message; the others are empty and add nothing.
            accepted.MergeFrom(event.accepted)
            prefill_done.MergeFrom(event.prefill_done)
            candidates[event.index].take(event)
        return tuple(
            gathered.completion(accepted, prefill_done) for _, gathered in sorted(candidates.items())
        )

    async def tokenize(self, prompt: str | Sequence[Message], *, timeout_s: float = 30.0) -> tuple[int, ...]:
        """The token ids that `generate` would use for this prompt."""
        with _as_our_errors():
            response = await self._stub.Tokenize(
                _tokenize_request(prompt), timeout=timeout_s, metadata=self._metadata
            )
        return tuple(response.token_ids)

    async def server_info(self, *, timeout_s: float = 30.0) -> inference_pb2.GetServerInfoResponse:
        """Which model is served, within which limits, by which workers."""
        with _as_our_errors():
            request = inference_pb2.GetServerInfoRequest()
            return await self._stub.GetServerInfo(request, timeout=timeout_s, metadata=self._metadata)

    async def _events(self, request: inference_pb2.GenerateRequest, timeout_s: float | None) -> _Events:
        call = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            with _as_our_errors():
                # A generator that is only left wakes the event loop to be closed.
                async with aclosing(cast("_Events", aiter(call))) as events:
                    async for event in events:
                        yield event
        finally:
            call.cancel()  # without this the server would go on for nobody; after the end it does nothing


@contextmanager
def _as_our_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None


def _generate_request(prompt: Prompt, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"unknown option {min(unknown)!r}; known: {', '.join(GenerateOptions.__annotations__)}"
        )
    request = inference_pb2.GenerateRequest(
        client_request_id=options.get("client_request_id"),
        n=options.get("n"),
        sampling=_sampling(options),
        stopping=_stopping(options),
        priority=_priority(options.get("priority")),
        cache=inference_pb2.CacheOptions(
            bypass=options.get("bypass_cache"), public_prefix=options.get("public_prefix")
        ),
    )
    num_top = options.get("num_top_logprobs")
    if num_top is not None:
        request.logprobs.num_top = num_top
    if options.get(
        "prompt_logprobs"
    ):  # the message alone, without a true field, would ask for those of the output
        request.logprobs.prompt = True
    _set_prompt(request, prompt)
    return request


def _priority(name: Priority | None) -> str | None:
    if name is not None and name not in get_args(Priority):
        raise TypeError(f"unknown priority {name!r}; known: {', '.join(get_args(Priority))}")
    return f"PRIORITY_{name.upper()}" if name else None


def _sampling(options: GenerateOptions) -> generation_pb2.SamplingParams:
    return generation_pb2.SamplingParams(
        temperature=options.get("temperature"),
        top_p=options.get("top_p"),
        top_k=options.get("top_k"),
        min_p=options.get("min_p"),
        repetition_penalty=options.get("repetition_penalty"),
        presence_penalty=options.get("presence_penalty"),
        frequency_penalty=options.get("frequency_penalty"),
        seed=options.get("seed"),
        logit_bias=options.get("logit_bias"),
    )


def _stopping(options: GenerateOptions) -> generation_pb2.StopConditions:
    return generation_pb2.StopConditions(
        max_tokens=options.get("max_tokens"),
        min_tokens=options.get("min_tokens"),
        stop=options.get("stop"),
        stop_token_ids=options.get("stop_token_ids"),
        ignore_eos=options.get("ignore_eos"),
        include_stop=options.get("include_stop"),
    )


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif _is_chat(prompt):
        request.chat.CopyFrom(_chat(prompt))
    else:
        request.token_ids.ids.extend(cast("Sequence[int]", prompt))


def _tokenize_request(prompt: str | Sequence[Message]) -> inference_pb2.TokenizeRequest:
    if isinstance(prompt, str):
        return inference_pb2.TokenizeRequest(text=prompt)
    return inference_pb2.TokenizeRequest(chat=_chat(prompt))


def _is_chat(prompt: Sequence[Message] | Sequence[int]) -> TypeGuard[Sequence[Message]]:
    return bool(prompt) and isinstance(prompt[0], Mapping)


def _chat(messages: Sequence[Message]) -> inference_pb2.Chat:
    return inference_pb2.Chat(
        messages=[inference_pb2.ChatMessage(role=each["role"], content=each["content"]) for each in messages]
    )


def _reason_name(reason: generation_pb2.FinishReason) -> str:
    return generation_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
