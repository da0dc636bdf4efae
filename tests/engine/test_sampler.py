"""The choice of the next token."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.engine.sampler import filtered_probs, penalised, sample, uniform
from paceline.engine.step import SampleTask
from tests.factories import GREEDY

NUM_DRAWS = 20_000
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, 1.5, -2.0, 0.25])


def draw(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> tuple[int, ...]:
    """One token a row, by its own parameters and position."""
    return sample(logits, [SampleTask(each) for each in params], positions).token_ids


def _exact_probs(params: SamplingParams) -> dict[int, float]:
    """Temperature, then top_k, then top_p, then min_p, in plain arithmetic."""
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
    kept = [token for token in kept if weights[token] >= params.min_p * weights[kept[0]]]
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


def _draw(params: SamplingParams, num_draws: int = NUM_DRAWS) -> Counter[int]:
    """How often each token is chosen at so many different positions."""
    rows = LOGITS.expand(num_draws, -1)
    return Counter(draw(rows, (params,) * num_draws, range(num_draws)))


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
        assert draw(logits, (params,) * 6, tuple(range(6))) == best


def test_top_k_of_one_is_greedy() -> None:
    """With one token left there is no chance, equal logits included."""
    logits = torch.cat([_random_logits(20), torch.ones(1, 50)])
    params = SamplingParams(top_k=1, seed=3)
    assert draw(logits, (params,) * 21, tuple(range(21))) == draw(logits, (GREEDY,) * 21, (0,) * 21)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(temperature=0.5, seed=2),
        SamplingParams(temperature=2.0, seed=3),
        SamplingParams(top_k=3, seed=4),
        SamplingParams(top_p=0.7, seed=5),
        SamplingParams(min_p=0.2, seed=7),
        SamplingParams(temperature=1.5, top_k=6, top_p=0.9, min_p=0.3, seed=6),
    ],
    ids=["plain", "cold", "hot", "top-k", "top-p", "min-p", "all"],
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
    min_p=st.floats(0, 1),
)
def test_filters_keep_the_most_probable_tokens(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """What is left is the definition's set, in its old proportions, and sums to one."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probs = (LOGITS.double() / temperature).softmax(-1)
    left = filtered_probs(probs[None], [params])[0]
    kept = left.nonzero().flatten().tolist()
    ranked = sorted(range(len(LOGITS)), key=lambda token: (-float(probs[token]), token))
    assert sorted(kept) == sorted(ranked[: len(kept)])
    assert float(left.sum()) == pytest.approx(1)
    assert torch.allclose(left[kept] / left[kept].sum(), probs[kept] / probs[kept].sum())
    # Without min_p the set reaches top_p, and without its last token it does not; a cut may fall on the last bit.
    exact = _exact_probs(SamplingParams(temperature=temperature, top_k=top_k))
    reached = [exact[token] for token in ranked[: len(kept)]]
    assert sum(reached[:-1]) <= top_p + 1e-9
    assert all(p >= min_p * reached[0] - 1e-12 for p in reached)
    if min_p == 0:
        assert sum(reached) >= top_p - 1e-9


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-3])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    """No overflow and no NaN on the way to 0."""
    logits = _random_logits(10)
    params = SamplingParams(temperature=temperature, seed=1)
    assert draw(logits, (params,) * 10, tuple(range(10))) == tuple(logits.argmax(-1).tolist())


def test_a_token_depends_on_its_own_row_seed_and_position_only() -> None:
    """In any company and any order the same token is chosen, greedy neighbours among them."""
    logits, positions = _random_logits(30), tuple(range(100, 130))
    params = tuple(GREEDY if n % 3 == 0 else SamplingParams(seed=n, top_p=0.9) for n in range(30))
    together = draw(logits, params, positions)
    alone = tuple(draw(logits[n : n + 1], (params[n],), (positions[n],))[0] for n in range(30))
    order = torch.randperm(30, generator=torch.Generator().manual_seed(2)).tolist()
    shuffled = draw(logits[order], tuple(params[n] for n in order), tuple(positions[n] for n in order))
    assert together == alone
    assert shuffled == tuple(together[n] for n in order)


