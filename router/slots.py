"""How many requests of a tenant are under way: at this router, or at all of them by leases in Redis that end with their router."""

import asyncio
import itertools
import secrets
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Protocol

from paceline.core.clock import Clock, monotonic
from paceline.core.errors import QueueFullError
from paceline.prefix_index.redis_calls import NoAnswer, RedisCalls

# Nothing measures yet how soon a place becomes free; a second is long against a step and short for a person.
RETRY_AFTER_S = 1.0
# What a router that is lost held comes back so long after it last said that it lives.
LEASE_S = 30
_RENEW_S = 10.0
# Of a tenant's slots that were let go while Redis was away.
_MAX_UNTOLD = 1000
_KEY = "paceline:slots:"

# The key is a tenant's slots, each with the microsecond of the server's clock at which it ends. ARGV, behind the first `skip`: a new
# slot, how many there may be, the seconds of a lease, and slots that are let go first. Gives 1 when it was taken, else 0.
TAKE_SLOT = """
local function take_slot(key, skip)
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
  local slot, most, lease = ARGV[skip + 1], tonumber(ARGV[skip + 2]), ARGV[skip + 3]
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  for i = skip + 4, #ARGV do redis.call('ZREM', key, ARGV[i]) end
  if redis.call('ZCARD', key) >= most then return 0 end
  redis.call('ZADD', key, now + lease * 1000000, slot)
  redis.call('EXPIRE', key, lease)
  return 1
end
"""
_TAKE = TAKE_SLOT + "return take_slot(KEYS[1], 0)"

# ARGV: the seconds of a lease, how many slots are let go, those, and then those that are held for as long again. What the
# server has lost meanwhile is there again.
KEEP = """
local time = redis.call('TIME')
local ends = tonumber(time[1]) * 1000000 + tonumber(time[2]) + ARGV[1] * 1000000
local first_held = 3 + ARGV[2]
for i = 3, first_held - 1 do redis.call('ZREM', KEYS[1], ARGV[i]) end
for i = first_held, #ARGV do redis.call('ZADD', KEYS[1], ends, ARGV[i]) end
if #ARGV >= first_held then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
return 1
"""


# Puts the question of a new slot, whose words those are, to Redis; the script's answer.
AskForSlot = Callable[[Sequence[str | int]], Awaitable[object]]


class Slots(Protocol):
    """Bounds how many requests of a tenant are under way."""

    def hold(self, tenant: str, most: int) -> AbstractAsyncContextManager[None]:
        """Holds a slot until the end of the block; raises QueueFullError when `most` are held."""


class LocalSlots:
    """Of one router."""

    def __init__(self) -> None:
        self._num_held: Counter[str] = Counter()

    @asynccontextmanager
    async def hold(self, tenant: str, most: int) -> AsyncIterator[None]:
        """See Slots."""
        if self._num_held[tenant] >= most:
            raise _full(most)
        self._num_held[tenant] += 1
        try:
            yield
        finally:
            self._num_held[tenant] -= 1
            if not self._num_held[tenant]:
                del self._num_held[tenant]


class RedisSlots:
    """Of all routers. While Redis is away each gives its share, and one at least. `keep` has to run meanwhile."""

    def __init__(
        self, calls: RedisCalls, *, budget_s: float, num_routers: int, clock: Clock = monotonic
    ) -> None:
        self._calls = calls
        self._budget_s = budget_s
        self._num_routers = num_routers
        self._clock = clock
        self._router, self._numbers = secrets.token_hex(8), itertools.count()
        self._held: defaultdict[str, set[str]] = defaultdict(set)
        # Until Redis has heard of them. Whoever comes next says it too: a tenant that asks once more is not refused for its last request.
        self._released: defaultdict[str, set[str]] = defaultdict(set)
        self._has_released = asyncio.Event()
        self._next_renewal_s = clock() + _RENEW_S

    def hold(self, tenant: str, most: int) -> AbstractAsyncContextManager[None]:
        """See Slots."""

        async def ask(words: Sequence[str | int]) -> object:
            """By itself."""
            taking = partial(self._calls.run_script, _TAKE, [slots_key(tenant)], words)
            return await self._calls.answer(taking, self._budget_s)

        return self.hold_by(ask, tenant, most)

    @asynccontextmanager
    async def hold_by(self, ask: AskForSlot, tenant: str, most: int) -> AsyncIterator[None]:
        """The same, for who has more to ask at once."""
        slot = f"{self._router}:{next(self._numbers)}"
        reply: object = None
        try:
            reply = await ask([slot, most, LEASE_S, *self._released.get(tenant, ())])
            if reply == 0 or not self._has_room(tenant, most, is_shared=reply == 1):
                raise _full(most)
            self._held[tenant].add(slot)
            yield
        finally:
            # Also a call that was given up may have taken it.
            if reply != 0:
                self._let_go(tenant, slot)

    async def keep(self) -> None:
        """Tells Redis what is let go, and again and again what is held; never returns."""
        while True:
            wait_s = self._next_renewal_s - self._clock()
            try:
                async with asyncio.timeout(max(0.0, wait_s)):
                    await self._has_released.wait()
            except TimeoutError:
                self._next_renewal_s = self._clock() + _RENEW_S
                await self.tell(with_held=True)
            else:
                await self.tell(with_held=False)

    async def aclose(self) -> None:
        """What was let go is told before the connections are closed."""
        if self._released:
            await self.tell(with_held=False)

    async def tell(self, *, with_held: bool) -> None:
        """One round of that. Only one is under way, so that what is let go is not held again by an older word.

        What Redis has not heard of it is told again, unless that is too much: then it ends there with its lease.
        """
        self._has_released.clear()
        for tenant in set(self._released) | (set(self._held) if with_held else set()):
            gone = frozenset(self._released.get(tenant, ()))
            held = self._held.get(tenant, ()) if with_held else ()
            told = partial(
                self._calls.run_script, KEEP, [slots_key(tenant)], [LEASE_S, len(gone), *gone, *held]
            )
            reply = await self._calls.answer(told, self._calls.limit_s)
            if isinstance(reply, NoAnswer) and len(gone) <= _MAX_UNTOLD:
                continue
            self._released[tenant] -= gone
            if not self._released[tenant]:
                del self._released[tenant]

    def _has_room(self, tenant: str, most: int, *, is_shared: bool) -> bool:
        """Whether this router may hold one more: its share, or all that there is where the server has counted.

        A server that was emptied knows nothing of what is held until the next renewal.
        """
        share = most if is_shared else max(1, most // self._num_routers)
        return len(self._held.get(tenant, ())) < share

    def _let_go(self, tenant: str, slot: str) -> None:
        if tenant in self._held:
            self._held[tenant].discard(slot)
            if not self._held[tenant]:
                del self._held[tenant]
        self._released[tenant].add(slot)
        self._has_released.set()


def slots_key(tenant: str) -> str:
    """Where Redis has a tenant's slots. What stands in braces decides which server of a Redis Cluster that is: that of its rates."""
    return f"{_KEY}{{{tenant}}}"


def _full(most: int) -> QueueFullError:
    return QueueFullError(
        f"as many requests of this tenant are under way as it may have, which is {most}",
        retry_after_s=RETRY_AFTER_S,
    )
