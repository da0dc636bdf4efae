"""Who waits in one lane, in the order of their turn: class, then the tenant that was served least, then the policy.

Classes age: whoever has waited long moves up one. So nobody waits for ever, whatever comes behind it.
"""

from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.core.request import Priority
from paceline.engine.policies import TurnPolicy
from paceline.engine.sequence import Sequence

# The policy's number, and the order of coming where that is equal.
_Entry = tuple[float, int, Sequence]


@dataclass(slots=True)
class _Class:
    """The waiting sequences of one priority, and those that have aged into it."""

    # Whoever lost its blocks; the one that lost them last comes first.
    sent_back: deque[Sequence] = field(default_factory=deque)
    by_tenant: defaultdict[str, list[_Entry]] = field(default_factory=lambda: defaultdict(list))
    # (when it came into this class, who), oldest first. Some may have left since.
    entered: deque[tuple[float, Sequence]] = field(default_factory=deque)


class WaitingQueue:
    """Sorted as sequences come, so that a look at the head costs nothing, however many wait."""

    def __init__(self, policy: TurnPolicy, aging_s: float) -> None:
        self._policy = policy
        self._aging_s = aging_s
        self._classes = {priority: _Class() for priority in Priority}
        # The class that each one is in now, and its entry; none for those that were sent back.
        self._places: dict[Sequence, tuple[Priority, _Entry | None]] = {}
        self._num_added = 0
        self._num_waiting = Counter[Priority]()
        # All tokens of theirs: what of them is cached turns out when they come in.
        self.num_pending_tokens = 0

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
        self._insert(sequence.spec.priority, entry, sequence.arrival_s)
        self._count(sequence, 1)

    def add_first(self, sequence: Sequence) -> None:
        """Comes before all of its class that have not started."""
        self._classes[sequence.spec.priority].sent_back.appendleft(sequence)
        self._places[sequence] = (sequence.spec.priority, None)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Forgets one that waits."""
        self._count(sequence, -1)
        priority, entry = self._places.pop(sequence)
        if entry is None:
            self._classes[priority].sent_back.remove(sequence)
        else:
            self._delete(priority, entry)

    def narrow(self, sequence: Sequence, candidates: tuple[int, ...]) -> None:
        """From now on one that waits stands for these candidates only."""
        self._count(sequence, -1)
        sequence.keep(candidates)
        self._count(sequence, 1)

    def age(self, now_s: float) -> None:
        """Moves up whoever has waited in its class for `aging_s`."""
        for priority in (Priority.STANDARD, Priority.BATCH):
            entered = self._classes[priority].entered
            while entered and entered[0][0] + self._aging_s <= now_s:
                entered_s, sequence = entered.popleft()
                if (entry := self._entry_in(priority, sequence)) is not None:
                    self._delete(priority, entry)
                    self._insert(Priority(priority - 1), entry, entered_s + self._aging_s)

    def in_turn(self, before: int = len(Priority)) -> Iterator[Sequence]:
        """All of the classes before one, whose turn it is first. The one given last may be removed before the next."""
        for each in list(self._classes.values())[:before]:
            yield from list(each.sent_back)
            yield from self._by_service(each.by_tenant)

    def urgency(self, sequence: Sequence) -> Priority:
        """The class that one is in now."""
        return self._places[sequence][0]

    def oldest_urgent_s(self) -> float | None:
        """When the oldest came into its class that is not a BATCH request by itself; None if there is none."""
        oldest = (
            next(self._still_urgent(priority), None) for priority in (Priority.REALTIME, Priority.STANDARD)
        )
        return min((entered_s for entered_s in oldest if entered_s is not None), default=None)

    def num_waiting(self, priority: Priority) -> int:
        """Sequences to come, of one class by their own priority."""
        return self._num_waiting[priority]

    def _count(self, sequence: Sequence, sign: int) -> None:
        self._num_waiting[sequence.spec.priority] += sign * sequence.num_seats
        self.num_pending_tokens += sign * sequence.num_tokens

    def _by_service(self, by_tenant: dict[str, list[_Entry]]) -> Iterator[Sequence]:
        passed = dict.fromkeys(by_tenant, 0)
        while passed:
            # Asked anew each time: whoever is admitted is charged at once.
            tenant = min(passed, key=lambda each: by_tenant[each][passed[each]][2].account.service)
            entries = by_tenant[tenant]
            entry = entries[passed[tenant]]
            yield entry[2]
            if passed[tenant] < len(entries) and entries[passed[tenant]] is entry:
                passed[tenant] += 1
            if passed[tenant] >= len(entries):
                del passed[tenant]

    def _insert(self, priority: Priority, entry: _Entry, entered_s: float) -> None:
        each, sequence = self._classes[priority], entry[2]
        insort(each.by_tenant[sequence.spec.tenant], entry, key=_order)
        each.entered.append((entered_s, sequence))
        self._places[sequence] = (priority, entry)

    def _delete(self, priority: Priority, entry: _Entry) -> None:
        each, tenant = self._classes[priority], entry[2].spec.tenant
        entries = each.by_tenant[tenant]
        del entries[bisect_left(entries, _order(entry), key=_order)]
        if not entries:
            del each.by_tenant[tenant]
        while each.entered and self._entry_in(priority, each.entered[0][1]) is None:
            each.entered.popleft()

    def _entry_in(self, priority: Priority, sequence: Sequence) -> _Entry | None:
        """Its entry, if it waits in this class and has not been sent back into it."""
        place = self._places.get(sequence)
        return place[1] if place is not None and place[0] is priority else None

    def _still_urgent(self, priority: Priority) -> Iterator[float]:
        return (
            entered_s
            for entered_s, sequence in self._classes[priority].entered
            if sequence.spec.priority is not Priority.BATCH and self._entry_in(priority, sequence)
        )


def _order(entry: _Entry) -> tuple[float, int]:
    return entry[:2]
