"""Chooses the next token of each sequence from its logits, each by its own parameters, all of them at once.

Chance is a function of (seed, position, candidate): there is no generator whose state would have to move with a
sequence. No row looks at another, so a token does not depend on who else is in the batch.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.core.request import SamplingParams, TokenLogprob
from paceline.engine.scoring import token_logprobs
from paceline.engine.step import SampleTask, StepOutput

# Chooses a token for each row of the logits, which have bans, bias and penalties in them.
Choose = Callable[[Tensor, Sequence[SampleTask], Sequence[int]], Tensor]


def sample(
    logits: Tensor, tasks: Sequence[SampleTask], positions: Sequence[int], choose: Choose | None = None
) -> StepOutput:
    """One token a row of `logits` [num_tasks, vocab_size], float32, for each position.

    What has a kernel to `choose` the same tokens with gives it. Only here are they waited for.
    """
    if not tasks:
        return StepOutput()
    chosen = (choose or choose_tokens)(_adjusted(logits, tasks), tasks, positions)
    token_ids = tuple(chosen.tolist())
    if all(task.num_top_logprobs is None for task in tasks):
        return StepOutput(token_ids)
    return StepOutput(token_ids, _logprobs(logits, tasks, token_ids))


def uniform(seed: int, position: int, candidate: int = 0) -> float:
    """A number in [0, 1) with 53 random bits; the same for the same arguments, everywhere and always."""
    key = struct.pack("<QQI", seed, position, candidate)
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"paceline.sample").digest(), "little")
    return (bits >> 11) * 2.0**-53


def penalised(logits: Tensor, tasks: Sequence[SampleTask]) -> Tensor:
    """`logits` [num_rows, vocab_size] after the bans, bias and penalties of each row's task.

    Repetition as in CTRL (Keskar et al., 2019, section 4.1): seen tokens' logits are divided by the penalty where
    positive and multiplied where negative. Presence and frequency are subtracted, for output tokens.
    """
    logits = logits.clone()
    if biased := [(row, *entry) for row, task in enumerate(tasks) for entry in task.params.logit_bias]:
        at, biases = _places(biased, logits.device)
        logits[at] += biases
    if repeated := [entry for row, task in enumerate(tasks) for entry in _repeated(row, task)]:
        at, penalties = _places(repeated, logits.device)
        logits[at] = torch.where(logits[at] > 0, logits[at] / penalties, logits[at] * penalties)
    if counted := [entry for row, task in enumerate(tasks) for entry in _counted(row, task)]:
        at, penalties = _places(counted, logits.device)
        logits[at] -= penalties
    # A model may name an end of text that it has no logit for.
    vocab_size = logits.shape[-1]
    if banned := [(row, i, 0.0) for row, task in enumerate(tasks) for i in task.banned_ids if i < vocab_size]:
        logits[_places(banned, logits.device)[0]] = float("-inf")
    return logits


def filtered_probs(probs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """`probs` [num_rows, vocab_size] with what top_k, top_p and min_p of each row leave out set to 0; sums to 1 again.

    Of equal probabilities the lower token id stays, so that the cut is the same everywhere.
    """
    ranked, token_ids = probs.sort(dim=-1, descending=True, stable=True)
    device = probs.device
    ranked = ranked * _within_top_k(ranked, params)
    ranked = ranked / ranked.sum(-1, keepdim=True)
    # A token stays if those before it do not yet reach top_p; so the best one always does.
    top_p = _column([p.top_p if p.top_p < 1 else float("inf") for p in params], device)
    ranked = ranked * (ranked.cumsum(-1) - ranked < top_p)
    ranked = ranked * (ranked >= ranked[:, :1] * _column([p.min_p for p in params], device))
    kept = torch.zeros_like(probs).scatter(-1, token_ids, ranked)
    return kept / kept.sum(-1, keepdim=True)


def _adjusted(logits: Tensor, tasks: Sequence[SampleTask]) -> Tensor:
    """A copy where any row needs one; most batches need none."""
    return penalised(logits, tasks) if any(map(_is_adjusted, tasks)) else logits


# A row, a token id, and what its logit is to be changed by.
_Entry = tuple[int, int, float]


def _repeated(row: int, task: SampleTask) -> list[_Entry]:
    penalty = task.params.repetition_penalty
    return [(row, i, penalty) for i in {*task.prompt_ids, *task.output_ids}] if penalty != 1 else []


def _counted(row: int, task: SampleTask) -> list[_Entry]:
    presence, frequency = task.params.presence_penalty, task.params.frequency_penalty
    if not (presence or frequency):
        return []
    return [(row, i, presence + frequency * count) for i, count in Counter(task.output_ids).items()]


def _places(entries: Sequence[_Entry], device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Where the entries are in [num_rows, vocab_size], no place twice, and their numbers in float32."""
    rows, token_ids, numbers = zip(*entries, strict=True)
    at = torch.tensor(rows, device=device), torch.tensor(token_ids, device=device)
    return at, torch.tensor(numbers, dtype=torch.float32, device=device)


