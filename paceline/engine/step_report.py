"""What one step took and what came of it, as whoever looks from outside sees it: plain values, for metrics."""

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.clock import Clock
from paceline.core.request import Priority, SequenceId, SequenceSpec
from paceline.engine.events import Event, Failed, Reserved, Started
from paceline.engine.sequence import SequenceRole
from paceline.engine.step import SchedulerOutput


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence has got its first blocks. Of `num_tokens` to compute here, `num_cached_tokens` were cached.

    There are none to compute when the KV comes from outside.
    """

    priority: Priority
    queued_s: float
    num_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step that computed something. The scheduler's part is schedule() and update(), the runner's is execute().

    Of the latter `bubble_s` was waiting for the stage of a pipeline before this one.
    """

    num_sequences: int
    num_tokens: int
    num_sampled_tokens: int
    scheduler_s: float
    runner_s: float
    bubble_s: float = 0.0


class AdmissionLog:
    """Who has been added and has no block yet. Owned by whoever owns the engine."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[SequenceId, _Waiting] = {}

    def note_added(self, spec: SequenceSpec, role: SequenceRole) -> None:
        """A sequence is queued. A second one with the same id is a repeated message and is ignored."""
        if spec.sequence_id in self._waiting:
            return
        num_tokens = 0 if role is SequenceRole.AWAIT_KV else len(spec.known_ids)
        self._waiting[spec.sequence_id] = _Waiting(
            spec.priority, num_tokens, self._clock(), set(spec.candidates)
        )

    def note_released(self, sequence_id: SequenceId, candidate: int | None) -> None:
        """A sequence, or one candidate of it, is forgotten."""
        waiting = self._waiting.get(sequence_id)
        if waiting is None:
            return
        if candidate is not None:
            waiting.candidates.discard(candidate)
        if candidate is None or not waiting.candidates:
            self._waiting.pop(sequence_id, None)

    def take(self, events: Iterable[Event]) -> tuple[Admission, ...]:
        """The admissions that the events of a step speak of."""
        admissions = []
        for event in events:
            if not isinstance(event, Started | Reserved | Failed):
                continue
            waiting = self._waiting.pop(event.sequence_id, None)
            if waiting is not None and not isinstance(event, Failed):
                admissions.append(self._admission(waiting, event))
        return tuple(admissions)

    def _admission(self, waiting: "_Waiting", event: Started | Reserved) -> Admission:
        if isinstance(event, Started):
            return Admission(waiting.priority, event.queued_s, waiting.num_tokens, event.num_cached_tokens)
        return Admission(waiting.priority, self._clock() - waiting.added_s, waiting.num_tokens, 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    priority: Priority
    num_tokens: int
    added_s: float
    candidates: set[int]


def num_empty_slots(output: SchedulerOutput, block_size: int) -> int:
    """Block slots behind the last token of each scheduled sequence. Blocks there are never shared."""
    return sum(
        max(0, len(table) * block_size - item.end) for item in output.scheduled for table in item.block_tables
    )
