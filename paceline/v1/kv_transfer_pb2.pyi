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
    __slots__ = ("lease_id", "boot_epoch", "fingerprint", "held_hashes", "by_reference")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HELD_HASHES_FIELD_NUMBER: _ClassVar[int]
    BY_REFERENCE_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    boot_epoch: int
    fingerprint: _engine_pb2.ModelFingerprint
    held_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    by_reference: bool
    def __init__(self, lease_id: _Optional[str] = ..., boot_epoch: _Optional[int] = ..., fingerprint: _Optional[_Union[_engine_pb2.ModelFingerprint, _Mapping]] = ..., held_hashes: _Optional[_Iterable[bytes]] = ..., by_reference: _Optional[bool] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("chunk", "end", "references", "chunks")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunk: KvChunk
    end: PullEnd
    references: KvReferences
    chunks: KvChunks
    def __init__(self, chunk: _Optional[_Union[KvChunk, _Mapping]] = ..., end: _Optional[_Union[PullEnd, _Mapping]] = ..., references: _Optional[_Union[KvReferences, _Mapping]] = ..., chunks: _Optional[_Union[KvChunks, _Mapping]] = ...) -> None: ...

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

class KvChunks(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[KvChunk]
    def __init__(self, chunks: _Optional[_Iterable[_Union[KvChunk, _Mapping]]] = ...) -> None: ...

class KvReferences(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[KvReference]
    def __init__(self, blocks: _Optional[_Iterable[_Union[KvReference, _Mapping]]] = ...) -> None: ...

class KvReference(_message.Message):
    __slots__ = ("ordinal", "block_id", "checksum")
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    ordinal: int
    block_id: int
    checksum: int
    def __init__(self, ordinal: _Optional[int] = ..., block_id: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class PullEnd(_message.Message):
    __slots__ = ("first_tokens",)
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    first_tokens: _containers.RepeatedCompositeFieldContainer[_engine_pb2.FirstToken]
    def __init__(self, first_tokens: _Optional[_Iterable[_Union[_engine_pb2.FirstToken, _Mapping]]] = ...) -> None: ...

class DescribeMemoryRequest(_message.Message):
    __slots__ = ("boot_epoch",)
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    boot_epoch: int
    def __init__(self, boot_epoch: _Optional[int] = ...) -> None: ...

class DescribeMemoryResponse(_message.Message):
    __slots__ = ("num_blocks", "block_bytes", "shared_memory", "nixl")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    block_bytes: int
    shared_memory: SharedMemoryOffer
    nixl: NixlOffer
    def __init__(self, num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., shared_memory: _Optional[_Union[SharedMemoryOffer, _Mapping]] = ..., nixl: _Optional[_Union[NixlOffer, _Mapping]] = ...) -> None: ...

class SharedMemoryOffer(_message.Message):
    __slots__ = ("pid", "fd", "num_bytes", "nonce")
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    pid: int
    fd: int
    num_bytes: int
    nonce: bytes
    def __init__(self, pid: _Optional[int] = ..., fd: _Optional[int] = ..., num_bytes: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class NixlOffer(_message.Message):
    __slots__ = ("agent", "metadata", "address")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    agent: str
    metadata: bytes
    address: int
    def __init__(self, agent: _Optional[str] = ..., metadata: _Optional[bytes] = ..., address: _Optional[int] = ...) -> None: ...

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
