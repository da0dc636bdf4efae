"""The plain records in which deciding and doing meet: the scheduler writes one, the runner answers with the other."""

from dataclasses import dataclass

from paceline.core.kv_layout import BlockId
from paceline.core.request import SamplingParams, SequenceId
from paceline.engine.events import Event


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Compute `token_ids`, which begin at position `start`, into the blocks of `block_table`.

    If `sampling` is set, then sample the token that follows them.
    """

    sequence_id: SequenceId
    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[BlockId, ...]
    sampling: SamplingParams | None

    @property
    def end(self) -> int:
        """Tokens in the context once these are computed; also the position of the sampled token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work, and what the decision itself has to say."""

    scheduled: tuple[ScheduledSequence, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the runner gives back: one token for each scheduled sequence with `sampling`, in order."""

    token_ids: tuple[int, ...] = ()
