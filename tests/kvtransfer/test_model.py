"""The protocol holds in every state that it can come to, and each of its rules is needed for that."""

from functools import cache

import pytest

from tests.kvtransfer.model.books import Rules
from tests.kvtransfer.model.explorer import Exploration, Explorer
from tests.kvtransfer.model.instances import LARGE, SMALL
from tests.kvtransfer.model.mutations import KILLS
from tests.kvtransfer.model.words import Instance, Mutation

# Everything that can happen, as spec.py names it, apart from what each block and each pair of workers does.
HAPPENS = {
    "admit",
    "borrow",
    "confirm",
    "crash",
    "damage",
    "evict at",
    "expire",
    "finish",
    "hear",
    "hear of the end",
    "hear too early",
    "hear, and again later",
    "leave",
    "lose",
    "no answer comes",
    "notice a death",
    "preempt",
    "pull fails",
    "pull stalls",
    "recall",
    "recompute",
    "renew",
    "reserve",
    "revoke",
    "settle",
    "tick",
}


@cache
def _explored(instance: Instance) -> Exploration:
    return Explorer(Rules(instance)).run()


@pytest.mark.parametrize("instance", SMALL.values(), ids=SMALL.keys())
def test_the_protocol_holds(instance: Instance) -> None:
    """Whatever happens, in whatever order: no property is broken, and everything becomes quiet in the end."""
    exploration = _explored(instance)
    assert exploration.violation is None
    assert exploration.num_quiet > 0


def test_everything_happens_somewhere() -> None:
    """No step of the specification is idle: each of them is taken in one of the small systems."""
    names = frozenset().union(*(_explored(instance).names for instance in SMALL.values()))
    indexed = {name for name in names if name.startswith(("place on", "compute block", "send block"))}
    assert names - indexed == HAPPENS
    assert len(indexed) == 4 + 2 + 2


@pytest.mark.parametrize("mutation", Mutation, ids=lambda mutation: mutation.name.lower())
def test_a_rule_left_out_is_found(mutation: Mutation) -> None:
    """By the property that it is there for, in as few steps as possible; and with the rule the same system is right."""
    kill = KILLS[mutation]
    violation = Explorer(Rules(kill.instance, mutation)).run().violation
    assert violation is not None
    assert violation.broken == kill.broken
    assert (len(violation.trace), violation.trace[-1]) == (kill.num_steps, kill.last), "\n".join(
        violation.trace
    )
    assert _explored(kill.instance).violation is None


def test_each_kind_of_fault_has_its_mutation() -> None:
    """No kind of fault is left without a rule that keeps it away."""
    assert {kill.kind for kill in KILLS.values()} == set(range(1, 11))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("instance", LARGE.values(), ids=LARGE.keys())
def test_the_protocol_holds_in_large_systems(instance: Instance) -> None:
    """The same where more goes wrong at once, and for two workers of each tier and two requests of two attempts."""
    exploration = Explorer(Rules(instance)).run()
    print(f"{exploration.num_states:,} states, {exploration.num_steps:,} steps, depth {exploration.depth}")  # noqa: T201 - a number to keep
    assert exploration.violation is None
