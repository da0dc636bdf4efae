"""The real classes with one rule of the hand-over left out each. The kinds are those of docs/kv-transfer.md."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from decode_service.quarantine import Quarantine
from kvtransfer.chunks import LeaseState
from kvtransfer.keep_alive import Kept, _Pulse
from kvtransfer.landing import DirectLanding
from kvtransfer.leases import LeasePhase, LeaseTable
from kvtransfer.receiver import HandOver, KVReceiver, ReceivedKv
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.kv_layout import BlockId
from paceline.core.request import FirstToken, LeaseId, SequenceId
from paceline.engine.events import Event
from paceline.engine.members import Members
from paceline.engine.room import Room
from paceline.engine.sequence import Sequence as Scheduled
from paceline.engine.sequence import SequenceRole
from prefill_service.service import _Prefill
from tests.kvtransfer.small_cluster import Life, SmallCluster


@dataclass(frozen=True, slots=True)
class Mutant:
    """What stands where, and what is said when it is found."""

    kind: int
    owner: type
    name: str
    function: Callable[..., Any]
    found: str


_receive, _take, _commit, _enter = HandOver.receive, Room.take, Members.commit, Members.enter


def _release_at_once(self: Quarantine, sequence_id: SequenceId, block_ids: Sequence[BlockId]) -> None:
    """Who has given up needs its blocks no more."""
    self._worker.engine.release(sequence_id)


async def _receive_on(self: HandOver, block_ids: Sequence[BlockId], num_held: int) -> ReceivedKv:
    """Who is cancelled returns at once, and what it has begun goes on."""
    receiving = asyncio.create_task(_receive(self, block_ids, num_held))
    receiving.add_done_callback(lambda task: task.cancelled() or task.exception())
    return await asyncio.shield(receiving)


async def _wait_for_nothing(self: KVReceiver, block_ids: Sequence[BlockId]) -> None:
    """A loan that has failed is over."""


def _finish_unchecked(self: DirectLanding, checksum: int) -> None:
    """A block is what it is."""
    self._ordinal += 1
    self._offset = 0


async def _confirm_nothing(self: HandOver) -> None:
    """The last byte is there, so all is well."""


def _release_as_valid(self: LeaseTable, lease_id: LeaseId) -> LeaseState:
    """VALID, whatever became of the lease."""
    lease = self._find(lease_id)
    if lease is not None:
        self._end(lease, LeasePhase.RELEASED)
    return LeaseState.VALID


async def _renew_nothing(self: _Pulse, batch: Sequence[Kept]) -> None:
    """No heart beats."""


def _renew_without_clock(self: LeaseTable, lease_id: LeaseId) -> LeaseState:
    """Whoever asks hears whether it holds, and it ends when it would have ended."""
    return LeaseState.EXPIRED if self._find(lease_id) is None else LeaseState.VALID


def _require_nothing(self: DirectLanding) -> None:
    """What has come is enough."""


def _release_nothing(self: SmallCluster, life: Life, sequence_id: SequenceId) -> None:
    """The router leaves."""


def _close_nothing(self: _Prefill) -> None:
    """The stream is over, so nobody is left to give anything back."""


async def _wait_for_ever(self: HandOver, pulling: "asyncio.Task[tuple[FirstToken, ...]]") -> None:
    """It will come."""
    await asyncio.wait({pulling})


def _take_one(self: Room, sequence: Scheduled, *, from_cushion: bool) -> bool:
    """Who does not fit takes what there is, and waits for the rest."""
    is_taken = _take(self, sequence, from_cushion=from_cushion)
    is_parked = sequence.role is SequenceRole.AWAIT_KV and sequence.blocks.is_empty
    if not is_taken and is_parked and self._pool.num_available:
        sequence.blocks.tables[0].block_ids += self._pool.allocate(1)
    return is_taken


def _commit_and_stay_remote(
    self: Members, sequence_id: SequenceId, first_tokens: Sequence[FirstToken]
) -> None:
    """It runs, and is still one whose KV comes from outside."""
    _commit(self, sequence_id, first_tokens)
    for sequence in self.families.get(sequence_id, ()):
        sequence.role = SequenceRole.AWAIT_KV


def _enter_published(self: Members, sequence: Scheduled) -> Event | None:
    """The blocks of a prompt can be found as soon as there is room for it."""
    event = _enter(self, sequence)
    if sequence.role is SequenceRole.PREFILL_ONLY:
        self._room.extend_hashes(sequence)
        sequence.blocks.seal(sequence.num_tokens, sequence.chain)
    return event


def _compare_nothing(self: ModelFingerprint, theirs: ModelFingerprint, names: Iterable[str]) -> None:
    """All workers are alike."""


def _release_once(self: LeaseTable, lease_id: LeaseId) -> LeaseState:
    """Nobody releases twice."""
    lease = self._find(lease_id)
    assert lease is not None, "released twice"
    self._end(lease, LeasePhase.RELEASED)
    return LeaseState.VALID


MUTANTS = {
    "freed while it is written": Mutant(
        1,
        Quarantine,
        "release_when_settled",
        _release_at_once,
        "is written though nobody has reserved it|wrong bytes",
    ),
    "a pull goes on after its cancel": Mutant(
        1,
        HandOver,
        "receive",
        _receive_on,
        "is written though nobody has reserved it|wrong bytes",
    ),
    "a loan's blocks are used while they are written": Mutant(
        1,
        KVReceiver,
        "until_settled",
        _wait_for_nothing,
        "is written though nobody has reserved it|wrong",
    ),
    "no checksum": Mutant(
        1,
        DirectLanding,
        "_finish_block",
        _finish_unchecked,
        "wrong",
    ),
    "commit without asking": Mutant(2, HandOver, "_confirm", _confirm_nothing, "without the owner's word"),
    "always valid": Mutant(
        2,
        LeaseTable,
        "_release",
        _release_as_valid,
        "without the owner's word",
    ),
    "no heartbeat": Mutant(2, _Pulse, "_renew", _renew_nothing, "expired though it was renewed"),
    "a renewal that starts no clock": Mutant(
        2, LeaseTable, "_renew", _renew_without_clock, "expired though it was renewed"
    ),
    "a part is enough": Mutant(
        3,
        DirectLanding,
        "require_all",
        _require_nothing,
        "wrong",
    ),
    "the router owes nothing": Mutant(
        4,
        SmallCluster,
        "release_for_router",
        _release_nothing,
        "left to its clock",
    ),
    "a closed stream gives nothing back": Mutant(4, _Prefill, "close", _close_nothing, "is leaked"),
    "no deadline": Mutant(
        5,
        HandOver,
        "_until_done",
        _wait_for_ever,
        "waits for ever",
    ),
    "hold and wait": Mutant(6, Room, "take", _take_one, "a waiting sequence holds blocks"),
    "asked for again": Mutant(7, Members, "commit", _commit_and_stay_remote, "waits for ever"),
    "published when scheduled": Mutant(8, Members, "enter", _enter_published, "wrong|failed for no reason"),
    "no fingerprint": Mutant(
        9, ModelFingerprint, "_require_equal", _compare_nothing, "workers that compute differently"
    ),
    # To whoever waits for the answer, or, when that comes late, in a task that nobody waits for.
    "a second release asserts": Mutant(
        10, LeaseTable, "_release", _release_once, "a bug, by its own word|nobody caught"
    ),
}
