"""Stops asking what keeps failing, and tries again now and then."""

from paceline.core.clock import Clock, monotonic


class CircuitBreaker:
    """Closed until `max_failures` calls in a row fail; then open, with one trial call each `pause_s` seconds.

    A trial that never reports back costs nothing: the next one comes a pause later.
    """

    def __init__(self, *, max_failures: int = 3, pause_s: float = 1.0, clock: Clock = monotonic) -> None:
        self._max_failures = max_failures
        self._pause_s = pause_s
        self._clock = clock
        self._num_failures = 0
        self._next_trial_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether calls are mostly refused at the moment."""
        return self._num_failures >= self._max_failures

    def allows_call(self) -> bool:
        """Whether to make this call; when open, a yes is the trial of this pause."""
        if not self.is_open:
            return True
        if self._clock() < self._next_trial_s:
            return False
        self._next_trial_s = self._clock() + self._pause_s
        return True

    def record_success(self) -> None:
        """A call went well: closed."""
        self._num_failures = 0

    def record_failure(self) -> None:
        """A call failed."""
        self._num_failures += 1
        self._next_trial_s = self._clock() + self._pause_s
