"""Visits every state of an instance, breadth first, and says what does not hold, by a shortest way there.

Of a state that has been visited only a hash of 64 bits is kept, with the state from which it was found: among ten million
states two share one with a chance of one in 400,000. The ways between them are kept too, for what must be reachable.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.kvtransfer.model.books import Rules
from tests.kvtransfer.model.properties import NO_LEAK, NO_WAITING_FOR_A_CLOCK, SAFETY, is_quiet
from tests.kvtransfer.model.spec import next_steps
from tests.kvtransfer.model.tidy import tidy
from tests.kvtransfer.model.words import Cause, State, Step


@dataclass(frozen=True, slots=True)
class Violation:
    """What does not hold, and the steps that lead there."""

    broken: str
    trace: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Exploration:
    """How much was looked at, and the first thing that does not hold."""

    num_states: int
    num_steps: int
    depth: int
    num_quiet: int
    # What happened somewhere, by name.
    names: frozenset[str]
    violation: Violation | None


class Explorer:
    """One exploration."""

    def __init__(self, rules: Rules, max_states: int = 20_000_000) -> None:
        self._rules = rules
        self._max_states = max_states
        self._numbers: dict[int, int] = {}
        self._parents = array("i")
        # One entry a state.
        self._is_quiet = bytearray()
        self._is_calm = bytearray()
        # One entry a step that nobody has to hope for: from where, to where, and whether it takes a clock.
        self._from = array("i")
        self._to = array("i")
        self._is_clocked = bytearray()
        self._num_steps = 0
        self._depth = 0
        self._names: set[str] = set()

    def run(self) -> Exploration:
        """Everything; ends early where something does not hold."""
        return self._report(self._visit() or self._unreachable())

    def _visit(self) -> Violation | None:
        initial = self._rules.initial()
        self._note(initial, parent=-1)
        level = [(0, initial)]
        while level:
            level_after: list[tuple[int, State]] = []
            for number, state in level:
                for step in self._steps(state):
                    self._num_steps += 1
                    self._names.add(step.name)
                    after = self._numbers.get(hash(step.state))
                    if after is None:
                        after = self._note(step.state, number)
                        broken = self._broken(step.state)
                        if broken:
                            return Violation(broken, self._trace(after))
                        level_after.append((after, step.state))
                    if step.cause is not Cause.WORLD:
                        self._from.append(number)
                        self._to.append(after)
                        self._is_clocked.append(step.cause is Cause.CLOCK)
            level = level_after
            self._depth += 1
            assert len(self._numbers) < self._max_states, "this instance is too large"
        return None

    def _note(self, state: State, parent: int) -> int:
        number = len(self._parents)
        self._numbers[hash(state)] = number
        self._parents.append(parent)
        self._is_quiet.append(is_quiet(self._rules, state))
        self._is_calm.append(state.is_calm)
        return number

    def _broken(self, state: State) -> str | None:
        for holds in SAFETY:
            if not holds(self._rules, state):
                return holds.__name__
        return None

    # -- what must be reachable

    def _unreachable(self) -> Violation | None:
        """From a state that cannot become quiet any more something is leaked, or waits for ever."""
        calm = np.frombuffer(self._is_calm, bool)
        clocked = np.frombuffer(self._is_clocked, bool)
        for name, concerned, ways in (
            (NO_LEAK, np.ones(len(calm), bool), np.ones(len(clocked), bool)),
            (NO_WAITING_FOR_A_CLOCK, calm, ~clocked),
        ):
            stuck = np.flatnonzero(concerned & ~self._can_become_quiet(ways))
            if len(stuck):
                return Violation(name, self._trace(int(stuck[0])))
        return None

    def _can_become_quiet(self, ways: NDArray[np.bool_]) -> NDArray[np.bool_]:
        begins = np.frombuffer(self._from, np.int32)[ways]
        ends = np.frombuffer(self._to, np.int32)[ways]
        can = np.frombuffer(self._is_quiet, bool).copy()
        num_before = -1
        while (num_now := int(can.sum())) != num_before:
            num_before = num_now
            can[begins[can[ends]]] = True
        return can

    # -- telling

    def _trace(self, number: int) -> tuple[str, ...]:
        """The steps to a state, done again."""
        path = [number]
        while self._parents[path[-1]] >= 0:
            path.append(self._parents[path[-1]])
        state, steps = self._rules.initial(), []
        for after in path[-2::-1]:
            step = next(each for each in self._steps(state) if self._numbers.get(hash(each.state)) == after)
            steps.append(str(step))
            state = step.state
        return tuple(steps)

    def _steps(self, state: State) -> Iterator[Step]:
        for step in next_steps(self._rules, state):
            yield step._replace(state=tidy(self._rules, step.state))

    def _report(self, violation: Violation | None) -> Exploration:
        return Exploration(
            num_states=len(self._parents),
            num_steps=self._num_steps,
            depth=self._depth,
            num_quiet=sum(self._is_quiet),
            names=frozenset(self._names),
            violation=violation,
        )
