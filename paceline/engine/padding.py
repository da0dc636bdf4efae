"""Decode batches of few sizes, for what can only be done again in just the same size, such as a graph of a GPU's work. Plain numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.core.kv_layout import BlockId
from paceline.core.request import RequestId, SequenceId
from paceline.engine.step import ScheduledSequence, SchedulerOutput

# Programs are started for the longest context of a size, and those beyond a sequence's own end at once: four times too many cost
# little, and a model of 128k tokens needs five sizes of context.
_FIRST_CONTEXT, _CONTEXT_FACTOR = 1024, 4
_NOBODY = SequenceId(RequestId("padding"), 0)


@dataclass(frozen=True, slots=True, order=True)
class DecodeShape:
    """A batch of `num_rows` sequences with one token each, whose contexts have at most `max_context` tokens."""

    num_rows: int
    max_context: int


def row_counts(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 12, 16, 24, 32, 48, ... and `most`: no more than half as many rows again as there are sequences, from four on."""
    counts, step = [1, 2, 4, 8], 8
    while counts[-1] < most:
        counts += [step + step // 2, 2 * step]
        step *= 2
    return (*(count for count in counts if count < most), most) if most > 0 else ()


def context_limits(max_model_tokens: int) -> tuple[int, ...]:
    """1024, 4096, ... and the longest context that a sequence may have."""
    limits, limit = list[int](), _FIRST_CONTEXT
    while limit < max_model_tokens:
        limits.append(limit)
        limit *= _CONTEXT_FACTOR
    return (*limits, max_model_tokens)


def decode_shapes(most_rows: int, max_model_tokens: int) -> tuple[DecodeShape, ...]:
    """All there are, the largest first: the memory that one needs is then enough for those after it."""
    shapes = [
        DecodeShape(rows, context)
        for rows in row_counts(most_rows)
        for context in context_limits(max_model_tokens)
    ]
    return tuple(sorted(shapes, reverse=True))


def shape_for(output: SchedulerOutput, shapes: Sequence[DecodeShape]) -> DecodeShape | None:
    """The smallest that has room for a step; None if it is not one of decodes alone, or there is none so large."""
    scheduled = output.scheduled
    if any(len(item.token_ids) != 1 or item.score is not None for item in scheduled):
        return None
    num_rows, context = len(scheduled), max(item.end for item in scheduled)
    fitting = [shape for shape in shapes if shape.num_rows >= num_rows and shape.max_context >= context]
    return min(fitting, default=None)


def nobody(scratch: BlockId, num_groups: int) -> ScheduledSequence:
    """A row that computes a token into the first slot of the `scratch` block, which is no sequence's, and sees nothing else."""
    return ScheduledSequence(_NOBODY, (0,), 0, ((scratch,),) * num_groups)


def padded(output: SchedulerOutput, num_rows: int, scratch: BlockId) -> SchedulerOutput:
    """The step with rows of nobody behind the others, up to `num_rows`; none of them samples."""
    num_groups = len(output.scheduled[0].block_tables)
    more = (nobody(scratch, num_groups),) * (num_rows - len(output.scheduled))
    return replace(output, scheduled=output.scheduled + more)
