"""Who may read the blocks of a computed prompt, and until when: the owner's side of a hand-over.

    OPEN ───complete───▶ COMPLETE ──release──▶ RELEASED
      ├──release──▶ RELEASED     └───sweep───▶ EXPIRED
      └───drop────▶ DROPPED

An open lease is held by the Prefill stream; its clock starts when the last block is computed. It knows no blocks'
bytes and frees none: `on_end` tells the one who does.
"""

import asyncio
import enum
import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvtransfer.chunks import LeaseState
from paceline.core.block_hash import BlockHash
from paceline.core.clock import Clock, monotonic
from paceline.core.errors import KvLostError, LeaseExpiredError
from paceline.core.request import FirstToken, LeaseId, SequenceId
from paceline.core.ticket import ReadyBlock


class LeasePhase(enum.Enum):
    """Where a lease stands; the last three are ends."""

    OPEN = "open"
    COMPLETE = "complete"
    RELEASED = "released"
    EXPIRED = "expired"
    DROPPED = "dropped"


_ENDS = (LeasePhase.RELEASED, LeasePhase.EXPIRED, LeasePhase.DROPPED)


@dataclass(slots=True, eq=False)
class Lease:
    """One sequence's blocks, in order. Only its table changes it."""

    lease_id: LeaseId
    sequence_id: SequenceId
    num_blocks: int
    # Of the full blocks; a partial last one has none.
    block_hashes: tuple[BlockHash, ...]
    # Those that are computed, which are always the first ones; they can be read while later ones are not.
    ready: list[ReadyBlock] = field(default_factory=list)
    # One a candidate, once the prefill has its result; none for a prefix that is lent out of the cache.
    first_tokens: tuple[FirstToken, ...] = ()
    phase: LeasePhase = LeasePhase.OPEN
    expires_at_s: float = math.inf
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class LeaseStats:
    """Counts since the start, apart from `num_active`."""

    num_active: int
    num_granted: int
    num_released: int
    num_expired: int
    num_dropped: int
    num_late_releases: int


