"""A tenant's slot and its rate of requests, asked of Redis in one step: one way there and back less before each first token."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from paceline.prefix_index.redis_calls import NoAnswer, RedisCalls
from router.rate_limit import POUR_INTO, Grant, Rate, RedisRateLimiter, bucket_key, words_of
from router.slots import TAKE_SLOT, RedisSlots, slots_key

_ONE_REQUEST = 1
_NUM_RATE_WORDS = 3

# KEYS: a bucket, and slots of the same tenant. ARGV: what is poured, then what the slot is asked for with. Gives what either would:
# whoever is refused for want of a slot has taken nothing from its bucket.
ENTER = f"""
{POUR_INTO}
{TAKE_SLOT}
if take_slot(KEYS[2], {_NUM_RATE_WORDS}) == 0 then return {{0, 0}} end
return {{1, pour_into(KEYS[1])}}
"""


@dataclass(frozen=True, slots=True)
class Turnstile:
    """Of the slots and the limiter of one router, which keep what there is to keep."""

    calls: RedisCalls
    slots: RedisSlots
    limiter: RedisRateLimiter
    budget_s: float

    @asynccontextmanager
    async def enter(self, tenant: str, most: int, bucket: str, rate: Rate) -> AsyncIterator[Grant]:
        """Holds a slot, and says whether a request was counted; raises QueueFullError when `most` slots are held."""
        reply: object = NoAnswer()

        async def ask(words: Sequence[str | int]) -> object:
            """With the rate before it."""
            nonlocal reply
            keys, arguments = [bucket_key(bucket), slots_key(tenant)], [*words_of(rate, _ONE_REQUEST), *words]
            asking = partial(self.calls.run_script, ENTER, keys, arguments)
            reply = await self.calls.answer(asking, self.budget_s, partial(self._leave, bucket, rate))
            return _both(reply)[0]

        is_in = False
        try:
            async with self.slots.hold_by(ask, tenant, most):
                is_in = True
                yield self.limiter.grant_of(_both(reply)[1], bucket, rate, _ONE_REQUEST)
        finally:
            # A server that was emptied lets in whoever has no room here.
            if not is_in:
                self._leave(bucket, rate, reply)

    def _leave(self, bucket: str, rate: Rate, reply: object) -> None:
        """Whoever asked has left before it was told, or has no room; its slot is let go in any case."""
        taken, wait = _both(reply)
        if taken == 1:
            self.limiter.take_back(bucket, rate, _ONE_REQUEST, wait)


def _both(reply: object) -> tuple[object, object]:
    """The answers for the slot and for the rate; none for either where it is not the script's."""
    if isinstance(reply, list) and len(reply) == len(("slot", "rate")):
        return reply[0], reply[1]
    return NoAnswer(), NoAnswer()
