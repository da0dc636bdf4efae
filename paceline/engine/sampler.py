"""Chooses the next token of each sequence from its logits, each by its own parameters, all of them at once.

Chance is a function of (seed, position, candidate): there is no generator whose state would have to move with a
sequence. No row looks at another, so a token does not depend on who else is in the batch.
"""

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.request import SamplingParams, TokenLogprob
from paceline.engine.scoring import token_logprobs
from paceline.engine.step import SampleTask, StepOutput


def sample(logits: Tensor, tasks: Sequence[SampleTask]) -> StepOutput:
    """One token a row of `logits` [num_tasks, vocab_size], float32."""
    if not tasks:
        return StepOutput()
    token_ids = _choose(_adjusted(logits, tasks), tasks)
    if all(task.num_top_logprobs is None for task in tasks):
        return StepOutput(token_ids)
    rows = zip(logits, tasks, token_ids, strict=True)
    return StepOutput(token_ids, tuple(_logprob(row, task, token_id) for row, task, token_id in rows))


def uniform(seed: int, position: int, candidate: int = 0) -> float:
    """A number in [0, 1) with 53 random bits; the same for the same arguments, everywhere and always."""
    key = struct.pack("<QQI", seed, position, candidate)
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"paceline.sample").digest(), "little")
    return (bits >> 11) * 2.0**-53


def penalised(logits: Tensor, task: SampleTask) -> Tensor:
    """`logits` [vocab_size] after bans, bias and penalties.

    Repetition as in CTRL (Keskar et al., 2019, section 4.1): seen tokens' logits are divided by the penalty where
    positive and multiplied where negative. Presence and frequency are subtracted, for output tokens.
    """
    params, logits = task.params, logits.clone()
    if params.logit_bias:
        token_ids, biases = zip(*params.logit_bias, strict=True)
        logits[list(token_ids)] += torch.tensor(biases, dtype=logits.dtype)
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*task.prompt_ids, *task.output_ids}))
        before = logits[seen]
        logits[seen] = torch.where(
            before > 0, before / params.repetition_penalty, before * params.repetition_penalty
        )
    if task.output_ids and (params.presence_penalty or params.frequency_penalty):
        seen, counts = torch.unique(torch.tensor(task.output_ids), return_counts=True)
        logits[seen] -= params.presence_penalty + params.frequency_penalty * counts
    logits[list(task.banned_ids)] = float("-inf")
    return logits


def filtered_probs(probs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """`probs` [num_rows, vocab_size] with what top_k, top_p and min_p of each row leave out set to 0; sums to 1 again.

    Of equal probabilities the lower token id stays, so that the cut is the same everywhere.
    """
    ranked, token_ids = probs.sort(dim=-1, descending=True, stable=True)
    ranked = ranked * _within_top_k(ranked, params)
    ranked = ranked / ranked.sum(-1, keepdim=True)
    # A token stays if those before it do not yet reach top_p; so the best one always does.
    top_p = _column([p.top_p if p.top_p < 1 else float("inf") for p in params])
    ranked = ranked * (ranked.cumsum(-1) - ranked < top_p)
    ranked = ranked * (ranked >= ranked[:, :1] * _column([p.min_p for p in params]))
    kept = torch.zeros_like(probs).scatter(-1, token_ids, ranked)
    return kept / kept.sum(-1, keepdim=True)


def _adjusted(logits: Tensor, tasks: Sequence[SampleTask]) -> Tensor:
    """A copy where any row needs one; most batches need none."""
    rows = [row for row, task in enumerate(tasks) if _is_adjusted(task)]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        logits[row] = penalised(logits[row], tasks[row])
    return logits


def _is_adjusted(task: SampleTask) -> bool:
    return bool(task.params.logit_bias or task.banned_ids or task.params.has_penalties)


def _choose(logits: Tensor, tasks: Sequence[SampleTask]) -> tuple[int, ...]:
    chosen = logits.argmax(-1)
    by_chance = [row for row, task in enumerate(tasks) if task.params.temperature > 0]
    if by_chance:
        chosen[by_chance] = _draw(logits[by_chance], [tasks[row] for row in by_chance])
    return tuple(chosen.tolist())


def _draw(logits: Tensor, tasks: Sequence[SampleTask]) -> Tensor:
    """The token at which the cumulated probability, by token id, passes the task's random number."""
    params = [task.params for task in tasks]
    probs = (logits.double() / _column([p.temperature for p in params])).softmax(-1)
    cut = [row for row, p in enumerate(params) if 0 < p.top_k < probs.shape[-1] or p.top_p < 1 or p.min_p > 0]
    if cut:
        probs[cut] = filtered_probs(probs[cut], [params[row] for row in cut])
    cumulated = probs.cumsum(-1)
    # Scaled to the sum, which rounds to just under or over 1: the number is then always below the last step.
    numbers = [uniform(task.params.seed, task.position, task.candidate) for task in tasks]
    thresholds = _column(numbers) * cumulated[:, -1:]
    return torch.searchsorted(cumulated, thresholds, right=True).squeeze(-1)


def _within_top_k(ranked: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    ranks = torch.arange(ranked.shape[-1])
    return ranks < _column([p.top_k or ranked.shape[-1] for p in params])


def _logprob(logits: Tensor, task: SampleTask, token_id: int) -> TokenLogprob | None:
    if task.num_top_logprobs is None:
        return None
    return token_logprobs(logits[None], [token_id], task.num_top_logprobs)[0]


def _column(numbers: Sequence[float]) -> Tensor:
    """[num_rows, 1], float64."""
    return torch.tensor(numbers, dtype=torch.float64).unsqueeze(-1)
