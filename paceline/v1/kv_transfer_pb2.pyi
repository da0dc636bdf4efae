from paceline.v1 import engine_pb2 as _engine_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeaseState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_STATE_UNSPECIFIED: _ClassVar[LeaseState]
    LEASE_STATE_VALID: _ClassVar[LeaseState]
    LEASE_STATE_EXPIRED: _ClassVar[LeaseState]
LEASE_STATE_UNSPECIFIED: LeaseState
LEASE_STATE_VALID: LeaseState
LEASE_STATE_EXPIRED: LeaseState

class PullRequest(_message.Message):
    __slots__ = ("lease_id", "boot_epoch", "fingerprint", "held_hashes")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HELD_HASHES_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    boot_epoch: int
    fingerprint: _engine_pb2.ModelFingerprint
    held_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, lease_id: _Optional[str] = ..., boot_epoch: _Optional[int] = ..., fingerprint: _Optional[_Union[_engine_pb2.ModelFingerprint, _Mapping]] = ..., held_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("chunk", "end")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    chunk: KvChunk
    end: PullEnd
    def __init__(self, chunk: _Optional[_Union[KvChunk, _Mapping]] = ..., end: _Optional[_Union[PullEnd, _Mapping]] = ...) -> None: ...

class KvChunk(_message.Message):
    __slots__ = ("ordinal", "offset", "data", "checksum")
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    ordinal: int
    offset: int
    data: bytes
    checksum: int
    def __init__(self, ordinal: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class PullEnd(_message.Message):
    __slots__ = ("first_tokens",)
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    first_tokens: _containers.RepeatedCompositeFieldContainer[_engine_pb2.FirstToken]
    def __init__(self, first_tokens: _Optional[_Iterable[_Union[_engine_pb2.FirstToken, _Mapping]]] = ...) -> None: ...

class RenewLeasesRequest(_message.Message):
    __slots__ = ("lease_ids", "boot_epoch")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    boot_epoch: int
    def __init__(self, lease_ids: _Optional[_Iterable[str]] = ..., boot_epoch: _Optional[int] = ...) -> None: ...

class RenewLeasesResponse(_message.Message):
    __slots__ = ("states",)
    STATES_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedScalarFieldContainer[LeaseState]
    def __init__(self, states: _Optional[_Iterable[_Union[LeaseState, str]]] = ...) -> None: ...

class ReleaseLeasesRequest(_message.Message):
    __slots__ = ("lease_ids", "boot_epoch", "attempts")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    boot_epoch: int
    attempts: _containers.RepeatedCompositeFieldContainer[AttemptRef]
    def __init__(self, lease_ids: _Optional[_Iterable[str]] = ..., boot_epoch: _Optional[int] = ..., attempts: _Optional[_Iterable[_Union[AttemptRef, _Mapping]]] = ...) -> None: ...

class AttemptRef(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class ReleaseLeasesResponse(_message.Message):
    __slots__ = ("states",)
    STATES_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedScalarFieldContainer[LeaseState]
    def __init__(self, states: _Optional[_Iterable[_Union[LeaseState, str]]] = ...) -> None: ...

class LeasePrefixRequest(_message.Message):
    __slots__ = ("boot_epoch", "fingerprint", "context", "token_ids")
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    boot_epoch: int
    fingerprint: _engine_pb2.ModelFingerprint
    context: _engine_pb2.CallContext
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, boot_epoch: _Optional[int] = ..., fingerprint: _Optional[_Union[_engine_pb2.ModelFingerprint, _Mapping]] = ..., context: _Optional[_Union[_engine_pb2.CallContext, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LeasePrefixResponse(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: _engine_pb2.KvTicket
    def __init__(self, ticket: _Optional[_Union[_engine_pb2.KvTicket, _Mapping]] = ...) -> None: ...
