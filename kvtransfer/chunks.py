"""What travels in a hand-over, as plain values: pieces of blocks, the end, and whether a lease held."""

import enum
from dataclasses import dataclass

from paceline.core.request import FirstToken

# Large enough that the cost of a message vanishes, far below gRPC's limit of 4 MiB.
MAX_CHUNK_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True)
class KvChunk:
    """Part of one block: `data` begins `offset` bytes into block `ordinal` of the lease.

    `checksum` is that of the whole block as it was when it was computed.
    """

    ordinal: int
    offset: int
    data: bytes
    checksum: int


@dataclass(frozen=True, slots=True)
class PullEnd:
    """Every block has been sent, and these are the tokens that the prefill ended with, one a candidate."""

    first_tokens: tuple[FirstToken, ...]


KvMessage = KvChunk | PullEnd


class LeaseState(enum.Enum):
    """What the owner says of a lease: only under a VALID one is what was read right."""

    VALID = "valid"
    EXPIRED = "expired"
