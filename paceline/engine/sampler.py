"""Chooses the next token of each sequence from its logits.

Chance is a function of (seed, position): there is no generator whose state would have to move with a sequence.
"""

import hashlib
import struct

import torch
from torch import Tensor

from paceline.core.request import SamplingParams


def sample(logits: Tensor, params: tuple[SamplingParams, ...], positions: tuple[int, ...]) -> tuple[int, ...]:
    """One token a row of `logits` [num_samples, vocab_size]; `positions` are those of the tokens to be chosen."""
    greedy = logits.argmax(-1).tolist()
    rows = zip(logits, params, positions, greedy, strict=True)
    return tuple(
        best if row_params.temperature == 0 else _sample_row(row, row_params, position)
        for row, row_params, position, best in rows
    )


def uniform(seed: int, position: int, candidate: int = 0) -> float:
    """A number in [0, 1) with 53 random bits; the same for the same arguments, everywhere and always."""
    key = struct.pack("<QQI", seed, position, candidate)
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"paceline.sample").digest(), "little")
    return (bits >> 11) * 2.0**-53


def filtered_probs(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """What is left after temperature, top_k and top_p: probabilities, best first, and their token ids.

    `logits` is [vocab_size]. Equal probabilities are ordered by token id, so that the cut is the same everywhere.
    """
    probs, token_ids = (logits.double() / params.temperature).softmax(-1).sort(descending=True, stable=True)
    if 0 < params.top_k < len(probs):
        probs, token_ids = probs[: params.top_k], token_ids[: params.top_k]
        probs = probs / probs.sum()
    if params.top_p < 1:
        # A token stays if those before it do not yet reach top_p; the best one always does.
        num_kept = int((probs.cumsum(0) - probs < params.top_p).sum())
        probs, token_ids = probs[:num_kept], token_ids[:num_kept]
    return probs / probs.sum(), token_ids


def _sample_row(logits: Tensor, params: SamplingParams, position: int) -> int:
    probs, token_ids = filtered_probs(logits, params)
    threshold = uniform(params.seed, position)
    index = int(torch.searchsorted(probs.cumsum(0), threshold, right=True))
    # The sum may round to just under 1, and the threshold may lie above it.
    return int(token_ids[min(index, len(token_ids) - 1)])
