"""What workers and routers ask of the prefix table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from paceline.core.block_hash import BlockHash
from paceline.core.prefix import PrefixEntry, WorkerKey

# "redis": shared by all processes. "none": there is no shared table now, and look-ups find nothing elsewhere.
IndexMode = Literal["redis", "none"]


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Counts since the start.

    `num_failures` are calls that failed or took too long, `num_skipped` those not tried because of earlier failures;
    `num_lost_entries` went unpublished or unremoved with either. `num_garbage` are values that no worker of ours wrote.
    """

    num_lookups: int = 0
    num_failures: int = 0
    num_skipped: int = 0
    num_lost_entries: int = 0
    num_garbage: int = 0


class PrefixIndex(Protocol):
    """Block hash -> who holds the block. No call raises for what happens to the table, and none lasts long."""

    @property
    def mode(self) -> IndexMode:
        """Whether the table is shared at this moment."""

    async def publish(self, worker: WorkerKey, entries: Sequence[PrefixEntry]) -> None:
        """The worker holds these blocks now."""

    async def remove(self, worker: WorkerKey, entries: Sequence[PrefixEntry]) -> None:
        """The worker holds these blocks no more; one published since under another block id stays."""

    async def lookup(self, hashes: Sequence[BlockHash]) -> dict[WorkerKey, int]:
        """How many blocks of the chain each worker holds, counted from the first without a gap; zeros are left out."""

    async def aclose(self) -> None:
        """Lets go of connections."""

    def stats(self) -> IndexStats:
        """What happened so far."""
