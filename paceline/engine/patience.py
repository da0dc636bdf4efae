"""How long a worker may compute nothing for the sake of those whose turn it is, while others hold the room that they want."""

from math import inf

# Most hand-overs end sooner; and what it costs at most is one ninth of the time, where a lease is held without an end.
_WAIT_S, _EVERY = 1.0, 9


class Patience:
    """A while, and then not again for many times as long."""

    def __init__(self) -> None:
        self._ends_s = -inf

    def has_ended(self, now_s: float) -> bool:
        """Whether there is nothing to wait for any more, at a time at which nothing is computed."""
        if now_s >= self._ends_s + (_EVERY - 1) * _WAIT_S:
            self._ends_s = now_s + _WAIT_S
        return now_s >= self._ends_s
