"""What placement remembers from request to request: whose turn it is, and the rings of the two tiers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.hash_ring import HashRing
from router.placement import Route, Rules, Turn, place
from router.views import PromptFacts, WorkerView


@dataclass(frozen=True, slots=True)
class PlacerStats:
    """A picture of now. Points do not grow with the number of requests, only with that of workers."""

    num_placed: int
    num_ring_members: int


class Placer:
    """Owned by the router's event loop. The choice itself is `place`; nothing is kept of a request."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._num_placed = 0
        self._prefill_ring = self._decode_ring = HashRing.of(())

    def place(
        self, prompt: PromptFacts, prefill: Sequence[WorkerView], decode: Sequence[WorkerView]
    ) -> Route:
        """The route of one request; raises NoEndpointError."""
        self._prefill_ring = _ring_of(prefill, self._prefill_ring)
        self._decode_ring = _ring_of(decode, self._decode_ring)
        turn = Turn(
            self._num_placed,
            tuple(self._prefill_ring.walk(prompt.ring_key)),
            tuple(self._decode_ring.walk(prompt.ring_key)),
        )
        route = place(prompt, prefill, decode, self._rules, turn)
        self._num_placed += 1
        return route

    def stats(self) -> PlacerStats:
        """A picture of now."""
        members = len(self._prefill_ring.members) + len(self._decode_ring.members)
        return PlacerStats(self._num_placed, members)


def _ring_of(workers: Iterable[WorkerView], ring: HashRing) -> HashRing:
    """A ring is made anew only when somebody has come or gone. One that starts again is where it was."""
    names = frozenset(worker.key.worker_id for worker in workers)
    return ring if names == ring.members else HashRing.of(names)
