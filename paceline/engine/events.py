"""What an engine says about its sequences; plain values, safe to pass between threads."""

from dataclasses import dataclass

from msgspec import Struct

from paceline.core.block_hash import BlockHash
from paceline.core.errors import PacelineError
from paceline.core.kv_layout import BlockId
from paceline.core.request import FinishReason, SequenceId, TokenLogprob
from paceline.core.ticket import ReadyBlock


@dataclass(frozen=True, slots=True)
class Started:
    """The first chunk is computed, and there is room for all known tokens.

    Of the cached tokens those in `num_pulled_blocks` blocks were cached by another worker. A hand-over of the known tokens moves `num_blocks` blocks, of which those that are full have `block_hashes`.
    """

    sequence_id: SequenceId
    num_cached_tokens: int
    queued_s: float
    num_blocks: int
    block_hashes: tuple[BlockHash, ...]
    num_pulled_blocks: int = 0


@dataclass(frozen=True, slots=True)
class BlocksReady:
    """More of a PREFILL_ONLY sequence is computed: the next of the blocks that a hand-over moves. All of a LEND one are."""

    sequence_id: SequenceId
    num_computed_tokens: int
    blocks: tuple[ReadyBlock, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """A chunk of a GENERATE sequence is computed, and more follow before its first token; of one that was preempted nothing is said."""

    sequence_id: SequenceId
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class PromptScored:
    """A chunk has told how probable the prompt's tokens from place `first_index` on were.

    Such events follow on each other without a gap, from place 1 to the prompt's end: the first token has no predecessor.
    """

    sequence_id: SequenceId
    first_index: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Reserved:
    """The blocks of an AWAIT_KV sequence are held; the first `num_held` have their content already.

    They are those that a hand-over moves, in the same order as with the owner.
    """

    sequence_id: SequenceId
    block_ids: tuple[BlockId, ...]
    num_held: int


@dataclass(frozen=True, slots=True)
class Recall:
    """A sequence has come in, or a preempted one come back, and another worker may have what belongs into its first blocks.

    `token_ids` are those of full blocks, which are `block_ids` and have `block_hashes`. The first `num_held` have their
    content already. The sequence waits until it is resumed, with as many of them as have come. It stands for `candidates`,
    the first of which names it, also when that one is released meanwhile.
    """

    sequence_id: SequenceId
    candidates: tuple[int, ...]
    token_ids: tuple[int, ...]
    block_hashes: tuple[BlockHash, ...]
    block_ids: tuple[BlockId, ...]
    num_held: int

    @property
    def candidate(self) -> int:
        """Names the sequence among those of its request."""
        return self.candidates[0]


class NewTokens(Struct, frozen=True, gc=False):
    """Tokens of one candidate were sampled; `first_index` counts its output tokens over all attempts.

    A struct of msgspec's, since there is one for each sequence in each step.
    """

    sequence_id: SequenceId
    first_index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    num_preemptions: int
    # One a token, or none at all.
    logprobs: tuple[TokenLogprob, ...] = ()
    candidate: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence is over without an end of its own: all of its candidates that have none.

    Its blocks are free; those of a PREFILL_ONLY or LEND one that has started are held until it is released.
    """

    sequence_id: SequenceId
    error: PacelineError


Event = Started | BlocksReady | Progress | PromptScored | Reserved | Recall | NewTokens | Failed
