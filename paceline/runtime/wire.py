"""The public door: what a client sends becomes valid values here, or is refused. Nowhere else."""

import math
import secrets

from google.protobuf.message import DecodeError

from paceline.core.errors import (
    BadFieldError,
    BadPromptError,
    BadSamplingError,
    BadStopError,
    PromptTooLongError,
)
from paceline.core.request import (
    ChatMessage,
    Priority,
    Prompt,
    Request,
    RequestLimits,
    SamplingParams,
    StopConditions,
)
from paceline.runtime.wire_internal import priority_from_proto
from paceline.v1 import generation_pb2, inference_pb2

ROLES = ("system", "user", "assistant")
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 10.0
MAX_LOGIT_BIAS = 100.0
MAX_TOP_LOGPROBS = 20
MAX_UINT32 = 0xFFFF_FFFF
# Log probabilities of a prompt come in one message, and 4 MiB is what gRPC clients take unless told otherwise; the rest of the
# message needs less than 1 KiB. With every number at its longest, an entry takes 14 bytes and each alternative 13.
MAX_PROMPT_LOGPROB_BYTES = (4 << 20) - (1 << 10)
_LOGPROB_BYTES = 14
_TOP_LOGPROB_BYTES = 13


def parse_generate(raw: bytes, limits: RequestLimits) -> Request:
    """A valid Request out of a GenerateRequest's bytes; raises InvalidRequestError."""
    message = inference_pb2.GenerateRequest()
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise BadPromptError(
            "the request is not a valid GenerateRequest: malformed, or text that is not UTF-8"
        ) from error
    return Request(
        prompt=_parse_prompt(message, limits),
        sampling=_parse_sampling(message.sampling, limits),
        stopping=_parse_stopping(message.stopping, limits),
        client_request_id=_parse_label(message, limits),
        bypass_cache=message.cache.bypass,
        public_prefix=message.cache.public_prefix if message.cache.HasField("public_prefix") else None,
        num_top_logprobs=_parse_logprobs(message),
        prompt_logprobs=message.logprobs.prompt,
        n=_parse_n(message, limits),
        priority=_parse_priority(message),
    )


def _parse_label(message: inference_pb2.GenerateRequest, limits: RequestLimits) -> str:
    given = len(message.client_request_id)
    if given > limits.max_label_chars:
        problem = f"has {given} characters, and the limit is {limits.max_label_chars}"
        raise BadFieldError("client_request_id", problem)
    return message.client_request_id


def parse_tokenize(raw: bytes, limits: RequestLimits) -> Prompt:
    """The text or chat of a TokenizeRequest's bytes; raises InvalidRequestError."""
    message = inference_pb2.TokenizeRequest()
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise BadPromptError(
            "the request is not a valid TokenizeRequest: malformed, or text that is not UTF-8"
        ) from error
    if message.WhichOneof("input") == "chat":
        return _parse_chat(message.chat, limits)
    return _parse_text(message.text, limits)


def check_prompt_logprobs(request: Request, num_prompt_tokens: int) -> None:
    """Raises BadSamplingError when the log probabilities of so long a prompt could pass the limit of a message."""
    if not request.prompt_logprobs:
        return
    num_top = request.num_top_logprobs or 0
    most = MAX_PROMPT_LOGPROB_BYTES // (_LOGPROB_BYTES + num_top * _TOP_LOGPROB_BYTES)
    if num_prompt_tokens - 1 > most:
        problem = (
            f"asks for {num_prompt_tokens - 1} entries with {num_top} alternatives each, and {most} such entries fit into "
            "a message; ask for fewer alternatives or send a shorter prompt"
        )
        raise BadSamplingError("logprobs.prompt", problem)


def _parse_n(message: inference_pb2.GenerateRequest, limits: RequestLimits) -> int:
    if not message.HasField("n"):
        return 1
    if not 1 <= message.n <= limits.max_n:
        raise BadSamplingError("n", f"is {message.n}; it must be 1 to {limits.max_n}")
    return message.n


def _parse_priority(message: inference_pb2.GenerateRequest) -> Priority:
    priority = priority_from_proto(message.priority)
    if priority is None:
        known = ", ".join(sorted(inference_pb2.Priority.keys()))
        raise BadSamplingError("priority", f"is {message.priority}, which is none of {known}")
    return priority


def _parse_prompt(message: inference_pb2.GenerateRequest, limits: RequestLimits) -> Prompt:
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return _parse_text(message.text, limits)
    if kind == "chat":
        return _parse_chat(message.chat, limits)
    return _parse_token_ids(message.token_ids, limits)


def _parse_text(text: str, limits: RequestLimits) -> str:
    if not text:
        raise BadPromptError("the prompt is empty; set text, token_ids or chat")
    _check_bytes(len(text.encode()), limits)
    return text


def _parse_chat(chat: inference_pb2.Chat, limits: RequestLimits) -> tuple[ChatMessage, ...]:
    if not chat.messages:
        raise BadPromptError("the chat has no message")
    # Each message takes a token at least; laying out a million empty ones would take minutes.
    if len(chat.messages) > limits.max_prompt_tokens:
        raise PromptTooLongError(limit=limits.max_prompt_tokens, given=len(chat.messages), unit="messages")
    for message in chat.messages:
        if message.role not in ROLES:
            raise BadPromptError(f"a chat message has an unknown role; use one of {', '.join(ROLES)}")
    _check_bytes(sum(len(message.content.encode()) for message in chat.messages), limits)
    return tuple(ChatMessage(message.role, message.content) for message in chat.messages)


