"""Log probabilities of tokens that are known: what the model thought of them before it saw them. No row looks at another."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.request import TokenLogprob
from paceline.engine.step import ScoreTask

# A long chunk against a large vocabulary has hundreds of megabytes of logits in the model's type; in float32, and with their
# log probabilities beside them, they exist only for so many rows at a time.
_MAX_ROWS = 64


def score(logits: Tensor, tasks: Sequence[ScoreTask]) -> tuple[tuple[TokenLogprob, ...], ...]:
    """The log probabilities of each task's targets; `logits` [num_targets, vocab_size] are in the tasks' order."""
    if not tasks:
        return ()
    of_task = torch.split(logits, [len(task.target_ids) for task in tasks])
    return tuple(_score_one(rows, task) for rows, task in zip(of_task, tasks, strict=True))


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Of `token_ids`, one a row of `logits` [num_rows, vocab_size], float32; with the best tokens of each row."""
    logprobs = logits.log_softmax(-1)
    ids = torch.tensor(token_ids, device=logits.device).unsqueeze(-1)
    own = logprobs.gather(-1, ids).squeeze(-1).tolist()
    top_values, top_ids = (best.tolist() for best in logprobs.topk(num_top))
    rows = zip(token_ids, own, top_ids, top_values, strict=True)
    return [
        TokenLogprob(token_id, value, tuple(zip(best_ids, values, strict=True)))
        for token_id, value, best_ids, values in rows
    ]


def _score_one(logits: Tensor, task: ScoreTask) -> tuple[TokenLogprob, ...]:
    scores: list[TokenLogprob] = []
    for start in range(0, len(logits), _MAX_ROWS):
        rows = slice(start, start + _MAX_ROWS)
        scores += token_logprobs(logits[rows].float(), task.target_ids[rows], task.num_top_logprobs)
    return tuple(scores)
