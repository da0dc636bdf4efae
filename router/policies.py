"""The placement policies: each chooses one worker of a tier out of plain numbers, and knows neither tiers nor modes.

Whoever must not be chosen, or only if there is nobody else, has been left out before (`router/placement.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.core.prefix import WorkerKey
from router.hash_ring import within_bound

PlacementPolicy = Literal["prefix-aware", "consistent-hash", "least-loaded", "round-robin"]


@dataclass(frozen=True, slots=True)
class Option:
    """One worker that could be chosen. `load` counts what its tier is bounded by; `cost` is what the request costs there."""

    key: WorkerKey
    load: int
    # Prompt tokens that could be computed in the time that it takes.
    cost: float


@dataclass(frozen=True, slots=True)
class Choice:
    """What a policy knows: the options in the order in which the request's key meets them on the ring, never none."""

    options: tuple[Option, ...]
    # What the request adds to the load of whoever gets it.
    size: int
    # How many requests were placed before this one.
    turn: int
    # Whether nobody holds anything of a prompt that is to be computed here.
    is_cold: bool


def prefix_aware(choice: Choice) -> Option:
    """Where the request costs least; a cold prompt goes where the ring says, so that those that follow find it there."""
    if choice.is_cold:
        return consistent_hash(choice)
    return min(choice.options, key=lambda option: option.cost)


def consistent_hash(choice: Choice) -> Option:
    """The first on the ring that would not have more than 1.25 times the mean."""
    return choice.options[within_bound([option.load for option in choice.options], choice.size)]


def least_loaded(choice: Choice) -> Option:
    """Who has least; equals have their turns."""
    least = min(option.load for option in choice.options)
    return _in_turn([option for option in choice.options if option.load == least], choice.turn)


def round_robin(choice: Choice) -> Option:
    """One after the other, whatever they have and hold."""
    return _in_turn(list(choice.options), choice.turn)


def _in_turn(options: list[Option], turn: int) -> Option:
    return sorted(options, key=lambda option: option.key)[turn % len(options)]


POLICIES: Mapping[PlacementPolicy, Callable[[Choice], Option]] = {
    "prefix-aware": prefix_aware,
    "consistent-hash": consistent_hash,
    "least-loaded": least_loaded,
    "round-robin": round_robin,
}
