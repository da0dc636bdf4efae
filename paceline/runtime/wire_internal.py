"""Values as messages between our own processes, and back: what a router gives to a worker, and what comes of it."""

from collections.abc import Iterable

from paceline.core.block_hash import BlockHash
from paceline.core.errors import InvariantError
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.prefix import PrefixHint, PrefixOwner
from paceline.core.request import (
    MAX_LABEL_CHARS,
    BootEpoch,
    FinishReason,
    FirstToken,
    LeaseId,
    Priority,
    RequestId,
    SamplingParams,
    SequenceId,
    SequenceSpec,
    TokenLogprob,
    WorkerId,
)
from paceline.core.ticket import KvTicket
from paceline.v1 import decode_pb2, engine_pb2, generation_pb2, inference_pb2, prefill_pb2

# More than any router asks for; each is a sequence of its own.
_MAX_CANDIDATES = 256

_FINISH_TO_PROTO = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.EOS: generation_pb2.FINISH_REASON_EOS,
    FinishReason.ABORTED: generation_pb2.FINISH_REASON_ABORTED,
}
_FINISH_FROM_PROTO = {proto: reason for reason, proto in _FINISH_TO_PROTO.items()}
_PRIORITY_TO_PROTO = {
    Priority.REALTIME: inference_pb2.PRIORITY_REALTIME,
    Priority.STANDARD: inference_pb2.PRIORITY_STANDARD,
    Priority.BATCH: inference_pb2.PRIORITY_BATCH,
}
_PRIORITY_FROM_PROTO = {
    inference_pb2.PRIORITY_UNSPECIFIED: Priority.STANDARD,
    **{proto: priority for priority, proto in _PRIORITY_TO_PROTO.items()},
}


def finish_reason_to_proto(reason: FinishReason | None) -> generation_pb2.FinishReason:
    """FINISH_REASON_UNSPECIFIED stands for "not ended"."""
    return _FINISH_TO_PROTO[reason] if reason else generation_pb2.FINISH_REASON_UNSPECIFIED


def finish_reason_from_proto(proto: generation_pb2.FinishReason) -> FinishReason | None:
    """None while not ended."""
    return _FINISH_FROM_PROTO.get(proto)


def priority_to_proto(priority: Priority) -> inference_pb2.Priority:
    """Never PRIORITY_UNSPECIFIED."""
    return _PRIORITY_TO_PROTO[priority]


def priority_from_proto(proto: inference_pb2.Priority) -> Priority | None:
    """None for a number that no priority has; PRIORITY_UNSPECIFIED is the usual one."""
    return _PRIORITY_FROM_PROTO.get(proto)


def logprob_to_proto(logprob: TokenLogprob) -> generation_pb2.TokenLogprob:
    """Field by field."""
    top = [generation_pb2.TopLogprob(token_id=token_id, logprob=value) for token_id, value in logprob.top]
    return generation_pb2.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, top=top)


def logprob_from_proto(message: generation_pb2.TokenLogprob) -> TokenLogprob:
    """Field by field."""
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return TokenLogprob(message.token_id, message.logprob, top)


def prompt_scored_to_proto(first_index: int, logprobs: Iterable[TokenLogprob]) -> engine_pb2.PromptScored:
    """The log probabilities of the prompt's tokens from place `first_index` on."""
    return engine_pb2.PromptScored(first_index=first_index, logprobs=map(logprob_to_proto, logprobs))


def first_token_to_proto(first: FirstToken) -> engine_pb2.FirstToken:
    """The hand-off of the first token."""
    return engine_pb2.FirstToken(
        token_id=first.token_id,
        finish_reason=finish_reason_to_proto(first.finish_reason),
        logprob=logprob_to_proto(first.logprob) if first.logprob else None,
        candidate=first.candidate,
    )


def first_token_from_proto(message: engine_pb2.FirstToken) -> FirstToken:
    """The hand-off of the first token."""
    logprob = logprob_from_proto(message.logprob) if message.HasField("logprob") else None
    finish_reason = finish_reason_from_proto(message.finish_reason)
    return FirstToken(message.token_id, finish_reason, logprob, message.candidate)


