"""What happens when: the heart of the virtual clock."""

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Agenda:
    """Actions in the order of their time; those of one time in the order in which they were put there."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._entries: list[tuple[float, int, Action]] = []
        self._num_entered = 0

    def at(self, time_s: float, action: Action) -> None:
        """Does something later, or after everything else that is to be done now."""
        assert time_s >= self.now_s, "the past is over"
        heapq.heappush(self._entries, (time_s, self._num_entered, action))
        self._num_entered += 1

    def run(self) -> None:
        """Until nothing is left to do."""
        while self._entries:
            self.now_s, _, action = heapq.heappop(self._entries)
            action()
