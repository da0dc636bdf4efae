"""What a scheduler says of itself, read off its parts."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.pace import ByClass
from paceline.core.request import Priority
from paceline.engine.admission import Admission
from paceline.engine.overload import BatchMode
from paceline.engine.running import Running


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A picture of the queues, and of what the policies have done."""

    num_running: int
    num_waiting: int
    num_pending_tokens: int
    # Those that wait for their turn, by class; without those that wait for KV.
    num_waiting_by_priority: ByClass
    tokens: "TokensByLane"
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


@dataclass(frozen=True, slots=True)
class TokensByLane:
    """Tokens to be computed before an output, by class: in the fast lane and in the normal one, of those that wait and of those that run."""

    waiting: tuple[ByClass, ByClass]
    running: tuple[ByClass, ByClass]


def num_waiting_by_priority(admission: Admission) -> ByClass:
    """Sequences that wait for their turn."""
    lanes = admission.fast, admission.normal
    realtime, standard, batch = (sum(lane.num_waiting(priority) for lane in lanes) for priority in Priority)
    return realtime, standard, batch


def tokens_by_lane(admission: Admission, running: Running) -> TokensByLane:
    """Looks at those that compute a prompt, and at nobody else."""
    lanes = admission.fast, admission.normal
    under_way = [[0, 0, 0], [0, 0, 0]]
    for sequence in running.prefilling:
        under_way[not admission.is_fast(sequence)][sequence.turn_class] += sequence.num_uncomputed_tokens
    fast, normal = (
        (
            lane.num_to_compute(Priority.REALTIME),
            lane.num_to_compute(Priority.STANDARD),
            lane.num_to_compute(Priority.BATCH),
        )
        for lane in lanes
    )
    run_fast, run_normal = ((each[0], each[1], each[2]) for each in under_way)
    return TokensByLane((fast, normal), (run_fast, run_normal))
