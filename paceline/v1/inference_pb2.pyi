from paceline.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_REALTIME: _ClassVar[Priority]
    PRIORITY_STANDARD: _ClassVar[Priority]
    PRIORITY_BATCH: _ClassVar[Priority]

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_DISAGGREGATED: _ClassVar[Mode]
    MODE_LOCAL: _ClassVar[Mode]

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]
PRIORITY_UNSPECIFIED: Priority
PRIORITY_REALTIME: Priority
PRIORITY_STANDARD: Priority
PRIORITY_BATCH: Priority
MODE_UNSPECIFIED: Mode
MODE_DISAGGREGATED: Mode
MODE_LOCAL: Mode
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole

class GenerateRequest(_message.Message):
    __slots__ = ("client_request_id", "text", "token_ids", "chat", "sampling", "stopping", "n", "logprobs", "priority", "cache")
    CLIENT_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    client_request_id: str
    text: str
    token_ids: _generation_pb2.TokenIds
    chat: Chat
    sampling: _generation_pb2.SamplingParams
    stopping: _generation_pb2.StopConditions
    n: int
    logprobs: _generation_pb2.LogprobOptions
    priority: Priority
    cache: CacheOptions
    def __init__(self, client_request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_generation_pb2.TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_generation_pb2.StopConditions, _Mapping]] = ..., n: _Optional[int] = ..., logprobs: _Optional[_Union[_generation_pb2.LogprobOptions, _Mapping]] = ..., priority: _Optional[_Union[Priority, str]] = ..., cache: _Optional[_Union[CacheOptions, _Mapping]] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class CacheOptions(_message.Message):
    __slots__ = ("bypass", "public_prefix")
    BYPASS_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_PREFIX_FIELD_NUMBER: _ClassVar[int]
    bypass: bool
    public_prefix: str
    def __init__(self, bypass: _Optional[bool] = ..., public_prefix: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("seq", "index", "accepted", "prefill_done", "delta", "progress", "migrated", "finish")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DONE_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    MIGRATED_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    seq: int
    index: int
    accepted: Accepted
    prefill_done: PrefillDone
    delta: Delta
    progress: Progress
    migrated: Migrated
    finish: Finish
    def __init__(self, seq: _Optional[int] = ..., index: _Optional[int] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., prefill_done: _Optional[_Union[PrefillDone, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., migrated: _Optional[_Union[Migrated, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("request_id", "mode", "queue_position")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    mode: Mode
    queue_position: int
    def __init__(self, request_id: _Optional[str] = ..., mode: _Optional[_Union[Mode, str]] = ..., queue_position: _Optional[int] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "prefill_worker", "prompt_logprobs")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    prefill_worker: str
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., prefill_worker: _Optional[str] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("text", "token_ids", "logprobs")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("computed_tokens", "prompt_tokens")
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    computed_tokens: int
    prompt_tokens: int
    def __init__(self, computed_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class Migrated(_message.Message):
    __slots__ = ("attempt", "reason")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    reason: str
    def __init__(self, attempt: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "stop", "stop_token_id", "usage", "timeline")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    reason: _generation_pb2.FinishReason
    stop: str
    stop_token_id: int
    usage: Usage
    timeline: Timeline
    def __init__(self, reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., stop: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timeline: _Optional[_Union[Timeline, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "output_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("queued_s", "prefill_s", "transfer_s", "decode_s", "preemptions", "kv_bytes", "kv_blocks", "prefill_worker", "decode_worker", "attempts", "prefix_bytes", "prefix_blocks", "predicted_ttft_s")
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    queued_s: float
    prefill_s: float
    transfer_s: float
    decode_s: float
    preemptions: int
    kv_bytes: int
    kv_blocks: int
    prefill_worker: str
    decode_worker: str
    attempts: int
    prefix_bytes: int
    prefix_blocks: int
    predicted_ttft_s: float
    def __init__(self, queued_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., preemptions: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., attempts: _Optional[int] = ..., prefix_bytes: _Optional[int] = ..., prefix_blocks: _Optional[int] = ..., predicted_ttft_s: _Optional[float] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "chat")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: Chat
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "max_prompt_tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_prompt_tokens: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., max_prompt_tokens: _Optional[int] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("model_id", "fingerprint", "version", "limits", "index_mode", "limiter_mode", "workers")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    INDEX_MODE_FIELD_NUMBER: _ClassVar[int]
    LIMITER_MODE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    fingerprint: str
    version: str
    limits: Limits
    index_mode: str
    limiter_mode: str
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    def __init__(self, model_id: _Optional[str] = ..., fingerprint: _Optional[str] = ..., version: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., index_mode: _Optional[str] = ..., limiter_mode: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_prompt_bytes", "max_prompt_tokens", "max_output_tokens", "max_model_tokens", "max_n", "max_stop_count", "max_stop_chars")
    MAX_PROMPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_N_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_CHARS_FIELD_NUMBER: _ClassVar[int]
    max_prompt_bytes: int
    max_prompt_tokens: int
    max_output_tokens: int
    max_model_tokens: int
    max_n: int
    max_stop_count: int
    max_stop_chars: int
    def __init__(self, max_prompt_bytes: _Optional[int] = ..., max_prompt_tokens: _Optional[int] = ..., max_output_tokens: _Optional[int] = ..., max_model_tokens: _Optional[int] = ..., max_n: _Optional[int] = ..., max_stop_count: _Optional[int] = ..., max_stop_chars: _Optional[int] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "role", "num_blocks", "num_free_blocks", "num_running", "num_waiting")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: WorkerRole
    num_blocks: int
    num_free_blocks: int
    num_running: int
    num_waiting: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ...) -> None: ...
