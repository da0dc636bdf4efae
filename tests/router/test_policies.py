"""The four policies on plain numbers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.prefix import WorkerKey
from paceline.core.request import BootEpoch, WorkerId
from router.hash_ring import load_limit
from router.policies import POLICIES, Choice, Option, consistent_hash, least_loaded, prefix_aware, round_robin


def option(name: str, load: int = 0, cost: float = 0.0) -> Option:
    """A worker in its first life."""
    return Option(WorkerKey(WorkerId(name), BootEpoch(1)), load, cost)


def choice(*options: Option, size: int = 1, turn: int = 0, is_cold: bool = False) -> Choice:
    """Options in the order of the ring."""
    return Choice(options, size, turn, is_cold)


CHOICES = st.builds(
    Choice,
    st.lists(
        st.builds(option, st.sampled_from("abcdefgh"), st.integers(0, 50), st.integers(0, 20).map(float)),
        min_size=1,
        max_size=8,
        unique_by=lambda each: each.key,
    ).map(tuple),
    st.integers(1, 50),
    st.integers(0, 1000),
    st.booleans(),
)


def test_the_least_cost_is_chosen_and_the_ring_decides_between_equals() -> None:
    """Whatever the load is: it is part of the cost."""
    assert (
        prefix_aware(choice(option("a", cost=3), option("c", 9, cost=2), option("b", cost=2))).key[0] == "c"
    )


def test_a_cold_prompt_goes_by_the_ring() -> None:
    """The first that is within the bound, whatever it costs there."""
    options = option("b", load=9, cost=1), option("c", load=1, cost=7), option("a", load=0, cost=2)
    assert prefix_aware(choice(*options, is_cold=True)).key[0] == "c"
    assert consistent_hash(choice(*options)).key[0] == "c"


def test_equals_have_their_turns() -> None:
    """Of the least loaded each one in turn; in the round everybody."""
    options = option("c"), option("a"), option("b", load=1)
    for turn, least, robin in ((0, "a", "a"), (1, "c", "b"), (2, "a", "c"), (3, "c", "a")):
        assert least_loaded(choice(*options, turn=turn)).key[0] == least
        assert round_robin(choice(*options, turn=turn)).key[0] == robin


@pytest.mark.parametrize("policy", POLICIES)
@given(made=CHOICES)
def test_the_same_state_gives_one_of_the_options_every_time(policy: str, made: Choice) -> None:
    """A policy remembers nothing."""
    chosen = POLICIES[policy](made)  # type: ignore[index] # one of its own keys
    assert chosen in made.options
    assert POLICIES[policy](replace(made)) == chosen  # type: ignore[index] # one of its own keys


@given(made=CHOICES)
def test_each_keeps_its_promise(made: Choice) -> None:
    """Least cost, least load, the bound; and n turns in a row meet everybody once."""
    loads = [each.load for each in made.options]
    assert consistent_hash(made).load + made.size <= load_limit(loads, made.size)
    assert least_loaded(made).load == min(loads)
    warm = replace(made, is_cold=False)
    assert prefix_aware(warm).cost == min(each.cost for each in made.options)
    turns = [round_robin(replace(made, turn=made.turn + n)).key for n in range(len(loads))]
    assert sorted(turns) == sorted(each.key for each in made.options)
