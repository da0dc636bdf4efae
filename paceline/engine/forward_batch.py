"""A step's work as tensors: the tokens of all its sequences end to end, and where each one's KV lies."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.engine.device import Device
from paceline.engine.step import SampleTask, ScheduledSequence, SchedulerOutput, ScoreTask


@dataclass(frozen=True, slots=True)
class QueryRange:
    """One sequence's part of the batch: its tokens [first, last) attend to the first `context` tokens it has.

    `block_tables` has one for each KV group, [ceil(context / block_size)]; 0 stands where there is no block, since none of
    these tokens sees it.
    """

    first: int
    last: int
    context: int
    block_tables: tuple[Tensor, ...]

    @property
    def start(self) -> int:
        """The position of its first token."""
        return self.context - (self.last - self.first)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A ragged batch of `num_tokens` tokens.

    token_ids   [ a a a a | b | c c ]     a and c compute chunks, b decodes
    queries       [0, 4)  [4, 5) [5, 7)   one range each
    """

    token_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    slot_mappings: tuple[Tensor, ...]  # one a KV group, [num_tokens], block id * block size + offset
    queries: tuple[QueryRange, ...]
    sample_rows: Tensor  # [num_samples], rows of token_ids after which a token is chosen; one row for several candidates
    sample_tasks: tuple[SampleTask, ...]  # num_samples
    sample_positions: tuple[int, ...]  # num_samples, where in its sequence each of these tokens will be
    score_rows: Tensor  # [num_targets], rows of token_ids after which a known token follows
    score_tasks: tuple[ScoreTask, ...]  # their targets together are num_targets

    @property
    def logit_rows(self) -> Tensor:
        """[num_samples + num_targets], rows of token_ids whose logits are needed: first those that sample."""
        return torch.cat([self.sample_rows, self.score_rows])


def on_device(batch: ForwardBatch, device: Device) -> ForwardBatch:
    """The same with the tensors of the step there. Block tables stay: they are read where they are laid out for attention."""
    if device.is_host:
        return batch
    firsts = (batch.token_ids, batch.positions, batch.sample_rows, batch.score_rows)
    token_ids, positions, sample_rows, score_rows, *slots = device.upload((*firsts, *batch.slot_mappings))
    return replace(
        batch,
        token_ids=token_ids,
        positions=positions,
        sample_rows=sample_rows,
        score_rows=score_rows,
        slot_mappings=tuple(slots),
    )


def build_forward_batch(output: SchedulerOutput, block_size: int) -> ForwardBatch:
    """Lays the scheduled sequences end to end."""
    scheduled = output.scheduled
    queries, first = [], 0
    sample_rows: list[int] = []
    score_rows: list[int] = []
    for item in scheduled:
        last = first + len(item.token_ids)
        queries.append(QueryRange(first, last, item.end, _block_tables(item, block_size)))
        sample_rows += [last - 1] * len(item.samples)
        if item.score is not None:
            first_row = first + item.score.first_row
            score_rows += range(first_row, first_row + len(item.score.target_ids))
        first = last
    return ForwardBatch(
        token_ids=torch.tensor([token_id for item in scheduled for token_id in item.token_ids]),
        positions=torch.tensor([position for item in scheduled for position in range(item.start, item.end)]),
        slot_mappings=tuple(
            torch.tensor([slot for item in scheduled for slot in _slots(item, group, block_size)])
            for group in range(len(scheduled[0].block_tables))
        ),
        queries=tuple(queries),
        sample_rows=torch.tensor(sample_rows, dtype=torch.long),
        sample_tasks=tuple(task for item in scheduled for task in item.samples),
        sample_positions=tuple(item.end for item in scheduled for _ in item.samples),
        score_rows=torch.tensor(score_rows, dtype=torch.long),
        score_tasks=tuple(item.score for item in scheduled if item.score is not None),
    )


def _block_tables(item: ScheduledSequence, block_size: int) -> tuple[Tensor, ...]:
    num_blocks = -(-item.end // block_size)
    return tuple(
        torch.tensor([block_id or 0 for block_id in table[:num_blocks]]) for table in item.block_tables
    )


def _slots(item: ScheduledSequence, group: int, block_size: int) -> list[int]:
    table = item.block_tables[group]
    slots = []
    for position in range(item.start, item.end):
        block_id = table[position // block_size]
        assert block_id is not None, "a token that is computed has a place"
        slots.append(block_id * block_size + position % block_size)
    return slots