def _parse_token_ids(message: generation_pb2.TokenIds, limits: RequestLimits) -> tuple[int, ...]:
    if not message.ids:
        raise BadPromptError("the prompt is empty; set text, token_ids or chat")
    if len(message.ids) > limits.max_prompt_tokens:
        raise PromptTooLongError(limit=limits.max_prompt_tokens, given=len(message.ids))
    return tuple(message.ids)


def _check_bytes(num_bytes: int, limits: RequestLimits) -> None:
    if num_bytes > limits.max_prompt_bytes:
        raise PromptTooLongError(limit=limits.max_prompt_bytes, given=num_bytes, unit="bytes")


def _parse_sampling(message: generation_pb2.SamplingParams, limits: RequestLimits) -> SamplingParams:
    top_p = message.top_p if message.HasField("top_p") else 1.0
    if math.isnan(top_p) or not 0 < top_p <= 1:
        raise BadSamplingError("sampling.top_p", f"is {top_p:g}; it must be above 0 and at most 1")
    repetition_penalty = message.repetition_penalty if message.HasField("repetition_penalty") else 1.0
    if (
        math.isnan(repetition_penalty)
        or not MIN_REPETITION_PENALTY <= repetition_penalty <= MAX_REPETITION_PENALTY
    ):
        problem = (
            f"is {repetition_penalty:g}; it must be {MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}"
        )
        raise BadSamplingError("sampling.repetition_penalty", problem)
    return SamplingParams(
        temperature=_in_range(message, "temperature", 0, MAX_TEMPERATURE, absent=1.0),
        top_p=top_p,
        top_k=message.top_k,
        min_p=_in_range(message, "min_p", 0, 1),
        repetition_penalty=repetition_penalty,
        presence_penalty=_in_range(message, "presence_penalty", -2, 2),
        frequency_penalty=_in_range(message, "frequency_penalty", -2, 2),
        seed=message.seed if message.HasField("seed") else secrets.randbits(64),
        logit_bias=_parse_bias(message, limits),
    )


def _in_range(
    message: generation_pb2.SamplingParams, field: str, least: float, most: float, *, absent: float = 0.0
) -> float:
    value: float = getattr(message, field) if message.HasField(field) else absent
    # Written so that NaN is out of every range.
    if not least <= value <= most:
        raise BadSamplingError(f"sampling.{field}", f"is {value:g}; it must be {least:g} to {most:g}")
    return value


def _parse_bias(
    message: generation_pb2.SamplingParams, limits: RequestLimits
) -> tuple[tuple[int, float], ...]:
    if len(message.logit_bias) > limits.max_logit_bias:
        raise BadSamplingError("sampling.logit_bias", f"names more than {limits.max_logit_bias} tokens")
    for token_id, bias in message.logit_bias.items():
        if token_id >= limits.vocab_size:
            raise BadSamplingError(
                "sampling.logit_bias", f"names token {token_id}, which the model does not have"
            )
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise BadSamplingError("sampling.logit_bias", f"holds {bias:g}; the limit is {MAX_LOGIT_BIAS:g}")
    return tuple(sorted(message.logit_bias.items()))


def _parse_logprobs(message: inference_pb2.GenerateRequest) -> int | None:
    if not message.HasField("logprobs"):
        return None
    if message.logprobs.num_top > MAX_TOP_LOGPROBS:
        problem = f"is {message.logprobs.num_top}; it must be 0 to {MAX_TOP_LOGPROBS}"
        raise BadSamplingError("logprobs.num_top", problem)
    return message.logprobs.num_top


def _parse_stopping(message: generation_pb2.StopConditions, limits: RequestLimits) -> StopConditions:
    max_tokens = message.max_tokens if message.HasField("max_tokens") else None
    if max_tokens is not None and not 1 <= max_tokens <= limits.max_output_tokens:
        raise BadStopError(
            "stopping.max_tokens", f"is {max_tokens}; it must be 1 to {limits.max_output_tokens}"
        )
    least_most = limits.max_output_tokens if max_tokens is None else max_tokens
    if message.min_tokens > least_most:
        raise BadStopError(
            "stopping.min_tokens", f"is {message.min_tokens}, more than the {least_most} that may come"
        )
    if max(len(message.stop), len(message.stop_token_ids)) > limits.max_stop_count:
        raise BadStopError("stopping", f"has more than {limits.max_stop_count} stop strings or stop tokens")
    for token_id in message.stop_token_ids:
        if token_id >= limits.vocab_size:
            raise BadStopError(
                "stopping.stop_token_ids", f"has {token_id}; the vocabulary has {limits.vocab_size} tokens"
            )
    for stop in message.stop:
        if not 1 <= len(stop) <= limits.max_stop_chars:
            raise BadStopError(
                "stopping.stop", f"has a string that is not 1 to {limits.max_stop_chars} characters long"
            )
    return StopConditions(
        max_tokens=max_tokens,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        include_stop=message.include_stop,
    )
