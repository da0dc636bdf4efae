"""What this router has sent to workers and what is not done yet: load reports lag behind it."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.core.pace import ByClass, PendingTokens
from paceline.core.prefix import WorkerKey
from paceline.core.request import Priority
from router.placement import Route
from router.views import Ask, WorkerView

# Where tokens of a prompt wait: the worker, whether in its fast lane, and the class.
_Place = tuple[WorkerKey, bool, Priority]


class Assigned:
    """One attempt that a worker was sent, as far as its prompt is not computed."""

    def __init__(
        self, tokens: Counter[_Place], place: _Place, num_tokens: int, num_prompt_tokens: int
    ) -> None:
        self._tokens = tokens
        self._place = place
        self._num_left = 0
        self._num_prompt_tokens = num_prompt_tokens
        self._set_left(num_tokens)

    def note_progress(self, num_computed_tokens: int) -> None:
        """So many tokens of the prompt are there, cached ones among them."""
        self._set_left(min(self._num_left, max(0, self._num_prompt_tokens - num_computed_tokens)))

    def prompt_done(self) -> None:
        """The prompt is computed, or nobody computes it any more."""
        self._set_left(0)

    def _set_left(self, num_left: int) -> None:
        self._tokens[self._place] += num_left - self._num_left
        self._num_left = num_left
        # So that nothing of a worker that is gone stays.
        if not self._tokens[self._place]:
            del self._tokens[self._place]


class Assignments:
    """Counted from the moment of placing, so that two requests placed together do not choose the same idle worker."""

    def __init__(self) -> None:
        self._tokens: Counter[_Place] = Counter()
        self._sequences: Counter[WorkerKey] = Counter()

    def num_tokens(self, worker: WorkerKey) -> int:
        """Tokens of prompts that the worker was sent and that are not computed yet."""
        pending = self.pending(worker)
        return sum(pending.fast) + sum(pending.normal)

    def pending(self, worker: WorkerKey) -> PendingTokens:
        """The same by lane and class."""
        return PendingTokens(self._by_class(worker, is_fast=True), self._by_class(worker, is_fast=False))

    def num_sequences(self, worker: WorkerKey) -> int:
        """Sequences that the decode worker was sent and that are not at their end yet."""
        return self._sequences[worker]

    @contextmanager
    def assign(self, route: Route, ask: Ask | None = None) -> Iterator[Assigned]:
        """Counts one attempt to the workers of its route, until its end; tell what it gives how the prompt gets on."""
        ask, decoding = ask or Ask(), route.decode.key
        assigned = self._assigned(route.computing, ask, route.num_tokens)
        self._sequences[decoding] += ask.num_candidates
        try:
            yield assigned
        finally:
            assigned.prompt_done()
            # In-place subtraction drops what has come to zero.
            self._sequences -= Counter({decoding: ask.num_candidates})

    @contextmanager
    def expect(self, worker: WorkerView, ask: Ask, num_tokens: int) -> Iterator[None]:
        """Counts a prompt that is taken, and not placed yet, to where it would go as things are now."""
        expected = self._assigned(worker, ask, num_tokens)
        try:
            yield
        finally:
            expected.prompt_done()

    def _assigned(self, worker: WorkerView, ask: Ask, num_tokens: int) -> Assigned:
        is_fast = worker.queue is not None and ask.is_fast_in(worker.queue.fast_lane)
        return Assigned(self._tokens, (worker.key, is_fast, ask.priority), num_tokens, ask.num_prompt_tokens)

    def _by_class(self, worker: WorkerKey, *, is_fast: bool) -> ByClass:
        tokens = self._tokens
        return (
            tokens[worker, is_fast, Priority.REALTIME],
            tokens[worker, is_fast, Priority.STANDARD],
            tokens[worker, is_fast, Priority.BATCH],
        )
