"""Calls of Redis that never make their caller wait for long: each has a budget, and a breaker stops asking what keeps failing."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from paceline.core.clock import Clock, monotonic
from paceline.prefix_index.breaker import CircuitBreaker
from paceline.prefix_index.redis_client import RedisClient, connect
from paceline.prefix_index.redis_url import parse_redis_url, redacted
from paceline.runtime.log import get_logger

_MAX_CALLS = 16
# Turns of the event loop that a call may still take after its budget: next to nothing where the loop has nothing else to do,
# and where it has, what a call needs to get through the client and back.
_TURNS = 64
_LATE = "no answer in time"

log = get_logger()


class NoAnswer:
    """Stands for the answer of a call that has none: None is one."""


@dataclass(frozen=True, slots=True)
class CallStats:
    """Counts since the start: calls that failed or missed their budget, those that missed it, and calls not made at all."""

    num_failures: int
    num_late: int
    num_skipped: int


class RedisCalls:
    """Calls of the Redis at a URL of one of the forms of `paceline/prefix_index/redis_url.py`. Raises ConfigError for a bad URL.

    No call lasts longer than `limit_s`, whether or not somebody still waits for it, and none waits longer than that for a connection.
    """

    def __init__(
        self, url: str, *, limit_s: float = 1.0, pause_s: float = 1.0, clock: Clock = monotonic
    ) -> None:
        self.limit_s = limit_s
        self.client: RedisClient = connect(
            parse_redis_url(url), timeout_s=limit_s, max_connections=_MAX_CALLS
        )
        self._breaker = CircuitBreaker(pause_s=pause_s, clock=clock)
        self._slots = asyncio.Semaphore(_MAX_CALLS)
        self._num_answers = 0
        # Some have been given up. They end within the limit, and so their places can be used again.
        self.under_way: set[asyncio.Future[object]] = set()
        # Those among them that have missed their budget.
        self._overdue: set[asyncio.Future[object]] = set()
        self._is_closed = False
        self._url = redacted(url)
        self._is_lost = False
        self._num_failures = self._num_late = self._num_skipped = 0

    @property
    def is_away(self) -> bool:
        """What the last calls say: whether the breaker holds further ones back."""
        return self._breaker.is_open

    async def answer(
        self,
        call: Callable[[], Awaitable[object]],
        budget_s: float,
        on_abandoned: Callable[[object], None] | None = None,
    ) -> object | NoAnswer:
        """What Redis answers in time; a failure, counted, when it is not asked, fails, or takes too long.

        The budget is the server's: in a burst of calls it begins when one of the places is free. Of a caller that is cancelled
        after Redis was asked, `on_abandoned` hears the answer.
        """
        if self._is_closed or not self._breaker.allows_call():
            return self._note_skipped()
        is_trial = self._breaker.is_open
        if not await self._take_slot(budget_s):
            return self._note_failure(_LATE)
        if self._is_called_off(is_trial=is_trial):
            self._slots.release()
            return self._note_skipped()
        under_way = self._begin(call)
        try:
            return await self._reply(under_way, budget_s)
        except asyncio.CancelledError:
            if on_abandoned is not None:
                under_way.add_done_callback(partial(_tell, on_abandoned))
            raise

    def _begin(self, call: Callable[[], Awaitable[object]]) -> "asyncio.Future[object]":
        """The call goes on to its end, also when nobody waits for it any more: a connection that is cut off has to be made anew."""
        try:
            under_way = asyncio.ensure_future(call())
        except BaseException:
            self._slots.release()
            raise
        limit = asyncio.get_running_loop().call_later(self.limit_s, under_way.cancel)
        self.under_way.add(under_way)
        under_way.add_done_callback(partial(self._end, limit))
        return under_way

    async def _reply(self, under_way: "asyncio.Future[object]", budget_s: float) -> object | NoAnswer:
        """What it brings within the budget."""
        await _wait(under_way, budget_s, under_way.done)
        if not under_way.done():
            self._overdue.add(under_way)
            return self._note_failure(_LATE)
        reply = _result(under_way)
        if isinstance(reply, NoAnswer):
            return self._note_failure(_reason(under_way))
        self._note_success()
        return reply

    def run_script(
        self, script: str, keys: Sequence[str | bytes], arguments: Sequence[str | int | bytes]
    ) -> Awaitable[object]:
        """One atomic step; for `answer`."""
        return self.client.run_script(script, keys, arguments)

    async def aclose(self) -> None:
        """Gives up what is under way, and closes the connections; later calls, and those that wait, are not made."""
        self._is_closed = True
        for call in self.under_way:
            call.cancel()
        if self.under_way:
            await asyncio.wait(self.under_way)
        with suppress(Exception):
            async with asyncio.timeout(self.limit_s):
                await self.client.aclose()

    def stats(self) -> CallStats:
        """What happened so far."""
        return CallStats(self._num_failures, self._num_late, self._num_skipped)

    async def _take_slot(self, budget_s: float) -> bool:
        """Waits for its turn for as long as others are answered meanwhile and most of these are, and at most `limit_s`."""
        if not self._slots.locked():
            await self._slots.acquire()
            return True
        taking = asyncio.create_task(self._slots.acquire())
        try:
            await self._wait_for_turn(taking, budget_s)
        except asyncio.CancelledError:
            self._give_up(taking)
            raise
        if not taking.done():
            self._give_up(taking)
            return False
        return True

    async def _wait_for_turn(self, taking: "asyncio.Task[Literal[True]]", budget_s: float) -> None:
        clock = asyncio.get_running_loop().time
        end_s = clock() + self.limit_s
        while await self._sees_answers(taking, min(budget_s, end_s - clock())):
            if taking.done() or self._is_stuck or clock() >= end_s:
                return

    async def _sees_answers(self, taking: "asyncio.Task[Literal[True]]", budget_s: float) -> bool:
        num_before = self._num_answers
        await _wait(taking, budget_s, lambda: self._num_answers != num_before)
        return self._num_answers != num_before

    def _is_called_off(self, *, is_trial: bool) -> bool:
        """What may have happened to a call that waited for its turn."""
        return self._is_closed or (self._breaker.is_open and not is_trial)

    @property
    def _is_stuck(self) -> bool:
        """Whether half of the places or more are held by calls that the server does not answer in time."""
        return 2 * len(self._overdue) >= _MAX_CALLS

    def _give_up(self, taking: "asyncio.Task[Literal[True]]") -> None:
        """Nobody takes the slot, also if it has just become free."""
        if not taking.cancel():
            self._slots.release()

    def _note_skipped(self) -> NoAnswer:
        self._num_skipped += 1
        return NoAnswer()

    def _note_failure(self, reason: str) -> NoAnswer:
        self._num_late += reason == _LATE
        self._num_failures += 1
        # Not for a hiccup: a pause after the breaker opened it still does not answer.
        if self._breaker.is_open and not self._is_lost:
            self._is_lost = True
            log.warning("redis_lost", redis=self._url, reason=reason)
        self._breaker.record_failure()
        return NoAnswer()

    def _note_success(self) -> None:
        self._breaker.record_success()
        if self._is_lost:
            self._is_lost = False
            log.info("redis_found", redis=self._url)

    def _end(self, limit: asyncio.TimerHandle, call: "asyncio.Future[object]") -> None:
        limit.cancel()
        # Also where nobody waits for the answer any more: those who wait for a place see that Redis answers.
        self._num_answers += not isinstance(_result(call), NoAnswer)
        self.under_way.discard(call)
        self._overdue.discard(call)
        self._slots.release()


def _reason(call: "asyncio.Future[object]") -> str:
    """Why a call that has ended has no answer."""
    error = None if call.cancelled() else call.exception()
    return _LATE if error is None else f"{type(error).__name__}: {error}"


def _result(call: "asyncio.Future[object]") -> object | NoAnswer:
    """Whatever a broken server makes the client raise: it is only a hint."""
    has_failed = call.cancelled() or call.exception() is not None
    return NoAnswer() if has_failed else call.result()


async def _wait(task: "asyncio.Future[Any]", budget_s: float, is_enough: Callable[[], bool]) -> None:
    """Returns when the task is done, or its budget is over; a little later unless it is enough that something else holds by then.

    Our own standstill is not the server's delay: what has arrived by now is read.
    """
    await asyncio.wait({task}, timeout=budget_s)
    for _ in range(_TURNS):
        if task.done() or is_enough():
            return
        await asyncio.sleep(0)


def _tell(hears: Callable[[object], None], call: "asyncio.Future[object]") -> None:
    hears(_result(call))
