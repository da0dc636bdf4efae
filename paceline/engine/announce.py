"""What a scheduler says about a sequence when a step has computed part of it."""

from paceline.core.request import TokenLogprob
from paceline.engine.events import BlocksReady, Event, NewTokens, Progress, PromptScored, Reserved, Started
from paceline.engine.sequence import Sequence, SequenceRole


def announce(sequence: Sequence) -> list[Event]:
    """That it has started, which blocks of one that others read have become ready, and how far one is that will generate."""
    events: list[Event] = []
    if not sequence.announced:
        sequence.announced = True
        events.append(_started(sequence))
    if sequence.role in (SequenceRole.PREFILL_ONLY, SequenceRole.LEND):
        events.append(_ready_blocks(sequence))
    elif sequence.num_uncomputed_tokens and not sequence.num_preemptions:
        events.append(Progress(sequence.sequence_id, sequence.num_computed_tokens))
    return events


def reserved(sequence: Sequence, block_size: int) -> Event:
    """The blocks of an AWAIT_KV sequence are held."""
    blocks, num_cached = sequence.blocks, sequence.num_computed_tokens // block_size
    return Reserved(sequence.sequence_id, blocks.places.ids(), num_held=blocks.places.num_before(num_cached))


def take_scores(sequence: Sequence, logprobs: tuple[TokenLogprob, ...]) -> Event:
    """A chunk has told how probable prompt tokens were."""
    first_index = sequence.num_scored_tokens
    sequence.num_scored_tokens += len(logprobs)
    return PromptScored(sequence.sequence_id, first_index, logprobs)


def new_token(sequence: Sequence, candidate: int, token_id: int, logprob: TokenLogprob | None) -> NewTokens:
    """A candidate's next token, which the sequence does not have yet."""
    return NewTokens(
        sequence_id=sequence.sequence_id,
        first_index=sequence.num_output_tokens,
        token_ids=(token_id,),
        finish_reason=sequence.end_with(token_id),
        num_preemptions=sequence.num_preemptions,
        logprobs=() if logprob is None else (logprob,),
        candidate=candidate,
    )


def _ready_blocks(sequence: Sequence) -> Event:
    blocks = sequence.blocks.ready_places(
        sequence.num_announced_blocks, is_complete=sequence.num_uncomputed_tokens == 0
    )
    sequence.num_announced_blocks += len(blocks)
    return BlocksReady(sequence.sequence_id, sequence.num_computed_tokens, blocks)


def _started(sequence: Sequence) -> Started:
    assert sequence.started_s is not None, "a sequence starts when it is admitted"
    return Started(
        sequence_id=sequence.sequence_id,
        num_cached_tokens=sequence.num_cached_tokens,
        queued_s=sequence.started_s - sequence.arrival_s,
        num_blocks=len(sequence.blocks.places),
        block_hashes=sequence.blocks.places.hashes(sequence.block_hashes),
        num_pulled_blocks=sequence.num_pulled_blocks,
    )
