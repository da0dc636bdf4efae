"""The plain records in which deciding and doing meet: the scheduler writes one, the runner answers with the other.

What there is of each running sequence in each step is a struct of msgspec's: it takes an eighth of the time of a frozen dataclass.
None can be part of a cycle, and so the garbage collector is not told of them.
"""

from dataclasses import dataclass
from operator import add

from msgspec import Struct

from paceline.core.kv_layout import BlockId
from paceline.core.request import SamplingParams, SequenceId, TokenLogprob
from paceline.engine.events import Event

# A sequence's blocks in one KV group, by their place; None for those that no token still to come sees.
BlockTable = tuple[BlockId | None, ...]


@dataclass(frozen=True, slots=True)
class SampleTask:
    """How to choose a candidate's next token, beside its position and the logits.

    `prompt_ids` and `output_ids` are given only where penalties need them. `banned_ids` may not come yet.
    """

    params: SamplingParams
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()
    num_top_logprobs: int | None = None
    candidate: int = 0


@dataclass(frozen=True, slots=True)
class ScoreTask:
    """How probable each of `target_ids` was, given what stands before it.

        token_ids of the chunk  [ a b c d e ]
        target_ids                  [ d e f ]     first_row 2: c makes d probable, and so on

    The last target may be the first token of the next chunk.
    """

    first_row: int
    target_ids: tuple[int, ...]
    num_top_logprobs: int


class ScheduledSequence(Struct, frozen=True, gc=False):
    """Compute `token_ids`, which begin at position `start`, into the blocks of `block_tables`, one a KV group.

    Each of `samples` chooses a token that follows them, all from the same logits: one for each candidate. If `score` is set,
    then say how probable known tokens were. `candidate` is the first one of those that the sequence stands for.
    """

    sequence_id: SequenceId
    token_ids: tuple[int, ...]
    start: int
    block_tables: tuple[BlockTable, ...]
    samples: tuple[SampleTask, ...] = ()
    score: ScoreTask | None = None
    candidate: int = 0

    @property
    def end(self) -> int:
        """Tokens in the context once these are computed."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work, and what the decision itself has to say."""

    scheduled: tuple[ScheduledSequence, ...]
    events: tuple[Event, ...]
    # Whether one still waits that is not BATCH and has not begun.
    has_urgent: bool = False


@dataclass(frozen=True, slots=True)
class ExpertTokens:
    """How many tokens each expert of one layer was given; a token counts once for each of its experts."""

    layer: int
    counts: tuple[int, ...]  # [num_experts]

    @property
    def imbalance(self) -> float:
        """The busiest expert's tokens over the mean: 1 is even; 0 where there were no tokens."""
        total = sum(self.counts)
        return max(self.counts) * len(self.counts) / total if total else 0.0

    def plus(self, other: "ExpertTokens") -> "ExpertTokens":
        """Both together, of the same layer."""
        assert self.layer == other.layer, "counts of different layers do not add up"
        return ExpertTokens(self.layer, tuple(map(add, self.counts, other.counts)))


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the runner gives back: one token for each sample of each scheduled sequence, in order.

    `logprobs` has an entry for each of them, None where none was asked for; or it is empty when nobody asked.
    `scores` has the log probabilities of all targets of each scheduled sequence with `score`, in order.
    `expert_tokens` has an entry for each layer with experts, and is empty for a model without any.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob | None, ...] = ()
    scores: tuple[tuple[TokenLogprob, ...], ...] = ()
    expert_tokens: tuple[ExpertTokens, ...] = ()
    # For each of `token_ids` the experts that computed the token before it, a bit for each expert of each layer; empty unless the
    # runner was asked to tell.
    experts: tuple[int, ...] = ()
    # In which this process waited for the stage of a pipeline before it.
    bubble_s: float = 0.0