def test_a_seed_is_reproducible_and_another_seed_is_another_output() -> None:
    """The same seed and positions give the same tokens; a different seed differs somewhere in twenty."""
    logits, positions = LOGITS.expand(20, -1), tuple(range(20))
    draws = [draw(logits, (SamplingParams(seed=seed),) * 20, positions) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_no_row_is_no_token() -> None:
    """A step of chunks samples nothing."""
    assert sample(torch.empty(0, 50), (), ()).token_ids == ()


# -- what depends on more than the logits


def test_repetition_divides_what_is_likely_and_multiplies_what_is_not() -> None:
    """Tokens of prompt and output are pushed down, once each, however often they were seen; others stay."""
    task = SampleTask(SamplingParams(repetition_penalty=2), prompt_ids=(0, 0, 4), output_ids=(6,))
    expected = LOGITS.clone()
    expected[0], expected[4], expected[6] = 1.0, -2.0, -4.0
    assert torch.equal(penalised(LOGITS[None], [task])[0], expected)


def test_each_row_has_its_own_changes() -> None:
    """Rows with every kind of change, and without any, give together what each gives alone, to the bit."""
    tasks = [
        SampleTask(SamplingParams(repetition_penalty=1.7), prompt_ids=(1, 4), output_ids=(2,)),
        SampleTask(GREEDY),
        SampleTask(SamplingParams(presence_penalty=0.3, frequency_penalty=0.1), output_ids=(2, 2, 6)),
        SampleTask(SamplingParams(logit_bias=((0, -3.0), (4, 5.0))), banned_ids=(1, 7)),
    ]
    rows = torch.stack([LOGITS + row for row in range(4)])
    together = penalised(rows, tasks)
    alone = [penalised(rows[row : row + 1], [task])[0] for row, task in enumerate(tasks)]
    assert torch.equal(together, torch.stack(alone))
    assert torch.equal(together[1], rows[1])
    assert (together != rows).sum() == 3 + 2 + 4


def test_an_end_of_text_without_a_logit_is_no_matter() -> None:
    """A model may name one beyond its last row."""
    task = SampleTask(GREEDY, banned_ids=(3, 10**6))
    assert float(penalised(LOGITS[None], [task])[0, 3]) == -math.inf


def test_logits_that_are_no_numbers_hurt_no_neighbour() -> None:
    """Their row gives some token of the vocabulary, and the others what they give alone."""
    task = SampleTask(SamplingParams(seed=3))
    good = LOGITS[None]
    bad = torch.full_like(good, math.nan)
    both = sample(torch.cat([bad, good]), (task, task), (5, 5)).token_ids
    assert 0 <= both[0] < good.shape[1]
    assert both[1:] == sample(good, (task,), (5,)).token_ids


def test_presence_counts_once_and_frequency_each_time_and_only_output() -> None:
    """Both are subtracted, for tokens of the output; the prompt's stay as they are."""
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    task = SampleTask(params, prompt_ids=(0,), output_ids=(1, 2, 1, 1))
    expected = LOGITS.clone()
    expected[1] -= 0.5 + 3 * 0.25
    expected[2] -= 0.5 + 0.25
    assert torch.allclose(penalised(LOGITS[None], [task])[0], expected)


def test_a_bias_is_added_and_comes_before_penalties() -> None:
    """A biased token is penalised by its biased logit."""
    params = SamplingParams(repetition_penalty=2, logit_bias=((4, 3.0), (7, -1.0)))
    changed = penalised(LOGITS[None], [SampleTask(params, prompt_ids=(4,))])[0]
    assert (float(changed[4]), float(changed[7])) == (1.0, -0.75)


def test_a_banned_token_never_comes() -> None:
    """However likely it is, greedy or by chance; without the ban it comes."""
    for params in (GREEDY, SamplingParams(seed=3)):
        free = {sample(LOGITS[None], [SampleTask(params)], [n]).token_ids[0] for n in range(200)}
        banned = {
            sample(LOGITS[None], [SampleTask(params, banned_ids=(0,))], [n]).token_ids[0] for n in range(200)
        }
        assert 0 in free
        assert 0 not in banned


def test_each_row_has_its_own_rules() -> None:
    """In a batch of every kind of parameters each token is what it would be alone."""
    kinds = [
        GREEDY,
        replace(GREEDY, repetition_penalty=1.5),
        SamplingParams(seed=1, min_p=0.1),
        SamplingParams(seed=2, frequency_penalty=1.0, top_k=4),
        SamplingParams(seed=3, logit_bias=((5, 4.0),), top_p=0.6),
    ]
    logits = _random_logits(20)
    tasks = [SampleTask(kinds[n % 5], (1, 2, 3), (n, 4, n), (7,) if n % 2 else ()) for n in range(20)]
    alone = tuple(sample(logits[n : n + 1], tasks[n : n + 1], [n]).token_ids[0] for n in range(20))
    before = logits.clone()
    assert sample(logits, tasks, range(20)).token_ids == alone
    assert torch.equal(logits, before)


# -- log probabilities


def test_logprobs_are_the_models_own() -> None:
    """Of the chosen token and of the best ones, before temperature, penalties and filters; None where nobody asked."""
    params = SamplingParams(temperature=0.3, top_k=2, repetition_penalty=3, seed=1)
    tasks = [
        SampleTask(params, (0,), num_top_logprobs=3),
        SampleTask(GREEDY),
        SampleTask(GREEDY, num_top_logprobs=0),
    ]
    step = sample(LOGITS.expand(3, -1), tasks, (1, 1, 2))
    exact = LOGITS.log_softmax(-1)
    first, none, last = step.logprobs
    assert none is None
    assert first is not None
    assert [token_id for token_id, _ in first.top] == [0, 5, 1]
    assert [logprob for _, logprob in first.top] == pytest.approx([float(exact[n]) for n in (0, 5, 1)])
    assert last is not None
    assert (last.token_id, last.top) == (0, ())
    assert last.logprob == pytest.approx(float(exact[0]))
    assert sample(LOGITS[None], [SampleTask(GREEDY)], [1]).logprobs == ()


def test_the_first_candidate_is_the_only_one_s() -> None:
    """Candidate 0 of a seed is what one answer to it would be; greedy candidates are all alike."""
    rows = _random_logits(20)
    for params in (SamplingParams(seed=5), GREEDY):
        alone = sample(rows, [SampleTask(params)] * 20, range(20)).token_ids
        first, second = (
            sample(rows, [SampleTask(params, candidate=c)] * 20, range(20)).token_ids for c in (0, 1)
        )
        assert first == alone
        assert (second == alone) == (params is GREEDY)


def test_candidates_are_drawn_independently() -> None:
    """Two candidates of one seed at one position hit each pair of tokens as often as chance alone would."""
    probs, params = _exact_probs(SamplingParams()), SamplingParams(seed=11)
    rows = LOGITS.expand(NUM_DRAWS, -1)
    first, second = (
        sample(rows, [SampleTask(params, candidate=c)] * NUM_DRAWS, range(NUM_DRAWS)).token_ids
        for c in (1, 2)
    )
    pairs = Counter(zip(first, second, strict=True))
    for one, its in probs.items():
        for other, others in probs.items():
            expected = NUM_DRAWS * its * others
            assert abs(pairs[one, other] - expected) < 5 * math.sqrt(expected) + 5
