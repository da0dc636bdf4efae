"""The scheduler's choices as small functions on plain values: whose turn it is, and who loses its blocks."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as AbstractSequence
from typing import NamedTuple

from paceline.engine.sequence import Sequence

# However the turn is chosen, nobody is overtaken by one who comes so many seconds later.
TURN_BOUND_S = 30.0
# What a token of prompt and output counts under shortest job first: from 1,500 tokens on a job is as long as any.
_TOKEN_S = 0.02

# Within a class and a tenant the smallest number comes first. It never changes, so that a queue stays sorted.
TurnPolicy = Callable[[Sequence], float]


def first_come_first_served(sequence: Sequence) -> float:
    """By arrival."""
    return sequence.arrival_s


def shortest_job_first(sequence: Sequence) -> float:
    """By prompt and max_tokens, which bound the work; a long job waits TURN_BOUND_S longer at most."""
    return sequence.arrival_s + min(sequence.max_num_tokens * _TOKEN_S, TURN_BOUND_S)


def earliest_deadline_first(sequence: Sequence) -> float:
    """By deadline; one that is far away, or missing, counts as TURN_BOUND_S after the arrival."""
    return min(sequence.deadline_s, sequence.arrival_s + TURN_BOUND_S)


TURN_POLICIES: dict[str, TurnPolicy] = {
    "fcfs": first_come_first_served,
    "sjf": shortest_job_first,
    "edf": earliest_deadline_first,
}


class Victim(NamedTuple):
    """A running sequence that may lose its blocks, and what that would cost and give."""

    sequence: Sequence
    urgency: int  # its class; 0 also for one that came long ago
    cost_s: float  # to bring it back to where it is
    num_freed: int  # blocks that nobody else holds
    num_wanted: int  # blocks that it needs for this step itself, and would no longer
    was_last: bool  # the preemption before this one took it too

    @property
    def num_gained(self) -> int:
        """By how much the lack of blocks shrinks at least: what several victims share comes free with the last of them."""
        return self.num_freed + self.num_wanted


# The smallest number is the victim.
VictimPolicy = Callable[[Victim], float]


def least_cost_per_block(victim: Victim) -> float:
    """The least work lost for each block."""
    return victim.cost_s / max(1, victim.num_freed)


def last_in_first_out(victim: Victim) -> float:
    """The youngest."""
    return -victim.sequence.arrival_s


def most_blocks(victim: Victim) -> float:
    """The fewest victims."""
    return -victim.num_freed


VICTIM_POLICIES: dict[str, VictimPolicy] = {
    "cost": least_cost_per_block,
    "lifo": last_in_first_out,
    "most-blocks": most_blocks,
}


# By how much the lack of blocks shrinks without all of these.
Gain = Callable[[AbstractSequence[Victim]], int]


def choose_victims(
    victims: Iterable[Victim], num_lacking: int, policy: VictimPolicy, gain: Gain
) -> list[Victim]:
    """Whoever must go so that `num_lacking` blocks come free: no one twice running, the least urgent first.

    Of those chosen nobody is superfluous: without any one of them there would be too little.
    """

    def order(victim: Victim) -> tuple[bool, int, float, float]:
        return victim.was_last, -victim.urgency, policy(victim), -victim.sequence.arrival_s

    chosen: list[Victim] = []
    num_gained = 0
    for victim in sorted(victims, key=order):
        if num_gained >= num_lacking:
            break
        if victim.num_gained:
            chosen.append(victim)
            num_gained += victim.num_gained
    # One may have made an earlier one needless, and all of them together give more than each by itself.
    for victim in chosen[::-1]:
        others = [other for other in chosen if other is not victim]
        if gain(others) >= num_lacking:
            chosen = others
    return chosen
