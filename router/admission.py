"""Decides at the door whether a request is taken at all. Today: a bound on how many are under way."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.core.errors import DrainingError, QueueFullError

# Nothing measures yet how soon a place becomes free; a second is long against a step and short for a person.
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class AdmissionStats:
    """A picture of the door."""

    num_active: int
    num_admitted: int
    num_refused: int


class AdmissionController:
    """Owned by the router's event loop."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._closed = False
        self._num_active = self._num_admitted = self._num_refused = 0

    @contextmanager
    def admit(self) -> Iterator[int]:
        """Holds a place for the request; gives how many were there before it.

        Raises QueueFullError, or DrainingError once closed.
        """
        if self._closed:
            raise DrainingError("the server is shutting down; send the request to another one")
        if self._num_active >= self._max_requests:
            self._num_refused += 1
            raise QueueFullError(
                f"{self._num_active} requests are under way, and no more are taken",
                retry_after_s=_RETRY_AFTER_S,
            )
        position = self._num_active
        self._num_active += 1
        self._num_admitted += 1
        try:
            yield position
        finally:
            self._num_active -= 1

    def close(self) -> None:
        """Takes nobody any more."""
        self._closed = True

    def stats(self) -> AdmissionStats:
        """A picture of now."""
        return AdmissionStats(self._num_active, self._num_admitted, self._num_refused)
