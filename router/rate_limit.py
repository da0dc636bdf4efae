"""How fast a tenant may go: a bucket that each unit fills and that time empties, in Redis for all routers or here for one.

This is the generic cell rate algorithm in its form of a leaky bucket. Everything is whole numbers: times are microseconds, and
what is in a bucket counts a unit as 60,000,000, so that a rate of `per_minute` units drains `per_minute` each microsecond.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, TypeGuard

from paceline.core.clock import Clock, monotonic
from paceline.prefix_index.redis_calls import RedisCalls

MINUTE_US = 60_000_000
# A full bucket and as much again stay whole numbers in Lua, whose numbers are doubles.
MAX_UNITS = 50_000_000

_KEY = "paceline:rate:"

# "redis": all routers count together. "local": this router counts, and there is no other. "strict": Redis is away, and each router
# gives a tenant its share. "none": nobody is counted.
LimiterMode = Literal["redis", "local", "strict", "none"]


@dataclass(frozen=True, slots=True)
class Rate:
    """So many units a minute, and so many at once."""

    per_minute: int
    burst: int


@dataclass(frozen=True, slots=True)
class Level:
    """What was in a bucket at a time; an empty one may be forgotten."""

    filled: int = 0
    at_us: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """What the limiter says: taken when `wait_us` is 0, else nothing was, and it will be there then. `is_shared`: Redis said so."""

    wait_us: int
    is_shared: bool


def pour(level: Level, rate: Rate, cost: int, now_us: int) -> tuple[Level, int]:
    """The bucket after `cost` units more, fewer when negative, and 0; or as it is, and the microseconds after which they fit.

    A clock that goes back stands still instead.
    """
    left = max(0, level.filled - max(0, now_us - level.at_us) * rate.per_minute)
    wanted = max(0, left + cost * MINUTE_US)
    over = wanted - rate.burst * MINUTE_US
    if cost > 0 and over > 0:
        return Level(left, now_us), -(-over // rate.per_minute)
    return Level(wanted, now_us), 0


# `pour` on the server's own clock. The key is a bucket, "<filled>:<at>". The first of ARGV: units a minute, burst, cost. Gives the wait.
# A key ends when its bucket is empty, whatever is asked of it in between; garbage counts as an empty bucket.
POUR_INTO = """
local function pour_into(key)
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
  local rate, burst, cost, minute = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), 60000000
  local value = redis.pcall('GET', key)
  local filled, at = string.match(type(value) == 'string' and value or '', '^(%d+):(%d+)$')
  local left = math.max(0, tonumber(filled or 0) - math.max(0, now - tonumber(at or now)) * rate)
  local wanted = math.max(0, left + cost * minute)
  local over, wait = wanted - burst * minute, 0
  if cost > 0 and over > 0 then wanted, wait = left, math.ceil(over / rate) end
  if wanted > 0 then
    redis.call('SET', key, string.format('%.0f:%.0f', wanted, now), 'PX', math.ceil(wanted / rate / 1000))
  else
    redis.call('DEL', key)
  end
  return wait
end
"""
POUR = POUR_INTO + "return pour_into(KEYS[1])"


@dataclass(frozen=True, slots=True)
class LimiterStats:
    """Counts since the start: calls of Redis that failed or were late, calls not made, and answers given here instead."""

    num_failures: int = 0
    num_skipped: int = 0
    num_strict: int = 0


class RateLimiter(Protocol):
    """Counts units against rates, by the name of a bucket. Nobody asks for more than the rate's burst at once."""

    @property
    def mode(self) -> LimiterMode:
        """Who counts at this moment."""

    async def take(self, name: str, rate: Rate, cost: int) -> Grant:
        """Takes `cost` units, or nothing; never raises."""

    def give_back(self, name: str, rate: Rate, num_units: int, grant: Grant) -> None:
        """Units that were taken with a grant and not used. It does not wait for anybody."""

    async def aclose(self) -> None:
        """Lets go of connections, after what was given back."""

    def stats(self) -> LimiterStats:
        """What happened so far."""


class LocalRateLimiter:
    """The buckets of one router. The names are those of tenants, so there are not many."""

    def __init__(self, clock: Clock = monotonic, mode: LimiterMode = "local") -> None:
        self._clock = clock
        self._mode = mode
        self._levels: dict[str, Level] = {}

    @property
    def mode(self) -> LimiterMode:
        """As it was told: "none" where nobody has a rate."""
        return self._mode

    async def take(self, name: str, rate: Rate, cost: int) -> Grant:
        """See RateLimiter."""
        return Grant(self.pour(name, rate, cost), is_shared=False)

    def give_back(self, name: str, rate: Rate, num_units: int, grant: Grant) -> None:
        """See RateLimiter."""
        assert grant.wait_us == 0, "nothing was taken"
        self.pour(name, rate, -num_units)

    def pour(self, name: str, rate: Rate, cost: int) -> int:
        """The wait in microseconds; 0: done."""
        now_us = int(self._clock() * 1e6)
        level, wait_us = pour(self._levels.get(name, Level()), rate, cost, now_us)
        self._levels[name] = level
        return wait_us

    async def aclose(self) -> None:
        """There is nothing to let go of."""

    def stats(self) -> LimiterStats:
        """Nothing can happen here."""
        return LimiterStats()


