"""The kernel chooses what `sample` chooses."""

import math
from dataclasses import replace

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.engine.kernels.triton.sampling import SamplingRows, sample_tokens
from paceline.engine.sampler import sample
from paceline.engine.step import SampleTask
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


@pytest.mark.parametrize(
    "params",
    [SamplingParams(top_k=21, top_p=0.8), SamplingParams(top_k=70, top_p=0.99), SamplingParams(top_p=0.9)],
    ids=["above", "at", "alone"],
)
def test_equals_at_either_cut_are_counted(params: SamplingParams) -> None:
    """The cut of top_p lies among equals above that of top_k, or among the same ones."""
    logits = torch.zeros(1, 80)
    logits[:, ::4] = 2.0
    tasks = [SampleTask(replace(params, seed=seed)) for seed in range(20)]
    rows = SamplingRows.of(tasks, range(20), "cpu")
    found = sample_tokens(logits.expand(20, -1), rows)
    assert tuple(found.tolist()) == sample(logits.expand(20, -1), tasks, range(20)).token_ids


def test_equals_are_counted_from_tile_to_tile() -> None:
    """A cut in the second tile of a row in which all are equal."""
    tasks = [SampleTask(SamplingParams(top_k=top_k, seed=top_k)) for top_k in range(520, 528)]
    logits, positions = torch.zeros(8, 1100), range(8)
    found = sample_tokens(logits, SamplingRows.of(tasks, positions, "cpu"))
    assert tuple(found.tolist()) == sample(logits, tasks, positions).token_ids


def test_a_number_at_a_step_is_past_it() -> None:
    """Of four equal tokens each has a quarter, without its upper end."""
    numbers = torch.tensor([0.0, 0.25, 0.4999, 0.5, 0.75, 1 - 2.0**-53], dtype=torch.float64)
    rows = replace(SamplingRows.of([SampleTask(SamplingParams())] * 6, range(6), "cpu"), numbers=numbers)
    assert sample_tokens(torch.zeros(6, 4), rows).tolist() == [0, 1, 1, 2, 3, 3]


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
