"""Builders of the values that many tests need; every argument has a default that is right for a small test."""

from dataclasses import replace

from paceline.core import errors
from paceline.core.block_hash import BlockHash
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.kv_layout import KVLayout, LayerKV
from paceline.core.prefix import WorkerKey
from paceline.core.request import (
    BootEpoch,
    LeaseId,
    Priority,
    RequestId,
    RequestLimits,
    SamplingParams,
    SequenceId,
    SequenceSpec,
    WorkerId,
)
from paceline.core.ticket import KvTicket
from router.views import WorkerView

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0)
FINGERPRINT = ModelFingerprint(
    weights="w",
    tokenizer="t",
    chat_template="c",
    config="g",
    dtype="float32",
    block_size=BLOCK_SIZE,
    kv_dtype="float32",
    kv_layout="l",
    kv_part="0/1",
    quantization="none",
    arithmetic="fast",
)


def make_fingerprint(**changes: str | int) -> ModelFingerprint:
    """A fingerprint with some fields changed."""
    return replace(FINGERPRINT, **changes)  # type: ignore[arg-type] # each name has its field's type


def make_id(name: str = "request", attempt: int = 0) -> SequenceId:
    """The id of an attempt."""
    return SequenceId(RequestId(name), attempt)


def make_spec(
    name: str = "request",
    prompt_ids: tuple[int, ...] = (1, 2, 3, 4, 5),
    *,
    attempt: int = 0,
    output_ids: tuple[int, ...] = (),
    max_tokens: int = 8,
    sampling: SamplingParams = GREEDY,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    min_tokens: int = 0,
    num_top_logprobs: int | None = None,
    prompt_logprobs: bool = False,
    candidates: tuple[int, ...] = (0,),
    bypass_cache: bool = False,
    cache_scope: str = "",
    time_budget_s: float | None = None,
    priority: Priority = Priority.STANDARD,
    tenant: str = "",
    tenant_weight: int = 1,
) -> SequenceSpec:
    """One sequence to compute."""
    return SequenceSpec(
        sequence_id=make_id(name, attempt),
        prompt_ids=prompt_ids,
        sampling=sampling,
        max_tokens=max_tokens,
        output_ids=output_ids,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        min_tokens=min_tokens,
        num_top_logprobs=num_top_logprobs,
        prompt_logprobs=prompt_logprobs,
        candidates=candidates,
        bypass_cache=bypass_cache,
        cache_scope=cache_scope,
        time_budget_s=time_budget_s,
        priority=priority,
        tenant=tenant,
        tenant_weight=tenant_weight,
    )


def make_limits(
    *, max_model_tokens: int = 100, max_prompt_bytes: int = 1000, max_n: int = 4, vocab_size: int = 50
) -> RequestLimits:
    """Limits of a small model."""
    return RequestLimits(
        max_model_tokens=max_model_tokens,
        max_output_tokens=max_model_tokens - 1,
        max_prompt_bytes=max_prompt_bytes,
        max_n=max_n,
        vocab_size=vocab_size,
    )


def make_ticket(
    lease: str = "lease-0",
    *,
    owner_address: str = "127.0.0.1:1",
    num_full_blocks: int = 2,
    num_blocks: int = 3,
    boot_epoch: int = 11,
) -> KvTicket:
    """The right to pull a computed prompt."""
    return KvTicket(
        lease_id=LeaseId(lease),
        owner_id=WorkerId("prefill-0"),
        owner_address=owner_address,
        boot_epoch=BootEpoch(boot_epoch),
        fingerprint=FINGERPRINT,
        block_hashes=tuple(BlockHash(bytes([index]) * 16) for index in range(num_full_blocks)),
        num_blocks=num_blocks,
    )


def make_layout(num_layers: int = 2, *, block_size: int = BLOCK_SIZE, dtype: str = "float32") -> KVLayout:
    """Layers of 2 heads of 8 key and 4 value elements."""
    return KVLayout((LayerKV(2, 8, 4),) * num_layers, block_size, dtype)


def make_worker(
    name: str = "worker-0",
    *,
    epoch: int = 1,
    num_free_blocks: int = 100,
    num_running: int = 0,
    num_waiting: int = 0,
    num_pending_tokens: int = 0,
    num_assigned_tokens: int = 0,
    num_assigned_sequences: int = 0,
    draining: bool = False,
    cooling_down: bool = False,
    is_load_known: bool = True,
    fingerprint: bytes = b"",
    block_size: int = BLOCK_SIZE,
) -> WorkerView:
    """An idle worker as placement sees it."""
    return WorkerView(
        key=WorkerKey(WorkerId(name), BootEpoch(epoch)),
        address=f"{name}:1",
        fingerprint=fingerprint,
        block_size=block_size,
        num_blocks=100,
        num_free_blocks=num_free_blocks,
        num_running=num_running,
        num_waiting=num_waiting,
        num_pending_tokens=num_pending_tokens,
        draining=draining,
        num_assigned_tokens=num_assigned_tokens,
        num_assigned_sequences=num_assigned_sequences,
        cooling_down=cooling_down,
        is_load_known=is_load_known,
    )


def make_errors() -> list[errors.PacelineError]:
    """One of each error that is raised anywhere."""
    return [
        errors.BadPromptError("the prompt is empty"),
        errors.PromptTooLongError(limit=4, given=5, unit="bytes"),
        errors.BadSamplingError("sampling.top_p", "is 0"),
        errors.BadStopError("stopping.stop", "is empty"),
        errors.BadFieldError("client_request_id", "is too long"),
        errors.NotBuiltError("logprobs", "log probabilities"),
        errors.TenantUnknownError("nobody has this key"),
        errors.PeerUnknownError("the call has brought no token"),
        errors.ScopeForbiddenError("priority", "is for others"),
        errors.QueueFullError("the queue is full", retry_after_s=1.5),
        errors.RateLimitedError("tokens", 6000, retry_after_s=2.5),
        errors.SlowConsumerError("too slow", retry_after_s=0.25),
        errors.NoEndpointError("nobody is there"),
        errors.DrainingError("worker-0 is draining"),
        errors.PeerLostError("worker-0 is lost"),
        errors.EngineFailedError("the engine of worker-0 has failed"),
        errors.DeadlineError("transfer"),
        errors.CancelledRequestError("the request was cancelled"),
        errors.FingerprintMismatchError("dtype", "float32", "bfloat16"),
        errors.KvLostError("the blocks are gone"),
        errors.LeaseExpiredError("the lease is over"),
        errors.KvChecksumError(3),
        errors.UnsupportedModelError("it keeps a state"),
        errors.InvariantError("this is a bug"),
        errors.ConfigError("--model is missing"),
        errors.ProcessLostError("router", "does not come up"),
    ]