class RedisRateLimiter:
    """The buckets of all routers. What Redis does not answer in time is decided here, by a router's share of the rate."""

    def __init__(
        self, calls: RedisCalls, *, budget_s: float, num_routers: int, clock: Clock = monotonic
    ) -> None:
        self._calls = calls
        self._budget_s = budget_s
        self._num_routers = num_routers
        self._local = LocalRateLimiter(clock)
        # What Redis has not heard of yet: more may come to it while a call is under way.
        self._owed: dict[str, tuple[Rate, int]] = {}
        self._giving_back: asyncio.Task[None] | None = None
        self._num_strict = 0

    @property
    def mode(self) -> LimiterMode:
        """What the last calls say."""
        return "strict" if self._calls.is_away else "redis"

    async def take(self, name: str, rate: Rate, cost: int) -> Grant:
        """See RateLimiter."""
        on_abandoned = partial(self.take_back, name, rate, cost)
        reply = await self._calls.answer(self._script(name, rate, cost), self._budget_s, on_abandoned)
        return self.grant_of(reply, name, rate, cost)

    def grant_of(self, reply: object, name: str, rate: Rate, cost: int) -> Grant:
        """What the script's answer means; where it is none, what is decided here instead."""
        if _is_wait(reply):
            return Grant(reply, is_shared=True)
        self._num_strict += 1
        return Grant(self._local.pour(name, self._share(rate, cost), cost), is_shared=False)

    def give_back(self, name: str, rate: Rate, num_units: int, grant: Grant) -> None:
        """To where it was taken; what Redis does not hear of stays taken there until it has drained."""
        assert grant.wait_us == 0, "nothing was taken"
        if not grant.is_shared:
            self._local.pour(name, self._share(rate, 1), -num_units)
            return
        _, num_owed = self._owed.get(name, (rate, 0))
        self._owed[name] = rate, num_owed + num_units
        if self._giving_back is None or self._giving_back.done():
            self._giving_back = asyncio.create_task(self._give_all_back())

    def take_back(self, name: str, rate: Rate, cost: int, reply: object) -> None:
        """Whoever asked has left before it was told, and so uses nothing. `reply` is the script's answer."""
        if _is_wait(reply) and reply == 0:
            self.give_back(name, rate, cost, Grant(reply, is_shared=True))

    async def aclose(self) -> None:
        """See RateLimiter."""
        await self.settled(self._calls.limit_s)
        await self._calls.aclose()

    async def settled(self, timeout_s: float | None = None) -> None:
        """Waits until Redis has heard of all that was given back so far, or so long."""
        if self._giving_back is not None:
            await asyncio.wait({self._giving_back}, timeout=timeout_s)

    def stats(self) -> LimiterStats:
        """What happened so far."""
        calls = self._calls.stats()
        return LimiterStats(calls.num_failures, calls.num_skipped, self._num_strict)

    async def _give_all_back(self) -> None:
        """A call for each bucket, one after the other: in a rush of requests one call gives back for many of them."""
        while self._owed:
            name = next(iter(self._owed))
            rate, num_units = self._owed.pop(name)
            await self._calls.answer(self._script(name, rate, -num_units), self._calls.limit_s)

    def _share(self, rate: Rate, cost: int) -> Rate:
        """Of one router, and no more at once than one request: that has to fit, or it would never get in."""
        return Rate(max(1, rate.per_minute // self._num_routers), cost)

    def _script(self, name: str, rate: Rate, cost: int) -> Callable[[], Awaitable[object]]:
        return partial(self._calls.run_script, POUR, [bucket_key(name)], words_of(rate, cost))


def bucket_key(name: str) -> str:
    """Where Redis has a bucket."""
    return _KEY + name


def words_of(rate: Rate, cost: int) -> list[int]:
    """What the script is told."""
    return [rate.per_minute, rate.burst, cost]


def _is_wait(reply: object) -> TypeGuard[int]:
    """Whether an answer can be one of the script's; the longest wait is for a full burst at one unit a minute."""
    return isinstance(reply, int) and 0 <= reply <= MAX_UNITS * MINUTE_US
