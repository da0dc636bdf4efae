"""Whose turn it is, who loses its blocks, and what that costs: functions on plain values."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.request import Priority
from paceline.engine.costs import CostEstimate, Loss, PreemptionKind
from paceline.engine.policies import TURN_BOUND_S, TURN_POLICIES, VICTIM_POLICIES, Victim, choose_victims
from tests.factories import make_spec


def _sequence(
    arrival_s: float = 0.0,
    *,
    priority: Priority = Priority.STANDARD,
    num_tokens: int = 10,
    deadline_s: float = float("inf"),
) -> Any:
    spec = make_spec(priority=priority)
    return SimpleNamespace(arrival_s=arrival_s, max_num_tokens=num_tokens, deadline_s=deadline_s, spec=spec)


def _victim(
    num_freed: int, cost_s: float = 1.0, *, num_wanted: int = 0, was_last: bool = False, **options: Any
) -> Victim:
    sequence = _sequence(**options)
    return Victim(sequence, int(sequence.spec.priority), cost_s, num_freed, num_wanted, was_last)


def _gain(victims: Sequence[Victim]) -> int:
    """Of victims that share nothing."""
    return sum(victim.num_gained for victim in victims)


def test_the_turn_is_arrival_length_or_deadline() -> None:
    """Of two that come together the shorter one is first under sjf, and the one with the earlier deadline under edf."""
    long, short = _sequence(num_tokens=500), _sequence(num_tokens=100)
    assert TURN_POLICIES["fcfs"](long) == TURN_POLICIES["fcfs"](short)
    assert TURN_POLICIES["sjf"](short) < TURN_POLICIES["sjf"](long)
    late, soon = _sequence(deadline_s=20.0), _sequence(deadline_s=10.0)
    assert TURN_POLICIES["edf"](soon) < TURN_POLICIES["edf"](late)


@pytest.mark.parametrize("policy", TURN_POLICIES)
def test_no_policy_lets_anybody_pass_who_comes_much_later(policy: str) -> None:
    """However short it is, and however close its deadline."""
    turn = TURN_POLICIES[policy]
    first = _sequence(0.0, num_tokens=10**6)
    later = _sequence(TURN_BOUND_S + 0.001, num_tokens=0, deadline_s=TURN_BOUND_S + 0.002)
    assert turn(first) < turn(later)


def test_each_victim_policy_has_its_own_victim() -> None:
    """The least cost a block, also where another one costs less in all; the youngest; and the one with most blocks."""
    cheap = _victim(4, 0.4, arrival_s=1.0)
    young = _victim(2, 1.0, arrival_s=9.0)
    large = _victim(9, 9.0, arrival_s=2.0)
    small = _victim(1, 0.3, arrival_s=3.0)
    victims = (cheap, young, large, small)
    chosen = {name: min(victims, key=policy) for name, policy in VICTIM_POLICIES.items()}
    assert chosen == {"cost": cheap, "lifo": young, "most-blocks": large}


def test_the_least_urgent_class_pays_first() -> None:
    """A batch request loses its blocks before a cheaper realtime one."""
    realtime = _victim(4, 0.1, priority=Priority.REALTIME)
    batch = _victim(4, 5.0, priority=Priority.BATCH)
    assert choose_victims([realtime, batch], 1, VICTIM_POLICIES["cost"], _gain) == [batch]


def test_nobody_is_the_victim_twice_running_while_there_is_another() -> None:
    """The one of the last time comes only after everybody else."""
    again, other = _victim(4, 0.1, was_last=True), _victim(4, 5.0)
    assert choose_victims([again, other], 1, VICTIM_POLICIES["cost"], _gain) == [other]
    assert choose_victims([again], 1, VICTIM_POLICIES["cost"], _gain) == [again]


VICTIMS = st.lists(
    st.builds(
        _victim,
        st.integers(0, 9),
        st.floats(0, 9),
        num_wanted=st.integers(0, 1),
        was_last=st.booleans(),
        arrival_s=st.floats(0, 9),
        priority=st.sampled_from(Priority),
    ),
    max_size=8,
)


@given(VICTIMS, st.integers(0, 30), st.sampled_from(sorted(VICTIM_POLICIES)), st.integers(0, 9))
def test_enough_victims_and_none_too_many(
    victims: list[Victim], num_lacking: int, policy: str, num_shared: int
) -> None:
    """What they give is enough, if all have so much; without any one of them it would not be, though some share blocks."""

    def gain(gone: Sequence[Victim]) -> int:
        """Two of them hold some blocks together."""
        is_shared_free = len(victims) > 1 and all(any(one is each for each in gone) for one in victims[:2])
        return _gain(gone) + num_shared * is_shared_free

    chosen = choose_victims(victims, num_lacking, VICTIM_POLICIES[policy], gain)
    assert gain(chosen) >= min(num_lacking, _gain(victims))
    for victim in chosen:
        assert gain([other for other in chosen if other is not victim]) < num_lacking


def test_the_cheapest_kind_depends_on_what_was_measured() -> None:
    """Computing again, copying out and back, or pulling again: whatever costs least of what is possible."""
    loss = Loss(num_tokens=160, num_blocks=10, num_remote_tokens=128, num_remote_blocks=8)
    costs = CostEstimate()
    costs.token_s, costs.swap_block_s, costs.remote_hit_share = 1e-3, 1e-2, 1.0
    costs.remote_pull_s, costs.remote_block_s = 0.0, 1e-4
    cost_s, kind = costs.cheapest(loss, may_swap=True, may_recall=True)
    assert cost_s == pytest.approx(0.0328)
    assert kind is PreemptionKind.REMOTE
    costs.remote_hit_share = 0.0
    assert costs.cheapest(loss, may_swap=True, may_recall=True)[1] is PreemptionKind.SWAP
    costs.swap_block_s = 1.0
    assert costs.cheapest(loss, may_swap=True, may_recall=True)[1] is PreemptionKind.RECOMPUTE
    assert costs.recompute_s(loss) == pytest.approx(0.16)
    costs.swap_block_s = 0.0
    assert costs.cheapest(loss, may_swap=False, may_recall=False)[1] is PreemptionKind.RECOMPUTE


def test_misses_are_forgotten_while_nobody_asks() -> None:
    """After enough misses nothing is pulled; after enough that was computed instead it is tried again."""
    costs = CostEstimate()
    loss = Loss(num_tokens=160, num_blocks=10, num_remote_tokens=160, num_remote_blocks=10)
    while costs.cheapest(loss, may_swap=False, may_recall=True)[1] is PreemptionKind.REMOTE:
        costs.note_remote(10, 0, 0.1)
    for _ in range(20):
        costs.note_unasked()
    assert costs.cheapest(loss, may_swap=False, may_recall=True)[1] is PreemptionKind.REMOTE
    assert costs.remote_hit_share < 0.5


def test_measurements_move_the_estimate() -> None:
    """Each one a part of the way, so that one odd step changes little and a hundred of them change it for good."""
    costs = CostEstimate()
    for _ in range(100):
        costs.note_chunk(100, 0.5)
        costs.note_swap(10, 0.1)
        costs.note_remote(10, 10, 0.2)
        costs.note_remote(40, 40, 0.5)
    assert costs.token_s == pytest.approx(5e-3, rel=0.01)
    assert costs.swap_block_s == pytest.approx(0.02, rel=0.01)
    assert costs.remote_block_s == pytest.approx(0.01, rel=0.05)
    assert costs.remote_pull_s == pytest.approx(0.1, rel=0.05)
    assert costs.remote_hit_share == pytest.approx(1, rel=0.01)


def test_pulls_of_one_size_tell_what_another_pull_of_that_size_takes() -> None:
    """From them alone nobody can tell the part for each pull from that for each block; their sum comes out right."""
    costs = CostEstimate()
    for _ in range(100):
        costs.note_remote(10, 10, 0.2)
    assert costs.pull_s(10) == pytest.approx(0.2, rel=0.02)
    assert min(costs.remote_pull_s, costs.remote_block_s) >= 0


def test_a_pull_pays_from_some_length_on() -> None:
    """A few blocks are computed sooner than anybody has been asked; of many that are likely there all are pulled."""
    costs = CostEstimate()
    costs.token_s, costs.remote_pull_s, costs.remote_block_s, costs.remote_hit_share = 1e-3, 0.1, 1e-3, 0.8
    assert [costs.is_pull_cheaper(n, 16 * n) for n in (1, 8, 9, 100)] == [False, False, True, True]
    costs.remote_hit_share = 0.05
    assert not costs.is_pull_cheaper(100, 1600)


def test_pulls_that_fail_slowly_are_not_made_again_and_again() -> None:
    """An owner that is frozen lets a pull time out: what that took counts as well, not only that nothing came."""
    costs = CostEstimate()
    for _ in range(3):
        costs.note_remote(62, 0, 5.0)
    # A second to compute, and five to find out that nothing comes.
    assert not costs.is_pull_cheaper(62, 1000)
