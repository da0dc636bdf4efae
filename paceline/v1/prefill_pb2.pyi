from paceline.v1 import engine_pb2 as _engine_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("context", "sequence", "prefix_hint")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HINT_FIELD_NUMBER: _ClassVar[int]
    context: _engine_pb2.CallContext
    sequence: _engine_pb2.SequenceSpec
    prefix_hint: _engine_pb2.PrefixHint
    def __init__(self, context: _Optional[_Union[_engine_pb2.CallContext, _Mapping]] = ..., sequence: _Optional[_Union[_engine_pb2.SequenceSpec, _Mapping]] = ..., prefix_hint: _Optional[_Union[_engine_pb2.PrefixHint, _Mapping]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("started", "progress", "result", "prompt_scored")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORED_FIELD_NUMBER: _ClassVar[int]
    started: PrefillStarted
    progress: PrefillProgress
    result: PrefillResult
    prompt_scored: _engine_pb2.PromptScored
    def __init__(self, started: _Optional[_Union[PrefillStarted, _Mapping]] = ..., progress: _Optional[_Union[PrefillProgress, _Mapping]] = ..., result: _Optional[_Union[PrefillResult, _Mapping]] = ..., prompt_scored: _Optional[_Union[_engine_pb2.PromptScored, _Mapping]] = ...) -> None: ...

class PrefillStarted(_message.Message):
    __slots__ = ("ticket", "cached_tokens", "queued_s", "num_pulled_blocks", "num_pulled_bytes")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PULLED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PULLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ticket: _engine_pb2.KvTicket
    cached_tokens: int
    queued_s: float
    num_pulled_blocks: int
    num_pulled_bytes: int
    def __init__(self, ticket: _Optional[_Union[_engine_pb2.KvTicket, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., queued_s: _Optional[float] = ..., num_pulled_blocks: _Optional[int] = ..., num_pulled_bytes: _Optional[int] = ...) -> None: ...

class PrefillProgress(_message.Message):
    __slots__ = ("computed_tokens",)
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    computed_tokens: int
    def __init__(self, computed_tokens: _Optional[int] = ...) -> None: ...

class PrefillResult(_message.Message):
    __slots__ = ("first_tokens",)
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    first_tokens: _containers.RepeatedCompositeFieldContainer[_engine_pb2.FirstToken]
    def __init__(self, first_tokens: _Optional[_Iterable[_Union[_engine_pb2.FirstToken, _Mapping]]] = ...) -> None: ...
