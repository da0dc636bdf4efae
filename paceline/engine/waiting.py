"""Who waits in one lane, in the order of their turn: class, then the tenant that was served least, then the policy."""

import heapq
from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from paceline.core.request import Priority
from paceline.engine.policies import TurnPolicy
from paceline.engine.sequence import Sequence, SequenceRole

# After so many steps without a change those that were refused are asked for again.
RETRY_STEPS = 16
# The policy's number, and the order of coming where that is equal.
_Entry = tuple[float, int, Sequence]


@dataclass(slots=True)
class _Class:
    """The waiting sequences of one class."""

    # Whoever lost its blocks; the one that lost them last comes first.
    sent_back: deque[Sequence] = field(default_factory=deque)
    by_tenant: defaultdict[str, list[_Entry]] = field(default_factory=lambda: defaultdict(list))
    # In the order of arrival. Some may have left, or been sent back, since.
    arrived: deque[Sequence] = field(default_factory=deque)


class WaitingQueue:
    """Sorted as sequences come, so that a look at the head costs nothing, however many wait."""

    def __init__(self, policy: TurnPolicy) -> None:
        self._policy = policy
        self._classes = {priority: _Class() for priority in Priority}
        # The class that each one is in, and its entry; none for those that were sent back.
        self._places: dict[Sequence, tuple[Priority, _Entry | None]] = {}
        self._num_added = 0
        self._num_waiting = Counter[Priority]()
        # Those that have not started and are not BATCH, in the order of arrival; some may have left since.
        self._urgent: deque[Sequence] = deque()
        # All tokens of theirs: what of them is cached turns out when they come in.
        self.num_pending_tokens = 0
        # The same by the class in which they wait, without those whose KV comes from outside.
        self._num_to_compute = Counter[Priority]()
        # Comings and goings; and with how much room, until when, and after how many of those nobody fits.
        self._num_changes = 0
        self._blocked: tuple[int, int, int] | None = None

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._places

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._places)

    def add(self, sequence: Sequence) -> None:
        """Takes its turn behind those that came before, as the policy says."""
        self._num_added += 1
        entry = (self._policy(sequence), self._num_added, sequence)
        each = self._classes[sequence.turn_class]
        insort(each.by_tenant[sequence.spec.tenant], entry, key=_order)
        each.arrived.append(sequence)
        if sequence.started_s is None and sequence.spec.priority is not Priority.BATCH:
            self._urgent.append(sequence)
        self._places[sequence] = (sequence.turn_class, entry)
        self._count(sequence, 1)

    def add_first(self, sequence: Sequence) -> None:
        """Comes before all of its class that have not started."""
        self._classes[sequence.turn_class].sent_back.appendleft(sequence)
        self._places[sequence] = (sequence.turn_class, None)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Forgets one that waits."""
        self._count(sequence, -1)
        priority, entry = self._places.pop(sequence)
        each = self._classes[priority]
        if entry is None:
            each.sent_back.remove(sequence)
            return
        entries = each.by_tenant[sequence.spec.tenant]
        del entries[bisect_left(entries, _order(entry), key=_order)]
        if not entries:
            del each.by_tenant[sequence.spec.tenant]
        while each.arrived and not self._has_entry(each.arrived[0]):
            each.arrived.popleft()

    def narrow(self, sequence: Sequence, candidates: tuple[int, ...]) -> None:
        """From now on one that waits stands for these candidates only."""
        self._count(sequence, -1)
        sequence.keep(candidates)
        self._count(sequence, 1)

    def note_blocked(self, num_available: int, step: int) -> None:
        """Nobody of those that were looked at fitted into so many blocks."""
        self._blocked = num_available, step + RETRY_STEPS, self._num_changes

    def is_blocked(self, num_available: int, step: int) -> bool:
        """Whether that is still so: not once more is free, after a while, or when somebody has come."""
        if self._blocked is None:
            return False
        num_then, until_step, num_changes = self._blocked
        return num_available <= num_then and step < until_step and num_changes == self._num_changes

    def in_turn(self, before: int = len(Priority)) -> Iterator[Sequence]:
        """All of the classes before one, whose turn it is first. The one given last may be removed before the next."""
        for priority in list(Priority)[:before]:
            yield from self._class_in_turn(priority)

    def aged(self, arrived_by_s: float, before: int = len(Priority)) -> Iterator[Sequence]:
        """Of each class after REALTIME, and before one, in which somebody came by then, whose turn it is; the oldest's class first.

        So age lifts a class, and within it tenants are served as always.
        """
        oldest = {
            priority: self.oldest(priority)
            for priority in (Priority.STANDARD, Priority.BATCH)
            if priority < before
        }
        arrivals = {priority: each.arrival_s for priority, each in oldest.items() if each is not None}
        for priority in sorted(arrivals, key=lambda priority: arrivals[priority]):
            if arrivals[priority] <= arrived_by_s:
                yield from islice(self._class_in_turn(priority), 1)

    def _class_in_turn(self, priority: Priority) -> Iterator[Sequence]:
        each = self._classes[priority]
        yield from list(each.sent_back)
        yield from _by_service(each.by_tenant)

    def is_turn_of_tenant(self, sequence: Sequence) -> bool:
        """Whether it was sent back, or nobody of its class waits whose tenant was served less than its own."""
        each = self._classes[sequence.turn_class]
        heads = (entries[0][2] for entries in each.by_tenant.values())
        least = min((head.account.service for head in heads), default=inf)
        return not self._has_entry(sequence) or sequence.account.service <= least

    def oldest(self, priority: Priority) -> Sequence | None:
        """Who has waited longest in a class."""
        each = self._classes[priority]
        waiting = [*each.sent_back, *([each.arrived[0]] if each.arrived else [])]
        return min(waiting, key=_arrival, default=None)

    def oldest_urgent_s(self) -> float | None:
        """When the oldest came of those that are urgent and have not had a turn; None if there is none."""
        while self._urgent and not self._has_entry(self._urgent[0]):
            self._urgent.popleft()
        return self._urgent[0].arrival_s if self._urgent else None

    def of_class(self, priority: Priority) -> list[Sequence]:
        """Those that wait in one class."""
        each = self._classes[priority]
        return [*each.sent_back, *(entry[2] for entries in each.by_tenant.values() for entry in entries)]

    def num_waiting(self, priority: Priority) -> int:
        """Sequences to come, of one class by their own priority."""
        return self._num_waiting[priority]

    def num_to_compute(self, priority: Priority) -> int:
        """Tokens that those of a class come with, if none of them is cached."""
        return self._num_to_compute[priority]

    def _count(self, sequence: Sequence, sign: int) -> None:
        self._num_changes += 1
        self._num_waiting[sequence.spec.priority] += sign * sequence.num_seats
        self.num_pending_tokens += sign * sequence.num_tokens
        if sequence.role is not SequenceRole.AWAIT_KV:
            self._num_to_compute[self._places[sequence][0]] += sign * sequence.num_tokens

    def _has_entry(self, sequence: Sequence) -> bool:
        place = self._places.get(sequence)
        return place is not None and place[1] is not None


def _by_service(by_tenant: dict[str, list[_Entry]]) -> Iterator[Sequence]:
    """One after the other from the tenant that was served least; whoever is admitted is charged at once, and others come first."""
    line = [
        (entries[0][2].account.service, number, 0, entries)
        for number, entries in enumerate(by_tenant.values())
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


def _arrival(sequence: Sequence) -> float:
    return sequence.arrival_s