def fingerprint_to_proto(fingerprint: ModelFingerprint) -> engine_pb2.ModelFingerprint:
    """Field by field."""
    return engine_pb2.ModelFingerprint(
        weights=fingerprint.weights,
        tokenizer=fingerprint.tokenizer,
        chat_template=fingerprint.chat_template,
        config=fingerprint.config,
        dtype=fingerprint.dtype,
        kv_dtype=fingerprint.kv_dtype,
        kv_layout=fingerprint.kv_layout,
        kv_part=fingerprint.kv_part,
        block_size=fingerprint.block_size,
        arithmetic=fingerprint.arithmetic,
        quantization=fingerprint.quantization,
    )


def fingerprint_from_proto(message: engine_pb2.ModelFingerprint) -> ModelFingerprint:
    """Field by field."""
    return ModelFingerprint(
        weights=message.weights,
        tokenizer=message.tokenizer,
        chat_template=message.chat_template,
        config=message.config,
        dtype=message.dtype,
        kv_dtype=message.kv_dtype,
        kv_layout=message.kv_layout,
        kv_part=message.kv_part,
        block_size=message.block_size,
        arithmetic=message.arithmetic,
        quantization=message.quantization,
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
        priority=priority_to_proto(spec.priority),
        tenant=spec.tenant,
        tenant_weight=spec.tenant_weight,
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
        prompt_logprobs=spec.prompt_logprobs,
        candidates=spec.candidates,
    )
    return context, sequence


def spec_from_proto(context: engine_pb2.CallContext, sequence: engine_pb2.SequenceSpec) -> SequenceSpec:
    """A worker's piece of work; raises InvariantError where a router sent what it must not send."""
    priority = priority_from_proto(context.priority)
    if priority is None:
        raise InvariantError(f"request {context.request_id} has an unknown priority, {context.priority}")
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
        prompt_logprobs=sequence.prompt_logprobs,
        candidates=tuple(sequence.candidates),
        cache_scope=context.cache_scope,
        time_budget_s=context.time_budget_s if context.HasField("time_budget_s") else None,
        priority=priority,
        tenant=context.tenant,
        tenant_weight=context.tenant_weight or 1,
    )
    if not spec.prompt_ids or spec.max_tokens <= len(spec.output_ids):
        raise InvariantError(f"sequence {spec.sequence_id} has an empty prompt or no output token left")
    if max(map(len, (context.request_id, context.tenant, context.cache_scope))) > MAX_LABEL_CHARS:
        raise InvariantError(f"a name of sequence {spec.sequence_id.attempt} is too long")
    if len(spec.candidates) > _MAX_CANDIDATES:
        raise InvariantError(f"sequence {spec.sequence_id} has more than {_MAX_CANDIDATES} candidates")
    if not spec.candidates or spec.candidates != tuple(sorted(set(spec.candidates))):
        raise InvariantError(f"sequence {spec.sequence_id} has no candidates, or not in ascending order")
    return spec


def prefix_hint_to_proto(hint: PrefixHint | None) -> engine_pb2.PrefixHint | None:
    """Who may have a prompt's beginning cached."""
    if hint is None:
        return None
    owner = hint.owner
    return engine_pb2.PrefixHint(
        worker_id=owner.worker_id,
        address=owner.address,
        boot_epoch=owner.boot_epoch,
        num_tokens=hint.num_tokens,
    )


def prefix_hint_from_proto(
    message: prefill_pb2.PrefillRequest | decode_pb2.Submit,
) -> PrefixHint | None:
    """Who may have a prompt's beginning cached, if the router has said so."""
    if not message.HasField("prefix_hint"):
        return None
    hint = message.prefix_hint
    owner = PrefixOwner(WorkerId(hint.worker_id), hint.address, BootEpoch(hint.boot_epoch))
    return PrefixHint(owner, hint.num_tokens)


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
