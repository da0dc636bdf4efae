"""An engine's events about one sequence, as an async iterator."""

import asyncio
from collections import deque
from collections.abc import Sequence

from paceline.engine.events import Event


class EventQueue:
    """A sink to submit with; iterate over it to get the events in order. Bounded by what a sequence can say."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()

    def put(self, events: Sequence[Event]) -> None:
        """Takes the events of one step."""
        self._events.extend(events)
        self._arrived.set()

    def __aiter__(self) -> "EventQueue":
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()
