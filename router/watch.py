"""An address where a worker is looked for, and what has come of it so far."""

from dataclasses import dataclass, field
from typing import Literal

from paceline.core.errors import PacelineError
from paceline.runtime.log import get_logger
from paceline.v1 import inference_pb2

# How soon it is asked again, the first time and at most. A worker that comes back is found within a second.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.25, 1.0

# "unknown": nobody has looked yet. "there": a worker of ours is. "away": nobody, or one that is not of ours.
WatchState = Literal["unknown", "there", "away"]

log = get_logger()


@dataclass(slots=True)
class Watch:
    """Owned by whoever watches."""

    address: str
    role: inference_pb2.WorkerRole
    state: WatchState = "unknown"
    _pause_s: float = _FIRST_PAUSE_S
    # Why nobody of ours is there, since somebody was: one that stays away is one line in the log a reason, not one a second.
    _reasons: set[str] = field(default_factory=set)

    def note_found(self) -> None:
        """A worker of ours is there."""
        self.state = "there"
        self._pause_s = _FIRST_PAUSE_S
        self._reasons.clear()

    def complain(self, error: PacelineError) -> bool:
        """Logs why nobody of ours is there; whether that is news."""
        if error.reason in self._reasons:
            return False
        self._reasons.add(error.reason)
        log.warning("worker_unreachable", address=self.address, reason=error.reason, error=str(error))
        return True

    def next_pause_s(self) -> float:
        """How long to wait before the next look."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _MAX_PAUSE_S)
        return pause_s
