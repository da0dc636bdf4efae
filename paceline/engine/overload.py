"""How BATCH requests give way when the others have to wait: first to static batches in the slack, then altogether.

Urgent requests, REALTIME and STANDARD ones, are what counts: while the oldest of them waits for long, there is too much work.
"""

import enum

from paceline.core.errors import QueueFullError

# Back to the milder mode once urgent requests have waited less than this share of the limit, for as long as the limit is.
_CALM = 0.5
_REFUSE_AT = 4.0


class BatchMode(enum.IntEnum):
    """What becomes of BATCH requests."""

    CONTINUOUS = 0  # they join the running batch like any other
    STATIC = 1  # a few at a time, when nobody else waits, and the next ones once all of those are done
    REFUSED = 2  # those that wait are refused, and so are new ones


class Overload:
    """Told in every step how long the oldest urgent request has waited."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._calm_since_s: float | None = None
        self.mode = BatchMode.CONTINUOUS
        self.num_switches = 0

    def refusal(self) -> QueueFullError:
        """What a BATCH request hears that shall not wait; the mode does not become milder before it may come again."""
        message = "urgent requests wait, and BATCH ones are refused meanwhile"
        return QueueFullError(message, retry_after_s=2 * self._limit_s)

    def note_wait(self, wait_s: float, now_s: float) -> None:
        """`wait_s` is 0 when no urgent request waits."""
        worst = BatchMode((wait_s >= self._limit_s) + (wait_s >= _REFUSE_AT * self._limit_s))
        if worst > self.mode:
            self._switch(worst)
        if wait_s >= _CALM * self._limit_s or self.mode is BatchMode.CONTINUOUS:
            self._calm_since_s = None
        elif self._calm_since_s is None:
            self._calm_since_s = now_s
        elif now_s >= self._calm_since_s + self._limit_s:
            self._switch(BatchMode(self.mode - 1))
            self._calm_since_s = now_s

    def end(self) -> None:
        """Nobody computes, and nobody urgent waits."""
        if self.mode is not BatchMode.CONTINUOUS:
            self._switch(BatchMode.CONTINUOUS)
        self._calm_since_s = None

    def seen(self, *, is_busy: bool) -> tuple[BatchMode, int]:
        """Mode, and number of switches, between two steps: where nobody computes and nobody urgent waits, no step has told of the end."""
        mode = self.mode if is_busy else BatchMode.CONTINUOUS
        return mode, self.num_switches + (mode is not self.mode)

    def _switch(self, mode: BatchMode) -> None:
        self.mode = mode
        self.num_switches += 1