class LeaseTable:
    """Every lease of a worker, owned by its event loop.

    Each lease that is granted ends exactly once, and `on_end` is then called exactly once: nobody will read the blocks
    any more. The sequence may still be computing, when its reader gave up early. What concerns a lease that has ended
    or was never granted is ignored.
    """

    def __init__(
        self, on_end: Callable[[SequenceId], None], *, ttl_s: float = 30.0, clock: Clock = monotonic
    ) -> None:
        self._on_end = on_end
        self._ttl_s = ttl_s
        self._clock = clock
        self._leases: dict[LeaseId, Lease] = {}
        self._num_ended = dict.fromkeys(_ENDS, 0)
        self._num_granted = 0
        self._num_late_releases = 0

    def grant(self, sequence_id: SequenceId, num_blocks: int, block_hashes: Sequence[BlockHash]) -> Lease:
        """An open lease on all blocks of a prompt, none of which is ready yet."""
        assert len(block_hashes) <= num_blocks, "more hashes than blocks"
        lease_id = LeaseId(secrets.token_hex(16))
        lease = Lease(lease_id, sequence_id, num_blocks, tuple(block_hashes))
        self._leases[lease_id] = lease
        self._num_granted += 1
        return lease

    def progress(self, lease_id: LeaseId, blocks: Sequence[ReadyBlock]) -> bool:
        """The next blocks are computed. False when the lease has ended, and nobody wants them."""
        lease = self._find(lease_id)
        if lease is None:
            return False
        assert lease.phase is LeasePhase.OPEN, "a complete lease makes no progress"
        assert len(lease.ready) + len(blocks) <= lease.num_blocks, "more ready blocks than blocks"
        lease.ready.extend(blocks)
        _wake_readers(lease)
        return True

    def complete(self, lease_id: LeaseId, first_tokens: Sequence[FirstToken]) -> bool:
        """All blocks are ready and the prefill, if it is one's, has its result: the clock starts. False when the lease has ended."""
        lease = self._find(lease_id)
        if lease is None:
            return False
        assert lease.phase is LeasePhase.OPEN, "a lease completes once"
        assert len(lease.ready) == lease.num_blocks, "a lease completes with all of its blocks ready"
        lease.first_tokens = tuple(first_tokens)
        lease.phase = LeasePhase.COMPLETE
        lease.expires_at_s = self._clock() + self._ttl_s
        _wake_readers(lease)
        return True

    def drop(self, lease_id: LeaseId) -> None:
        """The prefill ended without a result. Harmless on a complete lease, which its reader or its clock ends."""
        lease = self._find(lease_id)
        if lease is not None and lease.phase is LeasePhase.OPEN:
            self._end(lease, LeasePhase.DROPPED)

    def renew(self, lease_ids: Iterable[LeaseId]) -> list[LeaseState]:
        """Starts the clocks of complete leases anew; says of each whether it holds."""
        return [self._renew(lease_id) for lease_id in lease_ids]

    def release(self, lease_ids: Iterable[LeaseId]) -> list[LeaseState]:
        """Ends leases; VALID, once, for each that held until now."""
        return [self._release(lease_id) for lease_id in lease_ids]

    def release_sequence(self, sequence_id: SequenceId) -> None:
        """Ends the lease of a sequence, if there is one."""
        for lease in [lease for lease in self._leases.values() if lease.sequence_id == sequence_id]:
            self._end(lease, LeasePhase.RELEASED)

    def sweep(self) -> int:
        """Ends the leases whose time is over, and says how many."""
        now_s = self._clock()
        due = [lease for lease in self._leases.values() if lease.expires_at_s <= now_s]
        for lease in due:
            self._end(lease, LeasePhase.EXPIRED)
        return len(due)

    def get(self, lease_id: LeaseId) -> Lease:
        """The lease, for a reader; raises KvLostError when it has ended or was never granted."""
        lease = self._find(lease_id)
        if lease is None:
            raise KvLostError(f"lease {lease_id} is not held here; prefill again")
        return lease

    def require_held(self, lease: Lease) -> None:
        """Raises LeaseExpiredError or KvLostError when the lease has ended. A reader asks after each wait."""
        self._find(lease.lease_id)
        if lease.phase is LeasePhase.EXPIRED:
            raise LeaseExpiredError(f"lease {lease.lease_id} expired while it was read; prefill again")
        if lease.phase in _ENDS:
            raise KvLostError(f"lease {lease.lease_id} was {lease.phase.value} while it was read")

    async def wait_ready(self, lease: Lease, ordinal: int) -> ReadyBlock:
        """Block `ordinal` as soon as it is computed; raises as `require_held` does."""
        self.require_held(lease)
        while len(lease.ready) <= ordinal:
            await lease.changed.wait()
            self.require_held(lease)
        return lease.ready[ordinal]

    async def wait_complete(self, lease: Lease) -> tuple[FirstToken, ...]:
        """The first token of each candidate as soon as the prefill has them; raises as `require_held` does."""
        self.require_held(lease)
        while lease.phase is LeasePhase.OPEN:
            await lease.changed.wait()
            self.require_held(lease)
        return lease.first_tokens

    def stats(self) -> LeaseStats:
        """How many leases there are and were."""
        return LeaseStats(
            num_active=len(self._leases),
            num_granted=self._num_granted,
            num_released=self._num_ended[LeasePhase.RELEASED],
            num_expired=self._num_ended[LeasePhase.EXPIRED],
            num_dropped=self._num_ended[LeasePhase.DROPPED],
            num_late_releases=self._num_late_releases,
        )

    def check_invariants(self) -> None:
        """Asserts what must hold between any two calls."""
        assert self._num_granted == len(self._leases) + sum(self._num_ended.values())
        sequence_ids = {lease.sequence_id for lease in self._leases.values()}
        assert len(sequence_ids) == len(self._leases), "two leases of one sequence"
        for lease in self._leases.values():
            is_complete = lease.phase is LeasePhase.COMPLETE
            assert is_complete or lease.phase is LeasePhase.OPEN, "an ended lease is still in the table"
            assert is_complete == math.isfinite(lease.expires_at_s)
            assert is_complete or not lease.first_tokens, "an open lease has no result"
            assert (
                len(lease.ready) == lease.num_blocks if is_complete else len(lease.ready) <= lease.num_blocks
            )

    def _find(self, lease_id: LeaseId) -> Lease | None:
        """The lease if it holds now: one whose time is over ends here, swept or not."""
        lease = self._leases.get(lease_id)
        if lease is None or self._clock() < lease.expires_at_s:
            return lease
        self._end(lease, LeasePhase.EXPIRED)
        return None

    def _renew(self, lease_id: LeaseId) -> LeaseState:
        lease = self._find(lease_id)
        if lease is None:
            return LeaseState.EXPIRED
        if lease.phase is LeasePhase.COMPLETE:
            lease.expires_at_s = self._clock() + self._ttl_s
        return LeaseState.VALID

    def _release(self, lease_id: LeaseId) -> LeaseState:
        lease = self._find(lease_id)
        if lease is None:
            self._num_late_releases += 1
            return LeaseState.EXPIRED
        self._end(lease, LeasePhase.RELEASED)
        return LeaseState.VALID

    def _end(self, lease: Lease, phase: LeasePhase) -> None:
        del self._leases[lease.lease_id]
        lease.phase = phase
        self._num_ended[phase] += 1
        # Never replaced: whoever still waits sees the end, now or later.
        lease.changed.set()
        self._on_end(lease.sequence_id)


async def sweep_forever(leases: LeaseTable, *, every_s: float = 1.0) -> None:
    """Ends expired leases on time also when nothing else happens; run it as a task beside the server."""
    while True:
        await asyncio.sleep(every_s)
        leases.sweep()


def _wake_readers(lease: Lease) -> None:
    """Those who wait look again; those who come later wait for the next change."""
    changed, lease.changed = lease.changed, asyncio.Event()
    changed.set()
