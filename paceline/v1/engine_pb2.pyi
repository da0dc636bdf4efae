from paceline.v1 import generation_pb2 as _generation_pb2
from paceline.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CallContext(_message.Message):
    __slots__ = ("request_id", "attempt", "time_budget_s", "cache_scope", "priority", "tenant", "tenant_weight")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TIME_BUDGET_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_SCOPE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TENANT_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    time_budget_s: float
    cache_scope: str
    priority: _inference_pb2.Priority
    tenant: str
    tenant_weight: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., time_budget_s: _Optional[float] = ..., cache_scope: _Optional[str] = ..., priority: _Optional[_Union[_inference_pb2.Priority, str]] = ..., tenant: _Optional[str] = ..., tenant_weight: _Optional[int] = ...) -> None: ...

class SequenceSpec(_message.Message):
    __slots__ = ("prompt_ids", "output_ids", "sampling", "max_tokens", "stop_token_ids", "ignore_eos", "bypass_cache", "min_tokens", "num_top_logprobs", "prompt_logprobs", "candidates")
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    BYPASS_CACHE_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _generation_pb2.SamplingParams
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    bypass_cache: bool
    min_tokens: int
    num_top_logprobs: int
    prompt_logprobs: bool
    candidates: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prompt_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., bypass_cache: _Optional[bool] = ..., min_tokens: _Optional[int] = ..., num_top_logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[bool] = ..., candidates: _Optional[_Iterable[int]] = ...) -> None: ...

class PromptScored(_message.Message):
    __slots__ = ("first_index", "logprobs")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    def __init__(self, first_index: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class KvTicket(_message.Message):
    __slots__ = ("lease_id", "owner_id", "owner_address", "boot_epoch", "fingerprint", "block_hashes", "num_blocks")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    owner_id: str
    owner_address: str
    boot_epoch: int
    fingerprint: ModelFingerprint
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    num_blocks: int
    def __init__(self, lease_id: _Optional[str] = ..., owner_id: _Optional[str] = ..., owner_address: _Optional[str] = ..., boot_epoch: _Optional[int] = ..., fingerprint: _Optional[_Union[ModelFingerprint, _Mapping]] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class PrefixHint(_message.Message):
    __slots__ = ("worker_id", "address", "boot_epoch", "num_tokens")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    boot_epoch: int
    num_tokens: int
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., boot_epoch: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class ModelFingerprint(_message.Message):
    __slots__ = ("weights", "tokenizer", "chat_template", "config", "dtype", "block_size", "kv_layout", "arithmetic", "kv_dtype", "kv_part", "quantization")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_PART_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    weights: str
    tokenizer: str
    chat_template: str
    config: str
    dtype: str
    block_size: int
    kv_layout: str
    arithmetic: str
    kv_dtype: str
    kv_part: str
    quantization: str
    def __init__(self, weights: _Optional[str] = ..., tokenizer: _Optional[str] = ..., chat_template: _Optional[str] = ..., config: _Optional[str] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., kv_layout: _Optional[str] = ..., arithmetic: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., kv_part: _Optional[str] = ..., quantization: _Optional[str] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "finish_reason", "logprob", "candidate")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    finish_reason: _generation_pb2.FinishReason
    logprob: _generation_pb2.TokenLogprob
    candidate: int
    def __init__(self, token_id: _Optional[int] = ..., finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., logprob: _Optional[_Union[_generation_pb2.TokenLogprob, _Mapping]] = ..., candidate: _Optional[int] = ...) -> None: ...
