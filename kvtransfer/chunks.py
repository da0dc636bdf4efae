"""What travels in a hand-over, as plain values: pieces of blocks or where they lie, the end, and whether a lease held."""

import enum
from dataclasses import dataclass

from paceline.core.kv_layout import BlockId
from paceline.core.request import FirstToken

MAX_CHUNK_BYTES = 1024 * 1024
# As many pieces as fit go together. Large enough that the cost of a message vanishes, far below gRPC's limit of 4 MiB.
MAX_MESSAGE_BYTES = 3 * MAX_CHUNK_BYTES
# Blocks that one message names: some 20 bytes each.
MAX_REFERENCES = 256


@dataclass(frozen=True, slots=True)
class KvChunk:
    """Part of one block: `data` begins `offset` bytes into block `ordinal` of the lease.

    `checksum` is that of the whole block as it was when it was computed. `data` may be a view of memory that changes: take it
    before the next message is asked for.
    """

    ordinal: int
    offset: int
    data: bytes | memoryview
    checksum: int


@dataclass(frozen=True, slots=True)
class KvWritten:
    """Block `ordinal` of the lease, whole, which an engine has written to its place among the receiver's blocks itself."""

    ordinal: int
    num_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class KvReference:
    """Where block `ordinal` of the lease lies in its owner's pool; nobody else's as long as the lease holds."""

    ordinal: int
    block_id: BlockId
    checksum: int


@dataclass(frozen=True, slots=True)
class PullEnd:
    """Every block has been sent, and these are the tokens that the prefill ended with, one a candidate."""

    first_tokens: tuple[FirstToken, ...]


# What a receiver gets of a transport.
KvMessage = KvChunk | KvWritten | PullEnd
# What an owner says to a transport that wants bytes.
ChunkMessage = tuple[KvChunk, ...] | PullEnd
# What it says to one that reads its blocks itself.
ReferenceMessage = tuple[KvReference, ...] | PullEnd


class LeaseState(enum.Enum):
    """What the owner says of a lease: only under a VALID one is what was read right."""

    VALID = "valid"
    EXPIRED = "expired"
