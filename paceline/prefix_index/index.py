"""What workers and routers ask of the prefix table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from paceline.core.block_hash import BlockHash
from paceline.core.prefix import PrefixEntry, WorkerKey

# "redis": shared by all processes. "none": there is no shared table now, and look-ups find nothing elsewhere.
IndexMode = Literal["redis", "none"]

# What a table says to a worker that lives: it knew so; it did not, and may have lost all entries; it says nothing.
Renewal = Literal["known", "forgotten", "failed"]


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Counts since the start.

    `num_failures` are calls that failed or missed their budget, `num_late` look-ups among them that missed it, `num_skipped`
    calls not tried because of earlier failures. `num_lost_entries` went unpublished or unremoved with either;
    `num_refused_entries` were not taken by a server that answered. `num_garbage` are values that no worker of ours wrote.
    """

    num_lookups: int = 0
    num_failures: int = 0
    num_late: int = 0
    num_skipped: int = 0
    num_lost_entries: int = 0
    num_refused_entries: int = 0
    num_garbage: int = 0


class PrefixLookup(Protocol):
    """The half of a prefix table that placement asks."""

    async def lookup(self, hashes: Sequence[BlockHash]) -> dict[WorkerKey, int]:
        """How many blocks of the chain each worker holds, counted from the first without a gap; zeros are left out."""


class PrefixIndex(PrefixLookup, Protocol):
    """Block hash -> who holds the block. No call raises for what happens to the table, and none lasts long."""

    @property
    def mode(self) -> IndexMode:
        """Whether the table is shared at this moment."""

    async def publish(self, worker: WorkerKey, entries: Sequence[PrefixEntry]) -> bool:
        """The worker holds these blocks now; whether the table has heard it."""

    async def remove(self, worker: WorkerKey, entries: Sequence[PrefixEntry]) -> bool:
        """The worker holds these blocks no more; one published since under another block id stays.

        Gives whether the table has heard it.
        """

    async def renew(self, worker: WorkerKey) -> Renewal:
        """The worker lives, for some seconds more; whether the table still knew."""

    async def aclose(self) -> None:
        """Lets go of connections."""

    def stats(self) -> IndexStats:
        """What happened so far."""
