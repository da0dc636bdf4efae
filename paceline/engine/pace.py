"""Measures how fast an engine is, from its own steps. It decides nothing; whoever predicts from outside reads it."""

from collections.abc import Sequence
from math import exp

from paceline.core.pace import Pace
from paceline.engine.step_report import Admission

# After so many more steps of its kind a step counts a third.
_MEMORY_STEPS = 100
# A prediction needs to have seen so many steps with a prompt; the first of a process are slow.
_LEAST_PROMPT_STEPS = 8
# The numbers are worked out again after so many steps.
_REFRESH_STEPS = 8
# So much is added to what is known of each number, so that numbers that nothing tells apart share what they cost together.
_RIDGE = 1e-6
_LEAST_S = 1e-9
# The same for admissions, and for what comes in, in seconds.
_MEMORY_TURNS = 20
_MEMORY_S = 10.0

Row = tuple[float, float, float]


class _Sums:
    """What least squares needs to know of the steps of one kind; older ones count less."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.squares = [[0.0] * 3 for _ in range(3)]
        self.sums = [0.0] * 3

    def note(self, work: Row, duration_s: float) -> None:
        """A step. Relative errors count, and so a step that something held up counts little."""
        keep, scaled = 1 - 1 / _MEMORY_STEPS, [number / duration_s for number in work]
        self.num_steps += 1
        for row, square in enumerate(self.squares):
            self.sums[row] = keep * self.sums[row] + scaled[row]
            for column in range(3):
                square[column] = keep * square[column] + scaled[row] * scaled[column]


class PaceMeter:
    """Told of every step and every admission; steps with prompts and those without are forgotten apart."""

    def __init__(self) -> None:
        self._with_prompts, self._without = _Sums(), _Sums()
        self._numbers: Row | None = None
        self._num_new = 0
        self._num_turns = self._turns_s = 0.0
        self._blocked_since_s: float | None = None
        # Of the tokens that sequences came with lately, the share that was cached.
        self._num_admitted = self._num_cached = 0.0
        # Tokens to be computed that came in, by class, and the time in which they did.
        self._came_in = [0.0, 0.0, 0.0]
        self._watched_s = 0.0
        self._looked_s: float | None = None

    def note_step(self, num_decodes: int, num_prompt_tokens: int, duration_s: float) -> None:
        """A step that computed something has taken so long."""
        sums = self._with_prompts if num_prompt_tokens else self._without
        sums.note((1.0, float(num_decodes), float(num_prompt_tokens)), max(duration_s, _LEAST_S))
        self._num_new += 1

    def note_turns(self, admissions: Sequence[Admission], *, is_blocked: bool, now_s: float) -> None:
        """After a step: who has come in, and whether somebody waits now for whom there is no seat or no room."""
        if self._blocked_since_s is not None:
            self._turns_s += now_s - self._blocked_since_s
            self._num_turns += len(admissions)
        keep = (1 - 1 / _MEMORY_TURNS) ** len(admissions)
        self._turns_s *= keep
        self._num_turns *= keep
        for admission in admissions:
            if admission.num_tokens:
                self._num_admitted += admission.num_tokens
                self._num_cached += admission.num_cached_tokens
        self._num_admitted *= keep
        self._num_cached *= keep
        self._blocked_since_s = now_s if is_blocked else None
        self._note_tokens(admissions, now_s)

    def _forget_until(self, now_s: float) -> None:
        """Time has passed, with or without steps: what came in counts less."""
        past_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        keep = exp(-past_s / _MEMORY_S)
        self._came_in = [tokens * keep for tokens in self._came_in]
        self._watched_s = self._watched_s * keep + past_s

    def _note_tokens(self, admissions: Sequence[Admission], now_s: float) -> None:
        self._forget_until(now_s)
        for admission in admissions:
            self._came_in[admission.priority] += admission.num_tokens - admission.num_cached_tokens

    @property
    def is_blocked(self) -> bool:
        """Whether somebody waits for whom there is no seat or no room."""
        return self._blocked_since_s is not None

    @property
    def cached_share(self) -> float:
        """Of the tokens that sequences came with lately."""
        return self._num_cached / self._num_admitted if self._num_admitted else 0.0

    def pace(self, now_s: float) -> Pace | None:
        """None before it has seen some steps with prompts."""
        if self._with_prompts.num_steps < _LEAST_PROMPT_STEPS:
            return None
        if self._numbers is None or self._num_new >= _REFRESH_STEPS:
            self._numbers, self._num_new = self._solve(), 0
        self._forget_until(now_s)
        # Of a moment one cannot tell how much it was a second.
        watched_s = max(self._watched_s, 1.0)
        realtime, standard, batch = (tokens / watched_s for tokens in self._came_in)
        turn_s = self._turns_s / max(1.0, self._num_turns)
        return Pace(*self._numbers, turn_s, (realtime, standard, batch))

    def _solve(self) -> Row:
        """The numbers with the least relative error, none of them negative: whatever would be has no part in it."""
        kinds = (self._with_prompts, self._without)
        squares = [
            [sum(kind.squares[row][column] for kind in kinds) for column in range(3)] for row in range(3)
        ]
        sums = [sum(kind.sums[row] for kind in kinds) for row in range(3)]
        kept = [index for index in range(3) if squares[index][index] > 0]
        while True:
            found = _solve(
                [[squares[row][column] for column in kept] for row in kept], [sums[row] for row in kept]
            )
            negative = [index for index, number in zip(kept, found, strict=True) if number < 0]
            if not negative:
                break
            kept = [index for index in kept if index not in negative]
        numbers = dict(zip(kept, found, strict=True))
        return numbers.get(0, 0.0), numbers.get(1, 0.0), numbers.get(2, 0.0)


def _solve(squares: list[list[float]], sums: list[float]) -> list[float]:
    """Gauss, in units in which every number counts alike; a little is added on the diagonal."""
    units = [squares[index][index] ** 0.5 for index in range(len(sums))]
    rows = [
        [
            square / units[row] / units[column] + (_RIDGE if row == column else 0.0)
            for column, square in enumerate(each)
        ]
        + [sums[row] / units[row]]
        for row, each in enumerate(squares)
    ]
    for pivot, row in enumerate(rows):
        for other in rows:
            if other is not row:
                factor = other[pivot] / row[pivot]
                other[pivot:] = [
                    left - factor * right for left, right in zip(other[pivot:], row[pivot:], strict=True)
                ]
    return [row[-1] / row[index] / units[index] for index, row in enumerate(rows)]
