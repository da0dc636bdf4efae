"""How often one stream of tokens is sent on: seldom enough that all of them together leave this process time for the rest."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """A message costs about the same however many tokens it has. With few streams, or slow ones, each token goes at once."""

    message_s: float
    num_streams: Callable[[], int]

    def interval_s(self) -> float:
        """From one message of a stream to the next one, at least: all streams take their turn in that time."""
        return self.message_s * self.num_streams()


UNPACED = Pace(0.0, lambda: 0)
