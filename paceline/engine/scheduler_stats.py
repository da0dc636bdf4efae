"""What a scheduler says of itself."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.engine.overload import BatchMode


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A picture of the queues, and of what the policies have done."""

    num_running: int
    num_waiting: int
    num_pending_tokens: int
    # Those that wait for their turn, by class; without those that wait for KV.
    num_waiting_by_priority: tuple[int, int, int]
    # Of a sequence, by what became of its KV: "recompute", "swap", "remote".
    preemptions: Mapping[str, int]
    # Tokens that had been computed before and were computed again.
    num_recomputed_tokens: int
    # Sequences that had to wait for blocks, and steps in which somebody that decodes got none.
    num_refused_for_room: int
    num_steps_without_room: int
    watermark: float
    max_seats: int
    is_cooling: bool
    num_cool_downs: int
    batch_mode: BatchMode
    # How often batch_mode has changed, and how many requests it has refused.
    num_batch_switches: int
    num_batch_refused: int

    @property
    def num_preemptions(self) -> int:
        """Of all kinds."""
        return sum(self.preemptions.values())
