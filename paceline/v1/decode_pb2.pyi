from paceline.v1 import engine_pb2 as _engine_pb2
from paceline.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeRequest(_message.Message):
    __slots__ = ("submit", "cancel")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: Cancel
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("context", "sequence", "ticket", "prefix_hint")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HINT_FIELD_NUMBER: _ClassVar[int]
    context: _engine_pb2.CallContext
    sequence: _engine_pb2.SequenceSpec
    ticket: _engine_pb2.KvTicket
    prefix_hint: _engine_pb2.PrefixHint
    def __init__(self, context: _Optional[_Union[_engine_pb2.CallContext, _Mapping]] = ..., sequence: _Optional[_Union[_engine_pb2.SequenceSpec, _Mapping]] = ..., ticket: _Optional[_Union[_engine_pb2.KvTicket, _Mapping]] = ..., prefix_hint: _Optional[_Union[_engine_pb2.PrefixHint, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "attempt", "candidate")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    candidate: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., candidate: _Optional[int] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[SequenceEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[SequenceEvent, _Mapping]]] = ...) -> None: ...

class SequenceEvent(_message.Message):
    __slots__ = ("request_id", "attempt", "started", "kv_received", "tokens", "failed", "prompt_scored", "progress")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    KV_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    started: SequenceStarted
    kv_received: KvReceived
    tokens: SequenceTokens
    failed: SequenceFailed
    prompt_scored: _engine_pb2.PromptScored
    progress: SequenceProgress
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., started: _Optional[_Union[SequenceStarted, _Mapping]] = ..., kv_received: _Optional[_Union[KvReceived, _Mapping]] = ..., tokens: _Optional[_Union[SequenceTokens, _Mapping]] = ..., failed: _Optional[_Union[SequenceFailed, _Mapping]] = ..., prompt_scored: _Optional[_Union[_engine_pb2.PromptScored, _Mapping]] = ..., progress: _Optional[_Union[SequenceProgress, _Mapping]] = ...) -> None: ...

class SequenceStarted(_message.Message):
    __slots__ = ("cached_tokens", "queued_s", "num_pulled_blocks", "num_pulled_bytes")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PULLED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PULLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    queued_s: float
    num_pulled_blocks: int
    num_pulled_bytes: int
    def __init__(self, cached_tokens: _Optional[int] = ..., queued_s: _Optional[float] = ..., num_pulled_blocks: _Optional[int] = ..., num_pulled_bytes: _Optional[int] = ...) -> None: ...

class SequenceProgress(_message.Message):
    __slots__ = ("computed_tokens",)
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    computed_tokens: int
    def __init__(self, computed_tokens: _Optional[int] = ...) -> None: ...

class KvReceived(_message.Message):
    __slots__ = ("num_blocks", "num_bytes", "duration_s")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_bytes: int
    duration_s: float
    def __init__(self, num_blocks: _Optional[int] = ..., num_bytes: _Optional[int] = ..., duration_s: _Optional[float] = ...) -> None: ...

class SequenceTokens(_message.Message):
    __slots__ = ("first_index", "token_ids", "finish_reason", "num_preemptions", "logprobs", "candidate")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _generation_pb2.FinishReason
    num_preemptions: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    candidate: int
    def __init__(self, first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., num_preemptions: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ..., candidate: _Optional[int] = ...) -> None: ...

class SequenceFailed(_message.Message):
    __slots__ = ("reason", "message", "facts")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    facts: _containers.ScalarMap[str, str]
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., facts: _Optional[_Mapping[str, str]] = ...) -> None: ...
