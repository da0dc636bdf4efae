"""Who waits in one lane, in the order of their turn: class, then the tenant that was served least, then the policy."""

import heapq
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator, KeysView
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.block_hash import BlockHash
from paceline.core.request import Priority
from paceline.engine.policies import TurnPolicy
from paceline.engine.sequence import Sequence, SequenceRole

# After so many steps without a change those that were refused are asked for again.
RETRY_STEPS = 16
# A number, and the order of coming where that is equal.
_Entry = tuple[float, int, Sequence]


class RoomNow(NamedTuple):
    """What there is in a step: blocks that nobody holds, and the names of those that are cached."""

    step: int
    num_available: int
    cached: KeysView[BlockHash]


class _Blocked(NamedTuple):
    """With how much room, until when, and after how many comings and goings nobody fits, of all or of the first; and for which blocks they wait."""

    num_available: int
    until_step: int
    num_changes: int
    is_bound: bool
    awaited: frozenset[BlockHash]


@dataclass(slots=True)
class _Tenant:
    """Those of one tenant, by the policy's number; and since when none of them has come in."""

    since_s: float
    entries: list[_Entry] = field(default_factory=list)


@dataclass(slots=True)
class _Class:
    """The waiting sequences of one class."""

    # Whoever lost its blocks; the one that lost them last comes first.
    sent_back: deque[Sequence] = field(default_factory=deque)
    # The one of which none has come in for longest is first.
    by_tenant: dict[str, _Tenant] = field(default_factory=dict)
    # A heap by arrival. Some may have left since.
    arrived: list[_Entry] = field(default_factory=list)
    # Those that did not fit when they were looked at last; None: there was no seat, for whoever's turn it is.
    refused: list[Sequence] | None = field(default_factory=list)
    # Comings and goings.
    num_changes: int = 0
    blocked: _Blocked | None = None


