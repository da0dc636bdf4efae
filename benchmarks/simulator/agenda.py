"""What happens when: the heart of the virtual clock."""

import gc
import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Action = Callable[[], None]


class Agenda:
    """Actions in the order of their time; those of one time in the order in which they were put there."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._entries: list[tuple[float, int, Action]] = []
        self._num_entered = 0

    @property
    def is_quiet(self) -> bool:
        """Whether nothing else is to be done now."""
        return not self._entries or self._entries[0][0] > self.now_s

    def at(self, time_s: float, action: Action) -> None:
        """Does something later, or after everything else that is to be done now."""
        assert time_s >= self.now_s, "the past is over"
        heapq.heappush(self._entries, (time_s, self._num_entered, action))
        self._num_entered += 1

    def run(self) -> None:
        """Until nothing is left to do."""
        with _without_collections():
            while self._entries:
                self.now_s, _, action = heapq.heappop(self._entries)
                action()


@contextmanager
def _without_collections() -> Iterator[None]:
    """Records pile up and none of them is cyclic: looking for cycles among them takes a sixth of a run, in vain."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
