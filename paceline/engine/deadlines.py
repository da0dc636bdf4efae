"""When callers stop waiting: a heap, so that a step looks at what has passed and at nothing else."""

import heapq
from collections.abc import Container, Iterator

from paceline.core.request import SequenceId
from paceline.engine.sequence import Sequence


class Deadlines:
    """Those of sequences that are gone stay until they pass, or until they are most of all."""

    def __init__(self) -> None:
        # When, and whose: its number tells one life of an id from another.
        self._entries: list[tuple[float, int, SequenceId]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def watch(self, sequence: Sequence) -> None:
        """Notes its deadline, if it has one."""
        if sequence.spec.time_budget_s is not None:
            heapq.heappush(self._entries, (sequence.deadline_s, sequence.number, sequence.sequence_id))

    def is_due(self, now_s: float) -> bool:
        """Whether any has passed since that was asked last."""
        return bool(self._entries) and self._entries[0][0] <= now_s

    def passed(self, now_s: float) -> Iterator[tuple[SequenceId, int]]:
        """Whose has passed since this was asked last: id and number."""
        while self._entries and self._entries[0][0] <= now_s:
            _, number, sequence_id = heapq.heappop(self._entries)
            yield sequence_id, number

    def forget(self, known: Container[SequenceId], num_known: int) -> None:
        """Throws away what belongs to nobody, once that is worth a look at all."""
        if len(self._entries) > 2 * num_known + 64:
            self._entries = [entry for entry in self._entries if entry[2] in known]
            heapq.heapify(self._entries)
