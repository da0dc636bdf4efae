"""What this router has sent to workers and what is not done yet: load reports lag behind it."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.core.prefix import WorkerKey
from router.placement import Route


class Assignments:
    """Counted from the moment of placing, so that two requests placed together do not choose the same idle worker."""

    def __init__(self) -> None:
        self._tokens: Counter[WorkerKey] = Counter()
        self._sequences: Counter[WorkerKey] = Counter()

    def num_tokens(self, worker: WorkerKey) -> int:
        """Tokens of prompts that the worker was sent and that are not computed yet."""
        return self._tokens[worker]

    def num_sequences(self, worker: WorkerKey) -> int:
        """Sequences that the decode worker was sent and that are not at their end yet."""
        return self._sequences[worker]

    @contextmanager
    def assign(self, route: Route, num_sequences: int = 1) -> Iterator[Callable[[], None]]:
        """Counts one attempt to the workers of its route, until its end; call what it gives once the prompt is done."""
        decoding = route.decode.key
        pending = Counter({route.computing.key: route.num_tokens})

        def prompt_done() -> None:
            self._tokens -= pending
            pending.clear()

        self._tokens += pending
        self._sequences[decoding] += num_sequences
        try:
            yield prompt_done
        finally:
            prompt_done()
            # In-place subtraction drops what has come to zero, so that nothing of a worker that is gone stays.
            self._sequences -= Counter({decoding: num_sequences})
