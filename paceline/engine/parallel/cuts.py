"""Cuts a step into batches that the stages of a pipeline compute one behind the other."""

from collections.abc import Iterator

from paceline.engine.step import ScheduledSequence, SchedulerOutput

# Tokens; for fewer, one call more costs more than a stage that waits.
_LEAST_PIECE = 16


def cut(output: SchedulerOutput, num_batches: int) -> tuple[SchedulerOutput, ...]:
    """At most so many batches of about as many tokens each, none empty; what they compute together is the step.

    Sequences keep their order, and so do their samples and scores. A chunk may be cut in two, the second of which sees the first: a stage computes
    batches in order. One with scores stays whole.
    """
    num_tokens = sum(len(item.token_ids) for item in output.scheduled)
    batches: list[list[ScheduledSequence]] = [[]]
    num_done = 0
    for item in output.scheduled:
        for piece in _pieces(item, num_done, num_tokens, num_batches):
            # The batch in which its middle lies.
            middle = num_done + len(piece.token_ids) / 2
            if (
                batches[-1]
                and middle * num_batches > len(batches) * num_tokens
                and len(batches) < num_batches
            ):
                batches.append([])
            batches[-1].append(piece)
            num_done += len(piece.token_ids)
    return tuple(SchedulerOutput(tuple(batch), ()) for batch in batches)


def _pieces(
    item: ScheduledSequence, num_before: int, num_tokens: int, num_batches: int
) -> Iterator[ScheduledSequence]:
    """The item, cut where a batch would end, unless a piece of it would be tiny."""
    first, length = 0, len(item.token_ids)
    if item.score is None:
        for number in range(1, num_batches):
            at = number * num_tokens // num_batches - num_before
            if at - first >= _LEAST_PIECE and length - at >= _LEAST_PIECE:
                yield _piece(item, first, at)
                first = at
    yield item if first == 0 else _piece(item, first, length)


def _piece(item: ScheduledSequence, first: int, last: int) -> ScheduledSequence:
    is_last = last == len(item.token_ids)
    return ScheduledSequence(
        item.sequence_id,
        item.token_ids[first:last],
        item.start + first,
        item.block_tables,
        samples=item.samples if is_last else (),
        candidate=item.candidate,
    )
