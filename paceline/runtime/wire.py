"""The door: messages become valid values here, or are refused; values become messages. Nowhere else."""

import math
import secrets

from google.protobuf.message import DecodeError

from paceline.core.block_hash import BlockHash
from paceline.core.errors import (
    BadPromptError,
    BadSamplingError,
    BadStopError,
    InvariantError,
    NotBuiltError,
    PromptTooLongError,
)
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.request import (
    BootEpoch,
    ChatMessage,
    FinishReason,
    FirstToken,
    LeaseId,
    Prompt,
    Request,
    RequestId,
    RequestLimits,
    SamplingParams,
    SequenceId,
    SequenceSpec,
    StopConditions,
    TokenLogprob,
    WorkerId,
)
from paceline.core.ticket import KvTicket
from paceline.v1 import engine_pb2, generation_pb2, inference_pb2

ROLES = ("system", "user", "assistant")
MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 10.0
MAX_LOGIT_BIAS = 100.0
MAX_TOP_LOGPROBS = 20
MAX_UINT32 = 0xFFFF_FFFF

_FINISH_TO_PROTO = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.EOS: generation_pb2.FINISH_REASON_EOS,
    FinishReason.ABORTED: generation_pb2.FINISH_REASON_ABORTED,
}
_FINISH_FROM_PROTO = {proto: reason for reason, proto in _FINISH_TO_PROTO.items()}


def parse_generate(raw: bytes, limits: RequestLimits) -> Request:
    """A valid Request out of a GenerateRequest's bytes; raises InvalidRequestError or NotBuiltError."""
    message = inference_pb2.GenerateRequest()
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise BadPromptError(
            "the request is not a valid GenerateRequest: malformed, or text that is not UTF-8"
        ) from error
    _refuse_unbuilt(message)
    _check_candidates(message, limits)
    return Request(
        prompt=_parse_prompt(message, limits),
        sampling=_parse_sampling(message.sampling, limits),
        stopping=_parse_stopping(message.stopping, limits),
        client_request_id=message.client_request_id,
        bypass_cache=message.cache.bypass,
        num_top_logprobs=_parse_logprobs(message),
    )


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


def _refuse_unbuilt(message: inference_pb2.GenerateRequest) -> None:
    if message.logprobs.prompt:
        raise NotBuiltError("logprobs.prompt", "log probabilities of prompt tokens")
    if message.priority not in (inference_pb2.PRIORITY_UNSPECIFIED, inference_pb2.PRIORITY_STANDARD):
        raise NotBuiltError("priority", "classes other than PRIORITY_STANDARD")
    if message.cache.HasField("public_prefix"):
        raise NotBuiltError("cache.public_prefix", "prefixes shared between tenants")


def _check_candidates(message: inference_pb2.GenerateRequest, limits: RequestLimits) -> None:
    if not message.HasField("n"):
        return
    if message.n < 1:
        raise BadSamplingError("n", "is 0; ask for at least one candidate")
    if message.n > limits.max_n:
        raise NotBuiltError("n", f"more than {limits.max_n} candidate")


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
    if math.isnan(repetition_penalty) or not 0 < repetition_penalty <= MAX_REPETITION_PENALTY:
        problem = f"is {repetition_penalty:g}; it must be above 0 and at most {MAX_REPETITION_PENALTY:g}"
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


def finish_reason_to_proto(reason: FinishReason | None) -> generation_pb2.FinishReason:
    """FINISH_REASON_UNSPECIFIED stands for "not ended"."""
    return _FINISH_TO_PROTO[reason] if reason else generation_pb2.FINISH_REASON_UNSPECIFIED


def finish_reason_from_proto(proto: generation_pb2.FinishReason) -> FinishReason | None:
    """None while not ended."""
    return _FINISH_FROM_PROTO.get(proto)


def logprob_to_proto(logprob: TokenLogprob) -> generation_pb2.TokenLogprob:
    """Field by field."""
    top = [generation_pb2.TopLogprob(token_id=token_id, logprob=value) for token_id, value in logprob.top]
    return generation_pb2.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, top=top)


def logprob_from_proto(message: generation_pb2.TokenLogprob) -> TokenLogprob:
    """Field by field."""
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return TokenLogprob(message.token_id, message.logprob, top)


def first_token_to_proto(first: FirstToken) -> engine_pb2.FirstToken:
    """The hand-off of the first token."""
    return engine_pb2.FirstToken(
        token_id=first.token_id,
        finish_reason=finish_reason_to_proto(first.finish_reason),
        logprob=logprob_to_proto(first.logprob) if first.logprob else None,
    )


