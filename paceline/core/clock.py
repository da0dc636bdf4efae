"""Time as an argument: a clock is a function that returns monotonic seconds."""

import time
from collections.abc import Callable

Clock = Callable[[], float]

monotonic: Clock = time.monotonic


class ManualClock:
    """A clock that moves only when told to; for tests and the simulator."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, duration_s: float) -> None:
        """Moves the clock forward by `duration_s` seconds."""
        assert duration_s >= 0, "a monotonic clock never goes back"
        self._now_s += duration_s
