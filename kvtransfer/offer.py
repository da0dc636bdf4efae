"""What an owner says of its memory, so that receivers can read its blocks without asking for their bytes."""

from dataclasses import dataclass

from paceline.runtime.pool_memory import SharedMemoryOffer


@dataclass(frozen=True, slots=True)
class NixlOffer:
    """How a NIXL agent reaches the pool: the agent's name, what it says of itself, and where the pool begins in its process."""

    agent: str
    metadata: bytes
    address: int


@dataclass(frozen=True, slots=True)
class MemoryOffer:
    """The ways into one life's pool of `num_blocks` blocks, beside asking for their bytes; None for those that there are not."""

    num_blocks: int
    block_bytes: int
    shared_memory: SharedMemoryOffer | None = None
    nixl: NixlOffer | None = None
