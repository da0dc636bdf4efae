"""The choice of the next token."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.engine.sampler import filtered_probs, sample, uniform
from tests.factories import GREEDY

NUM_DRAWS = 20_000
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, 1.5, -2.0, 0.25])


def _exact_probs(params: SamplingParams) -> dict[int, float]:
    """Temperature, then top_k, then top_p, in plain arithmetic."""
    scaled = [float(x) / params.temperature for x in LOGITS]
    weights = {token: math.exp(x - max(scaled)) for token, x in enumerate(scaled)}
    ranked = sorted(weights, key=lambda token: (-weights[token], token))
    if params.top_k:
        ranked = ranked[: params.top_k]
    total, kept, reached = sum(weights[token] for token in ranked), [], 0.0
    for token in ranked:
        if reached >= params.top_p < 1:
            break
        kept.append(token)
        reached += weights[token] / total
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


def _draw(params: SamplingParams, num_draws: int = NUM_DRAWS) -> Counter[int]:
    """How often each token is chosen at so many different positions."""
    rows = LOGITS.expand(num_draws, -1)
    return Counter(sample(rows, (params,) * num_draws, tuple(range(num_draws))))


def _random_logits(num_rows: int, vocab_size: int = 50) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1))


def test_uniform_numbers_never_change() -> None:
    """The numbers are part of what a seed means: another version must give the same ones."""
    assert [uniform(0, 0), uniform(1, 0), uniform(0, 1), uniform(2**64 - 1, 2**40, 3)] == [
        0.2215683539542771,
        0.004804177233328155,
        0.05942170435781802,
        0.5597117848258206,
    ]


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**32), candidate=st.integers(0, 100))
def test_uniform_numbers_are_in_range_and_repeatable(seed: int, position: int, candidate: int) -> None:
    """From 0 up to, but not including, 1; the same arguments give the same number."""
    number = uniform(seed, position, candidate)
    assert 0 <= number < 1
    assert number == uniform(seed, position, candidate)


def test_each_argument_of_uniform_counts() -> None:
    """Seeds, positions and candidates each have numbers of their own."""
    numbers = {uniform(s, p, c) for s in range(10) for p in range(10) for c in range(10)}
    assert len(numbers) == 1000


def test_uniform_numbers_are_uniform() -> None:
    """Over positions of one seed each tenth of the range gets a tenth of the numbers, within four deviations."""
    counts = Counter(int(10 * uniform(5, position)) for position in range(NUM_DRAWS))
    deviation = math.sqrt(NUM_DRAWS * 0.1 * 0.9)
    assert sorted(counts) == list(range(10))
    assert all(abs(count - NUM_DRAWS / 10) < 4 * deviation for count in counts.values())


def test_greedy_takes_the_best_token_whatever_the_seed() -> None:
    """Temperature 0 is the highest logit; of equal ones the first."""
    logits = torch.cat([_random_logits(5), torch.ones(1, 50)])
    best = (*(int(row.argmax()) for row in logits[:5]), 0)
    for seed in (0, 7):
        params = SamplingParams(temperature=0.0, seed=seed, top_p=0.5, top_k=3)
        assert sample(logits, (params,) * 6, tuple(range(6))) == best


def test_top_k_of_one_is_greedy() -> None:
    """With one token left there is no chance, equal logits included."""
    logits = torch.cat([_random_logits(20), torch.ones(1, 50)])
    params = SamplingParams(top_k=1, seed=3)
    assert sample(logits, (params,) * 21, tuple(range(21))) == sample(logits, (GREEDY,) * 21, (0,) * 21)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(temperature=0.5, seed=2),
        SamplingParams(temperature=2.0, seed=3),
        SamplingParams(top_k=3, seed=4),
        SamplingParams(top_p=0.7, seed=5),
        SamplingParams(temperature=1.5, top_k=5, top_p=0.8, seed=6),
    ],
    ids=["plain", "cold", "hot", "top-k", "top-p", "all"],
)
def test_draws_follow_the_filtered_distribution(params: SamplingParams) -> None:
    """Over many positions each token comes as often as its exact probability says, and a filtered one never."""
    exact, counts = _exact_probs(params), _draw(params)
    assert set(counts) == set(exact)
    distance = sum(abs(counts[token] / NUM_DRAWS - p) for token, p in exact.items()) / 2
    assert distance < 0.015


def test_a_wrong_distribution_would_be_noticed() -> None:
    """The distance above tells temperature 1 from 1.1."""
    exact, counts = _exact_probs(SamplingParams(temperature=1.1)), _draw(SamplingParams(seed=1))
    assert sum(abs(counts[token] / NUM_DRAWS - p) for token, p in exact.items()) / 2 > 0.015


@given(
    temperature=st.floats(0.01, 100),
    top_k=st.integers(0, 12),
    top_p=st.floats(1e-6, 1.0),
)
def test_filters_keep_the_most_probable_tokens(temperature: float, top_k: int, top_p: float) -> None:
    """What is left is the definition's set, best first, and sums to one."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    probs, token_ids = filtered_probs(LOGITS, params)
    ranked = sorted(range(len(LOGITS)), key=lambda token: (-float(LOGITS[token]), token))
    assert token_ids.tolist() == ranked[: len(token_ids)]
    assert 1 <= len(token_ids) <= (top_k or len(LOGITS))
    assert float(probs.sum()) == pytest.approx(1)
    exact = _exact_probs(SamplingParams(temperature=temperature, top_k=top_k))
    kept = [exact[token] for token in token_ids.tolist()]
    # The set reaches top_p, and without its last token it does not; the cut may fall on the last bit.
    assert sum(kept) >= top_p - 1e-9
    assert sum(kept[:-1]) <= top_p + 1e-9


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-3])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    """No overflow and no NaN on the way to 0."""
    logits = _random_logits(10)
    params = SamplingParams(temperature=temperature, seed=1)
    assert sample(logits, (params,) * 10, tuple(range(10))) == tuple(logits.argmax(-1).tolist())


def test_a_token_depends_on_its_own_row_seed_and_position_only() -> None:
    """In any company and any order the same token is chosen, greedy neighbours among them."""
    logits, positions = _random_logits(30), tuple(range(100, 130))
    params = tuple(GREEDY if n % 3 == 0 else SamplingParams(seed=n, top_p=0.9) for n in range(30))
    together = sample(logits, params, positions)
    alone = tuple(sample(logits[n : n + 1], (params[n],), (positions[n],))[0] for n in range(30))
    order = torch.randperm(30, generator=torch.Generator().manual_seed(2)).tolist()
    shuffled = sample(logits[order], tuple(params[n] for n in order), tuple(positions[n] for n in order))
    assert together == alone
    assert shuffled == tuple(together[n] for n in order)


def test_a_seed_is_reproducible_and_another_seed_is_another_output() -> None:
    """The same seed and positions give the same tokens; a different seed differs somewhere in twenty."""
    logits, positions = LOGITS.expand(20, -1), tuple(range(20))
    draws = [sample(logits, (SamplingParams(seed=seed),) * 20, positions) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_no_row_is_no_token() -> None:
    """A step of chunks samples nothing."""
    assert sample(torch.empty(0, 50), (), ()) == ()
