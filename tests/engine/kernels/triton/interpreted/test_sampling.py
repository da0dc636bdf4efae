"""The kernel chooses what `sample` chooses."""

import math
import random

import pytest
import torch
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.engine.kernels.triton.sampling import SamplingRows, sample_tokens
from paceline.engine.sampler import sample
from paceline.engine.step import SampleTask

KINDS = (
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=5.0),
    SamplingParams(top_k=1),
    SamplingParams(top_k=40),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.05),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=1.5, top_k=61, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=1e-30, top_p=0.5),
    SamplingParams(temperature=0.7, top_k=10**6, min_p=1.0),
)


def tasks_of(num_rows: int, seed: int = 0) -> list[SampleTask]:
    """Rows of every kind, each with a seed and a candidate of its own."""
    chance = random.Random(seed)
    return [
        SampleTask(
            SamplingParams(
                temperature=kind.temperature,
                top_k=kind.top_k,
                top_p=kind.top_p,
                min_p=kind.min_p,
                seed=chance.getrandbits(64),
            ),
            candidate=row % 3,
        )
        for row, kind in enumerate(KINDS[row % len(KINDS)] for row in range(num_rows))
    ]


def require_equal(logits: Tensor, seed: int = 0) -> None:
    """Row by row the same tokens."""
    tasks, positions = tasks_of(len(logits), seed), range(100, 100 + len(logits))
    found = sample_tokens(logits, SamplingRows.of(tasks, positions, "cpu"))
    assert tuple(found.tolist()) == sample(logits, tasks, positions).token_ids


@pytest.mark.parametrize("vocab_size", [5, 512, 1300])
def test_every_kind_of_row_gets_the_sampler_s_token(vocab_size: int) -> None:
    """In one batch, of vocabularies within a tile and beyond."""
    torch.manual_seed(vocab_size)
    require_equal(torch.randn(2 * len(KINDS), vocab_size) * 3)


def test_equal_logits_are_told_apart_by_their_token() -> None:
    """Where a filter cuts among equals, the lower ids stay; logits that were rounded have many of them."""
    torch.manual_seed(1)
    require_equal((torch.randn(4 * len(KINDS), 700) * 2).round())


def test_zeros_of_both_signs_are_equal() -> None:
    """As everywhere in arithmetic; of 90 equal ones just 81 would be 0.9, and rounding would decide."""
    torch.manual_seed(2)
    signs = torch.randint(0, 2, (2 * len(KINDS), 89)) * 2.0 - 1.0
    require_equal(signs * 0.0)


def test_banned_tokens_never_come() -> None:
    """A logit of minus infinity has no weight, though it counts as a token."""
    torch.manual_seed(3)
    logits = torch.randn(2 * len(KINDS), 600)
    logits[:, ::2] = -math.inf
    require_equal(logits)


def test_rows_that_are_no_numbers_hurt_no_neighbour() -> None:
    """They give some token of the vocabulary."""
    torch.manual_seed(4)
    logits, tasks = torch.randn(2 * len(KINDS), 60), tasks_of(2 * len(KINDS))
    rows = SamplingRows.of(tasks, range(len(tasks)), "cpu")
    before = sample_tokens(logits, rows)
    logits[::2] = math.nan
    after = sample_tokens(logits, rows)
    assert torch.equal(after[1::2], before[1::2])
    assert ((after >= 0) & (after < 60)).all()


def test_logits_may_be_a_part_of_something_larger() -> None:
    """As those of a vocabulary that was filled up."""
    torch.manual_seed(5)
    require_equal(torch.randn(len(KINDS), 80)[:, :70])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_many_rows_get_the_sampler_s_tokens(seed: int) -> None:
    """Of logits as models have them: a few high ones, many low ones, in bfloat16 and so often equal."""
    torch.manual_seed(seed)
    logits = torch.randn(40 * len(KINDS), 1500 + 100 * seed).exp() * 2
    require_equal(logits.bfloat16().float() if seed % 2 else logits, seed)


@pytest.mark.slow
def test_a_vocabulary_as_large_as_real_ones() -> None:
    """Every kind of row, 128,256 tokens."""
    torch.manual_seed(6)
    require_equal(torch.randn(len(KINDS), 128_256) * 3)