def first_token_from_proto(message: engine_pb2.FirstToken) -> FirstToken:
    """The hand-off of the first token."""
    logprob = logprob_from_proto(message.logprob) if message.HasField("logprob") else None
    return FirstToken(message.token_id, finish_reason_from_proto(message.finish_reason), logprob)


def fingerprint_to_proto(fingerprint: ModelFingerprint) -> engine_pb2.ModelFingerprint:
    """Field by field."""
    return engine_pb2.ModelFingerprint(
        weights=fingerprint.weights,
        tokenizer=fingerprint.tokenizer,
        chat_template=fingerprint.chat_template,
        config=fingerprint.config,
        dtype=fingerprint.dtype,
        block_size=fingerprint.block_size,
        kv_layout=fingerprint.kv_layout,
    )


def fingerprint_from_proto(message: engine_pb2.ModelFingerprint) -> ModelFingerprint:
    """Field by field."""
    return ModelFingerprint(
        weights=message.weights,
        tokenizer=message.tokenizer,
        chat_template=message.chat_template,
        config=message.config,
        dtype=message.dtype,
        block_size=message.block_size,
        kv_layout=message.kv_layout,
    )


def ticket_to_proto(ticket: KvTicket) -> engine_pb2.KvTicket:
    """Field by field."""
    return engine_pb2.KvTicket(
        lease_id=ticket.lease_id,
        owner_id=ticket.owner_id,
        owner_address=ticket.owner_address,
        boot_epoch=ticket.boot_epoch,
        fingerprint=fingerprint_to_proto(ticket.fingerprint),
        block_hashes=ticket.block_hashes,
        num_blocks=ticket.num_blocks,
    )


def ticket_from_proto(message: engine_pb2.KvTicket) -> KvTicket:
    """Field by field."""
    return KvTicket(
        lease_id=LeaseId(message.lease_id),
        owner_id=WorkerId(message.owner_id),
        owner_address=message.owner_address,
        boot_epoch=BootEpoch(message.boot_epoch),
        fingerprint=fingerprint_from_proto(message.fingerprint),
        block_hashes=tuple(BlockHash(block_hash) for block_hash in message.block_hashes),
        num_blocks=message.num_blocks,
    )


def spec_to_proto(spec: SequenceSpec) -> tuple[engine_pb2.CallContext, engine_pb2.SequenceSpec]:
    """A worker's piece of work, as context and sequence."""
    context = engine_pb2.CallContext(
        request_id=spec.sequence_id.request_id,
        attempt=spec.sequence_id.attempt,
        time_budget_s=spec.time_budget_s,
        cache_scope=spec.cache_scope,
    )
    params = spec.sampling
    sampling = generation_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=params.seed,
        logit_bias=dict(params.logit_bias),
    )
    sequence = engine_pb2.SequenceSpec(
        prompt_ids=spec.prompt_ids,
        output_ids=spec.output_ids,
        sampling=sampling,
        max_tokens=spec.max_tokens,
        stop_token_ids=spec.stop_token_ids,
        ignore_eos=spec.ignore_eos,
        bypass_cache=spec.bypass_cache,
        min_tokens=spec.min_tokens,
        num_top_logprobs=spec.num_top_logprobs,
    )
    return context, sequence


def spec_from_proto(context: engine_pb2.CallContext, sequence: engine_pb2.SequenceSpec) -> SequenceSpec:
    """A worker's piece of work; raises InvariantError where a router sent what it must not send."""
    spec = SequenceSpec(
        sequence_id=SequenceId(RequestId(context.request_id), context.attempt),
        prompt_ids=tuple(sequence.prompt_ids),
        output_ids=tuple(sequence.output_ids),
        sampling=_sampling_from_proto(sequence.sampling),
        max_tokens=sequence.max_tokens,
        stop_token_ids=tuple(sequence.stop_token_ids),
        ignore_eos=sequence.ignore_eos,
        bypass_cache=sequence.bypass_cache,
        min_tokens=sequence.min_tokens,
        num_top_logprobs=sequence.num_top_logprobs if sequence.HasField("num_top_logprobs") else None,
        cache_scope=context.cache_scope,
        time_budget_s=context.time_budget_s if context.HasField("time_budget_s") else None,
    )
    if not spec.prompt_ids or spec.max_tokens <= len(spec.output_ids):
        raise InvariantError(f"sequence {spec.sequence_id} has an empty prompt or no output token left")
    return spec


def _sampling_from_proto(message: generation_pb2.SamplingParams) -> SamplingParams:
    """As a router sends it, with every scalar set."""
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        seed=message.seed,
        logit_bias=tuple(sorted(message.logit_bias.items())),
    )
