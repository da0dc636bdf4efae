"""The plain records in which deciding and doing meet: the scheduler writes one, the runner answers with the other."""

from dataclasses import dataclass

from paceline.core.kv_layout import BlockId
from paceline.core.request import SamplingParams, SequenceId, TokenLogprob
from paceline.engine.events import Event

# A sequence's blocks in one KV group, by their place; None for those that no token still to come sees.
BlockTable = tuple[BlockId | None, ...]


@dataclass(frozen=True, slots=True)
class SampleTask:
    """How to choose the token at `position`, beside the logits.

    `prompt_ids` and `output_ids` are given only where penalties need them. `banned_ids` may not come yet.
    """

    params: SamplingParams
    position: int
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()
    num_top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Compute `token_ids`, which begin at position `start`, into the blocks of `block_tables`, one a KV group.

    If `sample` is set, then choose the token that follows them.
    """

    sequence_id: SequenceId
    token_ids: tuple[int, ...]
    start: int
    block_tables: tuple[BlockTable, ...]
    sample: SampleTask | None

    @property
    def end(self) -> int:
        """Tokens in the context once these are computed."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work, and what the decision itself has to say."""

    scheduled: tuple[ScheduledSequence, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the runner gives back: one token for each scheduled sequence with `sample`, in order.

    `logprobs` has an entry for each of them, None where none was asked for; or it is empty when nobody asked.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob | None, ...] = ()
