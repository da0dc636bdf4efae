"""What a step has of each sequence, and what decoding ones take from it.

What is here for decodes is done for every sequence in every step, and so without detours.
"""

from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence
from typing import NamedTuple

from paceline.core.request import FinishReason, TokenLogprob
from paceline.engine.events import NewTokens
from paceline.engine.sequence import Sequence
from paceline.engine.step import ScheduledSequence
from paceline.engine.tasks import sample_tasks, score_task


class Decoded(NamedTuple):
    """What a step has brought: an event a sequence, those with a block that is full now, and those that are over."""

    events: list[NewTokens]
    full: list[Sequence]
    ended: list[Sequence]


def scheduled_decodes(sequences: Iterable[Sequence]) -> list[ScheduledSequence]:
    """Of each its last token, after which the next one is sampled."""
    return [
        ScheduledSequence(
            sequence.sequence_id,
            (sequence.token_ids[-1],),
            sequence.num_computed_tokens,
            sequence.blocks.view,
            sequence.lasting_tasks or sample_tasks(sequence),
            None,
            sequence.candidate,
        )
        for sequence in sequences
    ]


def scheduled_chunk(sequence: Sequence, num_tokens: int) -> ScheduledSequence:
    """Its next known tokens; what follows them is sampled once they are all computed."""
    start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
    return ScheduledSequence(
        sequence_id=sequence.sequence_id,
        token_ids=tuple(sequence.token_ids[start:end]),
        start=start,
        block_tables=sequence.blocks.view,
        samples=sample_tasks(sequence) if end == sequence.num_tokens else (),
        score=score_task(sequence, start, end) if sequence.owes_prompt_logprobs else None,
        candidate=sequence.candidate,
    )


def take_decodes(
    sequences: AbstractSequence[Sequence],
    token_ids: Iterable[int],
    logprobs: Iterable[TokenLogprob | None],
    block_size: int,
) -> Decoded:
    """The last token of each is computed, and has given the next one."""
    events: list[NewTokens] = []
    full: list[Sequence] = []
    ended: list[Sequence] = []
    for sequence, token_id, logprob in zip(sequences, token_ids, logprobs, strict=True):
        tokens = sequence.token_ids
        sequence.num_computed_tokens = num_tokens = len(tokens)
        reason = sequence.ends.get(token_id)
        if reason is None:
            tokens.append(token_id)
            if num_tokens + 1 >= sequence.max_num_tokens:
                reason = FinishReason.LENGTH
        if reason is not None:
            ended.append(sequence)
        if not num_tokens % block_size:
            full.append(sequence)
        event = NewTokens(
            sequence.sequence_id,
            num_tokens - sequence.num_prompt_tokens,
            (token_id,),
            reason,
            sequence.num_preemptions,
            () if logprob is None else (logprob,),
            sequence.candidate,
        )
        events.append(event)
    return Decoded(events, full, ended)
