"""The kernel chooses what `sample` chooses."""

import math

import pytest
import torch

from paceline.engine.kernels.triton.sampling import SamplingRows, sample_tokens
from tests.engine.kernels.triton.checks import KINDS_OF_ROWS, require_tokens, tasks_of


@pytest.mark.parametrize("vocab_size", [5, 512, 600])
def test_every_kind_of_row_gets_the_sampler_s_token(vocab_size: int) -> None:
    """In one batch, of vocabularies within a tile and beyond."""
    torch.manual_seed(vocab_size)
    require_tokens(torch.randn(2 * len(KINDS_OF_ROWS), vocab_size) * 3)


def test_equal_logits_are_told_apart_by_their_token() -> None:
    """Where a filter cuts among equals, the lower ids stay; logits that were rounded have many of them."""
    torch.manual_seed(1)
    require_tokens((torch.randn(3 * len(KINDS_OF_ROWS), 300) * 2).round())


def test_zeros_of_both_signs_are_equal() -> None:
    """As everywhere in arithmetic; of 90 equal ones just 81 would be 0.9, and rounding would decide."""
    torch.manual_seed(2)
    signs = torch.randint(0, 2, (2 * len(KINDS_OF_ROWS), 89)) * 2.0 - 1.0
    require_tokens(signs * 0.0)


def test_banned_tokens_never_come() -> None:
    """A logit of minus infinity has no weight, though it counts as a token."""
    torch.manual_seed(3)
    logits = torch.randn(2 * len(KINDS_OF_ROWS), 600)
    logits[:, ::2] = -math.inf
    require_tokens(logits)


def test_rows_that_are_no_numbers_hurt_no_neighbour() -> None:
    """They give some token of the vocabulary."""
    torch.manual_seed(4)
    logits, tasks = torch.randn(2 * len(KINDS_OF_ROWS), 60), tasks_of(2 * len(KINDS_OF_ROWS))
    rows = SamplingRows.of(tasks, range(len(tasks)), "cpu")
    before = sample_tokens(logits, rows)
    logits[::2] = math.nan
    after = sample_tokens(logits, rows)
    assert torch.equal(after[1::2], before[1::2])
    assert ((after >= 0) & (after < 60)).all()


def test_logits_may_be_a_part_of_something_larger() -> None:
    """As those of a vocabulary that was filled up."""
    torch.manual_seed(5)
    require_tokens(torch.randn(len(KINDS_OF_ROWS), 80)[:, :70])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_many_rows_get_the_sampler_s_tokens(seed: int) -> None:
    """Of logits as models have them: a few high ones, many low ones, in bfloat16 and so often equal."""
    torch.manual_seed(seed)
    logits = torch.randn(10 * len(KINDS_OF_ROWS), 500 + 200 * seed).exp() * 2
    require_tokens(logits.bfloat16().float() if seed % 2 else logits, seed)


@pytest.mark.slow
def test_a_vocabulary_as_large_as_real_ones() -> None:
    """Every kind of row, 128,256 tokens."""
    torch.manual_seed(6)
    require_tokens(torch.randn(len(KINDS_OF_ROWS), 128_256) * 3)
