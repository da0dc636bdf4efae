"""A step's work as tensors: the tokens of all its sequences end to end, and where each one's KV lies."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.kv_layout import BlockId
from paceline.engine.step import SampleTask, ScheduledSequence, SchedulerOutput, ScoreTask


@dataclass(frozen=True, slots=True)
class QueryRange:
    """One sequence's part of the batch: its tokens [first, last) attend to the first `context` tokens it has."""

    first: int
    last: int
    context: int
    block_table: Tensor  # [ceil(context / block_size)]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A ragged batch of `num_tokens` tokens.

    token_ids   [ a a a a | b | c c ]     a and c compute chunks, b decodes
    queries       [0, 4)  [4, 5) [5, 7)   one range each
    """

    token_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    slot_mapping: Tensor  # [num_tokens], block id * block size + offset
    queries: tuple[QueryRange, ...]
    sample_rows: Tensor  # [num_samples], rows of token_ids after which a token is chosen
    sample_tasks: tuple[SampleTask, ...]  # num_samples
    score_rows: Tensor  # [num_targets], rows of token_ids after which a known token follows
    score_tasks: tuple[ScoreTask, ...]  # their targets together are num_targets

    @property
    def logit_rows(self) -> Tensor:
        """[num_samples + num_targets], rows of token_ids whose logits are needed: first those that sample."""
        return torch.cat([self.sample_rows, self.score_rows])


def build_forward_batch(output: SchedulerOutput, block_size: int) -> ForwardBatch:
    """Lays the scheduled sequences end to end."""
    scheduled = output.scheduled
    queries, sample_rows, first = [], [], 0
    score_rows: list[int] = []
    for item in scheduled:
        last = first + len(item.token_ids)
        queries.append(QueryRange(first, last, item.end, _block_table(item, block_size)))
        if item.sample is not None:
            sample_rows.append(last - 1)
        if item.score is not None:
            first_row = first + item.score.first_row
            score_rows += range(first_row, first_row + len(item.score.target_ids))
        first = last
    return ForwardBatch(
        token_ids=torch.tensor([token_id for item in scheduled for token_id in item.token_ids]),
        positions=torch.tensor([position for item in scheduled for position in range(item.start, item.end)]),
        slot_mapping=torch.tensor([slot for item in scheduled for slot in _slots(item, block_size)]),
        queries=tuple(queries),
        sample_rows=torch.tensor(sample_rows, dtype=torch.long),
        sample_tasks=tuple(item.sample for item in scheduled if item.sample is not None),
        score_rows=torch.tensor(score_rows, dtype=torch.long),
        score_tasks=tuple(item.score for item in scheduled if item.score is not None),
    )


def _block_table(item: ScheduledSequence, block_size: int) -> Tensor:
    num_blocks = -(-item.end // block_size)
    return torch.tensor(item.block_table[:num_blocks])


def _slots(item: ScheduledSequence, block_size: int) -> list[int]:
    table: tuple[BlockId, ...] = item.block_table
    return [
        table[position // block_size] * block_size + position % block_size
        for position in range(item.start, item.end)
    ]