class WaitingQueue:
    """Sorted as sequences come, so that a look at the head costs nothing, however many wait."""

    def __init__(self, policy: TurnPolicy) -> None:
        self._policy = policy
        self._classes = {priority: _Class() for priority in Priority}
        # The class that each one is in, and its entry; none for those that were sent back.
        self._places: dict[Sequence, tuple[Priority, _Entry | None]] = {}
        self._num_added = 0
        self._num_waiting = Counter[Priority]()
        # The same by the class in which they wait, without those whose KV comes from outside.
        self._num_to_compute = Counter[Priority]()
        # Those that have not started and are not BATCH, in the order of arrival; some may have left since.
        self._urgent: deque[Sequence] = deque()
        # All tokens of theirs: what of them is cached turns out when they come in.
        self.num_pending_tokens = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._places

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._places)

    # -- coming and going

    def add(self, sequence: Sequence, now_s: float) -> None:
        """Takes its turn behind those that came before, as the policy says."""
        entry = (self._policy(sequence), self._number(), sequence)
        each = self._classes[sequence.turn_class]
        tenant = each.by_tenant.setdefault(sequence.spec.tenant, _Tenant(now_s))
        insort(tenant.entries, entry, key=_order)
        if sequence.started_s is None and sequence.spec.priority is not Priority.BATCH:
            self._urgent.append(sequence)
        self._place(sequence, entry)

    def add_first(self, sequence: Sequence) -> None:
        """Comes before all of its class that have not started."""
        self._classes[sequence.turn_class].sent_back.appendleft(sequence)
        self._place(sequence, None)

    def remove(self, sequence: Sequence) -> Priority:
        """Forgets one that waits; gives the class that it was in."""
        priority, entry = self._places[sequence]
        self._count(sequence, -1)
        del self._places[sequence]
        each = self._classes[priority]
        if entry is None:
            each.sent_back.remove(sequence)
            return priority
        entries = each.by_tenant[sequence.spec.tenant].entries
        del entries[bisect_left(entries, _order(entry), key=_order)]
        if not entries:
            del each.by_tenant[sequence.spec.tenant]
        return priority

    def note_turn(self, tenant: str, priority: Priority, now_s: float) -> None:
        """One of a tenant has come in."""
        by_tenant = self._classes[priority].by_tenant
        if tenant in by_tenant:
            entries = by_tenant.pop(tenant).entries
            by_tenant[tenant] = _Tenant(now_s, entries)

    def narrow(self, sequence: Sequence, candidates: tuple[int, ...]) -> None:
        """From now on one that waits stands for these candidates only."""
        self._count(sequence, -1)
        sequence.keep(candidates)
        self._count(sequence, 1)

    # -- whose turn it is

    def is_waited_in(self, priority: Priority) -> bool:
        """Whether anybody waits in a class."""
        each = self._classes[priority]
        return bool(each.sent_back or each.by_tenant)

    def in_turn(self, priority: Priority) -> Iterator[Sequence]:
        """All of a class, whose turn it is first. The one given last may be removed before the next."""
        each = self._classes[priority]
        yield from list(each.sent_back)
        yield from _by_service(each.by_tenant)

    def by_age(self, arrived_by_s: float) -> Iterator[tuple[float, Sequence, bool]]:
        """Of each class: since when it has waited, who has its turn by age, and whether that is its tenant's.

        The tenant of which nobody has come in since then, if there is one. Else whoever's turn it is, if any of the class came by
        then; but not in the first class, which comes before the others anyway.
        """
        for priority, each in self._classes.items():
            tenant = next(iter(each.by_tenant.values()), None)
            oldest = self.oldest(priority)
            if tenant is not None and tenant.since_s <= arrived_by_s:
                yield tenant.since_s, tenant.entries[0][2], True
            elif (
                priority is not Priority.REALTIME and oldest is not None and oldest.arrival_s <= arrived_by_s
            ):
                yield oldest.arrival_s, next(self.in_turn(priority)), False

    def is_sent_back(self, sequence: Sequence) -> bool:
        """Whether it waits because it lost its blocks."""
        return self._places[sequence][1] is None

    def oldest(self, priority: Priority) -> Sequence | None:
        """Who of a class came first."""
        arrived = self._classes[priority].arrived
        while arrived and not self._is_in(arrived[0][2], priority):
            heapq.heappop(arrived)
        return arrived[0][2] if arrived else None

    def oldest_urgent_s(self) -> float | None:
        """When the oldest came of those that are urgent and have not had a turn; None if there is none."""
        while self._urgent and not self._has_entry(self._urgent[0]):
            self._urgent.popleft()
        return self._urgent[0].arrival_s if self._urgent else None

    def of_class(self, priority: Priority) -> list[Sequence]:
        """Those that wait in one class."""
        each = self._classes[priority]
        return [
            *each.sent_back,
            *(entry[2] for tenant in each.by_tenant.values() for entry in tenant.entries),
        ]

    def num_to_compute(self, priority: Priority) -> int:
        """Tokens that those of a class come with, if none of them is cached."""
        return self._num_to_compute[priority]

    def num_waiting(self, priority: Priority) -> int:
        """Sequences to come, of one class by their own priority."""
        return self._num_waiting[priority]

    # -- who was refused

    def refused(self, priority: Priority) -> list[Sequence]:
        """Those of a class that did not fit when they were looked at last, and wait still."""
        refused = self._classes[priority].refused
        if refused is None:
            return self.head(priority)
        return [sequence for sequence in refused if self._is_in(sequence, priority)]

    def head(self, priority: Priority) -> list[Sequence]:
        """Whose turn it is in a class, if anybody waits in it."""
        return [sequence for sequence, _ in zip(self.in_turn(priority), range(1), strict=False)]

    def note_look(self, priority: Priority) -> list[Sequence]:
        """A class is looked at again; gives the list for those that do not fit."""
        refused = self._classes[priority].refused = []
        return refused

    def note_full(self, priority: Priority) -> None:
        """There is no seat for anybody."""
        self._classes[priority].refused = None

    def note_blocked(self, priority: Priority, room: RoomNow, *, is_bound: bool) -> None:
        """Nobody of those that were looked at fitted; all were, unless they were bound to their turn."""
        each = self._classes[priority]
        names = (sequence.awaited_hash for sequence in each.refused or ())
        awaited = frozenset(name for name in names if name is not None and name not in room.cached)
        until_step = room.step + RETRY_STEPS
        each.blocked = _Blocked(room.num_available, until_step, each.num_changes, is_bound, awaited)

    def is_blocked(self, priority: Priority, room: RoomNow, *, is_bound: bool) -> bool:
        """Whether that is still so: not once more is free or cached, after a while, or when somebody has come."""
        each = self._classes[priority]
        then = each.blocked
        return (
            then is not None
            and room.num_available <= then.num_available
            and room.step < then.until_step
            and each.num_changes == then.num_changes
            and then.is_bound <= is_bound
            and room.cached.isdisjoint(then.awaited)
        )

    # -- how it is done

    def _place(self, sequence: Sequence, entry: _Entry | None) -> None:
        priority = sequence.turn_class
        self._places[sequence] = priority, entry
        heapq.heappush(self._classes[priority].arrived, (sequence.arrival_s, self._number(), sequence))
        self._count(sequence, 1)

    def _number(self) -> int:
        self._num_added += 1
        return self._num_added

    def _count(self, sequence: Sequence, sign: int) -> None:
        self._classes[self._places[sequence][0]].num_changes += 1
        self._num_waiting[sequence.spec.priority] += sign * sequence.num_seats
        if sequence.role is not SequenceRole.AWAIT_KV:
            self._num_to_compute[self._places[sequence][0]] += sign * sequence.num_tokens
        self.num_pending_tokens += sign * sequence.num_tokens

    def _is_in(self, sequence: Sequence, priority: Priority) -> bool:
        place = self._places.get(sequence)
        return place is not None and place[0] is priority

    def _has_entry(self, sequence: Sequence) -> bool:
        place = self._places.get(sequence)
        return place is not None and place[1] is not None


def _by_service(by_tenant: dict[str, _Tenant]) -> Iterator[Sequence]:
    """One after the other from the tenant that was served least; whoever is admitted is charged at once, and others come first."""
    line = [
        (tenant.entries[0][2].account.service, number, 0, tenant.entries)
        for number, tenant in enumerate(by_tenant.values())
    ]
    heapq.heapify(line)
    while line:
        service, number, index, entries = line[0]
        if index >= len(entries):
            heapq.heappop(line)
            continue
        entry = entries[index]
        if entry[2].account.service > service:
            heapq.heapreplace(line, (entry[2].account.service, number, index, entries))
            continue
        yield entry[2]
        is_there = index < len(entries) and entries[index] is entry
        heapq.heapreplace(line, (entry[2].account.service, number, index + is_there, entries))


def _order(entry: _Entry) -> tuple[float, int]:
    return entry[:2]
