"""The rights that docs/prefix-table.md gives a user of Redis."""

import re
from pathlib import Path

from redis.asyncio import Redis

from paceline.core.clock import ManualClock
from paceline.prefix_index.redis_calls import RedisCalls
from router.rate_limit import Rate, RedisRateLimiter
from router.slots import RedisSlots
from tests.prefix_index.conftest import EmbeddedRedis

DOCUMENT = Path(__file__).parents[2] / "docs" / "prefix-table.md"


async def test_a_user_with_the_documented_rights_can_count(embedded_redis: EmbeddedRedis) -> None:
    """Rates and slots need no command that the document does not name."""
    text = DOCUMENT.read_text(encoding="utf-8")
    (shared,) = re.findall(r"^ACL SETUSER paceline on >PASSWORD (.*)$", text, re.MULTILINE)
    (more,) = re.findall(r"and needs `([^`]*)`", text)
    async with Redis.from_url(embedded_redis.url) as table:
        rights = [*shared.split(), *more.split()]
        await table.execute_command("ACL", "SETUSER", "paceline", "on", ">secret", *rights)  # type: ignore[no-untyped-call] # it has no types
    calls = RedisCalls(embedded_redis.url.replace("unix://", "unix://paceline:secret@"), limit_s=20.0)
    limiter = RedisRateLimiter(calls, budget_s=20.0, num_routers=2, clock=ManualClock())
    slots = RedisSlots(calls, budget_s=20.0, num_routers=2)
    for _ in range(2):
        grant = await limiter.take("requests:acme", Rate(1, 1), 1)
        assert (grant.wait_us, grant.is_shared) == (0, True)
        limiter.give_back("requests:acme", Rate(1, 1), 1, grant)
        await limiter.settled()
        async with slots.hold("acme", 1):
            await slots.tell(with_held=True)
        await slots.aclose()
    assert calls.stats().num_failures == 0
    await limiter.aclose()
