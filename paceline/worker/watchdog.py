"""Finds out when an engine makes no progress although it has work: a worker like that is alive in name only."""

import asyncio

from paceline.core.clock import Clock, monotonic
from paceline.engine.async_engine import AsyncEngine
from paceline.runtime.log import get_logger

log = get_logger()


class Watchdog:
    """Looks now and then. An engine is stalled when it does not come to the end of a step, or takes steps that compute nothing.

    The second is so only while every block is free: whoever waits for blocks that others hold, waits for them to let go.
    """

    def __init__(self, engine: AsyncEngine, stall_s: float, *, clock: Clock = monotonic) -> None:
        self._engine = engine
        self._stall_s = stall_s
        self._clock = clock
        self._asked_s: float | None = None
        self._stuck_since_s: float | None = None

    def look(self) -> str | None:
        """Why the engine is stalled; None if it is not."""
        now_s = self._clock()
        if self._asked_s is None:
            self._asked_s = now_s
            self._engine.ping(self._note_answer)
        elif now_s - self._asked_s >= self._stall_s:
            return f"a step has not ended for {self._stall_s:g} s"
        if not self._engine.stats.is_stuck:
            self._stuck_since_s = None
        elif self._stuck_since_s is None:
            self._stuck_since_s = now_s
        elif now_s - self._stuck_since_s >= self._stall_s:
            return f"sequences wait, every block is free, and nothing was computed for {self._stall_s:g} s"
        return None

    async def watch(self, failed: asyncio.Event) -> None:
        """Looks until the engine is stalled, and then says that the worker has failed."""
        while (why := self.look()) is None:  # noqa: ASYNC110 - nothing tells of what does not happen
            await asyncio.sleep(self._stall_s / 8)
        log.error("engine_stalled", why=why)
        failed.set()

    def _note_answer(self) -> None:
        self._asked_s = None