def _is_adjusted(task: SampleTask) -> bool:
    return bool(task.params.logit_bias or task.banned_ids or task.params.has_penalties)


def choose_tokens(logits: Tensor, tasks: Sequence[SampleTask], positions: Sequence[int]) -> Tensor:
    """[num_tasks]: the best one, or a drawn one."""
    chosen = logits.argmax(-1)
    by_chance = [row for row, task in enumerate(tasks) if task.params.temperature > 0]
    if by_chance:
        drawing = [tasks[row] for row in by_chance]
        numbers = [uniform(tasks[row].params.seed, positions[row], tasks[row].candidate) for row in by_chance]
        chosen[by_chance] = _draw(logits[by_chance], drawing, numbers)
    return chosen


def _draw(logits: Tensor, tasks: Sequence[SampleTask], numbers: Sequence[float]) -> Tensor:
    """The token at which the cumulated probability, by token id, passes the task's random number."""
    params, device = [task.params for task in tasks], logits.device
    probs = (logits.double() / _column([p.temperature for p in params], device)).softmax(-1)
    cut = [row for row, p in enumerate(params) if 0 < p.top_k < probs.shape[-1] or p.top_p < 1 or p.min_p > 0]
    if cut:
        probs[cut] = filtered_probs(probs[cut], [params[row] for row in cut])
    cumulated = probs.cumsum(-1)
    # Scaled to the sum, which rounds to just under or over 1: the number is then always below the last step.
    thresholds = _column(numbers, device) * cumulated[:, -1:]
    drawn = torch.searchsorted(cumulated, thresholds, right=True).squeeze(-1)
    # Where the logits are no numbers there is no right token, but there must be one that neighbours survive.
    return drawn.clamp(max=cumulated.shape[-1] - 1)


def _within_top_k(ranked: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    ranks = torch.arange(ranked.shape[-1], device=ranked.device)
    return ranks < _column([p.top_k or ranked.shape[-1] for p in params], ranked.device)


def _logprobs(
    logits: Tensor, tasks: Sequence[SampleTask], token_ids: Sequence[int]
) -> tuple[TokenLogprob | None, ...]:
    """Rows that ask for equally many alternatives are looked at together."""
    found: list[TokenLogprob | None] = [None] * len(tasks)
    for num_top in {task.num_top_logprobs for task in tasks if task.num_top_logprobs is not None}:
        rows = [row for row, task in enumerate(tasks) if task.num_top_logprobs == num_top]
        scored = token_logprobs(logits[rows], [token_ids[row] for row in rows], num_top)
        for row, logprob in zip(rows, scored, strict=True):
            found[row] = logprob
    return tuple(found)


def _column(numbers: Sequence[float], device: torch.device) -> Tensor:
    """[num_rows, 1], float64."""
    return torch.tensor(numbers, dtype=torch.float64, device=device).unsqueeze(-1)
