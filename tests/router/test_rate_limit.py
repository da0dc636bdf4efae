"""Rates: the rule against a model that is counted out by hand, the script against the rule, and a Redis that goes away."""

import asyncio
from collections.abc import AsyncIterator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from paceline.core.clock import ManualClock
from paceline.prefix_index.redis_calls import RedisCalls
from router.rate_limit import (
    MAX_UNITS,
    MINUTE_US,
    POUR,
    Level,
    LimiterMode,
    LocalRateLimiter,
    Rate,
    RedisRateLimiter,
    pour,
)
from tests.prefix_index.conftest import EmbeddedRedis
from tests.worker.bench import until

RATES = st.builds(Rate, st.integers(1, 10_000), st.integers(1, 500))
# Microseconds that pass, and what is asked for then; some of it is more than the burst.
STEPS = st.lists(st.tuples(st.integers(0, 2 * MINUTE_US), st.integers(1, 600)), max_size=60)


class Budget:
    """The plain model: what is left of the burst, refilled by the rate, in exact fractions."""

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._left = Fraction(rate.burst)

    def wait(self, duration_us: int) -> None:
        """Time passes."""
        refilled = Fraction(duration_us * self._rate.per_minute, MINUTE_US)
        self._left = min(Fraction(self._rate.burst), self._left + refilled)

    def take(self, cost: int) -> bool:
        """Whether so much was left; then it is gone."""
        if cost > self._left:
            return False
        self._left -= cost
        return True

    def give_back(self, num_units: int) -> None:
        """As much as there is room for."""
        self._left = min(Fraction(self._rate.burst), self._left + num_units)


@given(RATES, STEPS, st.data())
def test_the_rule_takes_exactly_what_a_plain_budget_has(
    rate: Rate, steps: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Over any history, with what is given back in it, both take and refuse the same."""
    budget, level, now_us = Budget(rate), Level(), 10**15
    for duration_us, cost in steps:
        now_us += duration_us
        budget.wait(duration_us)
        level, wait_us = pour(level, rate, cost, now_us)
        assert budget.take(cost) == (wait_us == 0)
        if wait_us == 0:
            unused = data.draw(st.integers(0, cost))
            level, _ = pour(level, rate, -unused, now_us)
            budget.give_back(unused)


@given(RATES, STEPS)
def test_in_no_stretch_of_time_is_more_taken_than_the_rate_and_the_burst(
    rate: Rate, steps: list[tuple[int, int]]
) -> None:
    """For every begin and every end."""
    level, now_us = Level(), 0
    taken: list[tuple[int, int]] = []
    for duration_us, cost in steps:
        now_us += duration_us
        level, wait_us = pour(level, rate, cost, now_us)
        if wait_us == 0:
            taken.append((now_us, cost))
    for begin, (since_us, _) in enumerate(taken):
        total = 0
        for until_us, cost in taken[begin:]:
            total += cost
            assert total * MINUTE_US <= rate.burst * MINUTE_US + (until_us - since_us) * rate.per_minute


@given(RATES, STEPS, st.integers(1, 500))
def test_who_waits_gets_in_and_not_a_microsecond_sooner(
    rate: Rate, steps: list[tuple[int, int]], cost: int
) -> None:
    """Whatever happened before, for all that fits into the burst."""
    cost, level, now_us = min(cost, rate.burst), Level(), 0
    for duration_us, before in steps:
        now_us += duration_us
        level, _ = pour(level, rate, before, now_us)
    level, wait_us = pour(level, rate, cost, now_us)
    if wait_us > 0:
        level, too_soon = pour(level, rate, cost, now_us + wait_us - 1)
        assert too_soon == 1
        assert pour(level, rate, cost, now_us + wait_us)[1] == 0


def test_a_clock_that_goes_back_stands_still() -> None:
    """What is in the bucket neither grows nor drains, and from then on it drains again."""
    rate = Rate(60, 1)
    level, _ = pour(Level(), rate, 1, 5_000_000)
    level, wait_us = pour(level, rate, 1, 1_000_000)
    assert wait_us == 1_000_000
    assert pour(level, rate, 1, 2_000_000)[1] == 0


# -- the script, on a real server


@pytest.fixture
async def table(embedded_redis: EmbeddedRedis) -> AsyncIterator[Redis]:
    """A client of the server."""
    async with Redis.from_url(embedded_redis.url) as client:
        yield client


KEY = "paceline:rate:requests:{acme}"


async def stored(table: Redis) -> Level:
    """What the script has stored."""
    value = await table.get(KEY) or b"0:0"
    assert isinstance(value, bytes)
    filled, at_us = value.split(b":")
    return Level(int(filled), int(at_us))


# The same script with the time as an argument; its keys do not end, since the server's own clock would end them.
TIMELESS = POUR.replace("redis.call('TIME')", "{ARGV[4], ARGV[5]}").replace(
    ", 'PX', math.ceil(wanted / rate / 1000)", ""
)
COSTS = st.integers(-MAX_UNITS, MAX_UNITS) | st.integers(-3, 3)
HISTORIES = st.lists(st.tuples(st.integers(-100, 3 * MINUTE_US) | st.integers(0, 9), COSTS), max_size=8)


async def test_the_script_does_what_the_rule_says(table: Redis) -> None:
    """On random histories of any rates and costs, given back ones too, every answer and every level is the rule's, to the last bit."""
    assert "TIME" not in TIMELESS
    assert "PX" not in TIMELESS
    loop = asyncio.get_running_loop()
    units = st.integers(1, MAX_UNITS) | st.integers(1, 9)

    @given(st.builds(Rate, units, units), HISTORIES)
    def check(rate: Rate, history: list[tuple[int, int]]) -> None:
        """Both say the same of each call."""
        asyncio.run_coroutine_threadsafe(_compare(table, rate, history), loop).result()

    await asyncio.to_thread(check)


async def _compare(table: Redis, rate: Rate, history: list[tuple[int, int]]) -> None:
    await table.delete(KEY)
    level, now_us = Level(), 1_800_000_000_123_456
    for duration_us, cost in history:
        now_us += duration_us
        level, wait_us = pour(level, rate, cost, now_us)
        time = divmod(now_us, 1_000_000)
        assert await table.eval(TIMELESS, 1, KEY, rate.per_minute, rate.burst, cost, *time) == wait_us
        assert await stored(table) == (level if level.filled else Level())


async def test_a_bucket_is_kept_until_it_is_empty_and_no_question_prolongs_it(table: Redis) -> None:
    """The key ends with what is in it: neither who is let in nor who is refused resets that."""
    # One unit a minute: the bucket with two is empty after two minutes.
    for _ in range(2):
        assert await table.eval(POUR, 1, KEY, 1, 2, 1) == 0
    ends_ms = await table.pexpiretime(KEY)
    level = await stored(table)
    assert ends_ms == pytest.approx(level.at_us / 1000 + 120_000, abs=2_000)
    for _ in range(20):
        assert await table.eval(POUR, 1, KEY, 1, 2, 1) > 0
    # To the millisecond, but for rounding up and the server's own cached clock.
    assert await table.pexpiretime(KEY) == pytest.approx(ends_ms, abs=50)
    await table.eval(POUR, 1, KEY, 1, 2, -1)
    assert await table.pexpiretime(KEY) == pytest.approx(ends_ms - 60_000, abs=50)
    await table.eval(POUR, 1, KEY, 1, 2, -1)
    assert await table.exists(KEY) == 0


@pytest.mark.parametrize("garbage", ["nonsense", "1:", "-5:3", ""])
async def test_garbage_is_an_empty_bucket(table: Redis, garbage: str) -> None:
    """What no router wrote is overwritten, of another type too."""
    await table.set(KEY, garbage)
    assert await table.eval(POUR, 1, KEY, 60, 1, 1) == 0
    await table.delete(KEY)
    await table.hset(KEY, "a", "b")
    assert await table.eval(POUR, 1, KEY, 60, 1, 1) == 0
    assert await table.eval(POUR, 1, KEY, 60, 1, 1) > 0


# -- limiters

# Slow enough that nothing drains while a test runs, however busy the machine is.
RATE = Rate(per_minute=6, burst=10)


def limiter_of(
    server: EmbeddedRedis, *, num_routers: int = 2, clock: ManualClock | None = None
) -> RedisRateLimiter:
    """A router's, with a budget that a busy machine does not use up."""
    calls = RedisCalls(server.url, limit_s=20.0, clock=clock or ManualClock())
    return RedisRateLimiter(calls, budget_s=20.0, num_routers=num_routers, clock=clock or ManualClock())


def mode_of(limiter: RedisRateLimiter) -> LimiterMode:
    """Who counts now; it changes without anything here being assigned."""
    return limiter.mode


@pytest.fixture
async def limiter(embedded_redis: EmbeddedRedis) -> AsyncIterator[RedisRateLimiter]:
    """One router's."""
    made = limiter_of(embedded_redis)
    yield made
    await made.aclose()


async def test_64_clients_at_once_get_no_more_than_the_burst(embedded_redis: EmbeddedRedis) -> None:
    """Of two routers' clients exactly the burst is let in, and what they gave back may be taken again."""
    routers = [limiter_of(embedded_redis) for _ in range(2)]
    rate = Rate(1, 20)
    grants = await asyncio.gather(*(routers[n % 2].take("requests:acme", rate, 1) for n in range(64)))
    let_in = [grant for grant in grants if grant.wait_us == 0]
    assert len(let_in) == 20
    assert all(grant.is_shared for grant in grants)
    for grant in let_in[:5]:
        routers[0].give_back("requests:acme", rate, 1, grant)
    await routers[0].settled()
    again = await asyncio.gather(*(routers[1].take("requests:acme", rate, 1) for _ in range(64)))
    assert sum(grant.wait_us == 0 for grant in again) == 5
    for router in routers:
        await router.aclose()


async def test_what_is_given_back_in_a_rush_goes_back_together(limiter: RedisRateLimiter) -> None:
    """All of it comes back, bucket by bucket, in far fewer calls than there were."""
    grants = await asyncio.gather(*(limiter.take(f"tokens:{n % 2}", RATE, 1) for n in range(20)))
    assert not any(grant.wait_us for grant in grants)
    for number, grant in enumerate(grants):
        limiter.give_back(f"tokens:{number % 2}", RATE, 1, grant)
    await limiter.settled()
    commands = await limiter._calls.client.commands.info("commandstats")
    assert commands["cmdstat_eval"]["calls"] < 30
    for name in ("tokens:0", "tokens:1"):
        assert (await limiter.take(name, RATE, 10)).wait_us == 0


async def test_tenants_and_units_have_buckets_of_their_own(limiter: RedisRateLimiter) -> None:
    """What one takes is nobody else's loss."""
    for name in ("requests:acme", "tokens:acme", "requests:other"):
        assert (await limiter.take(name, RATE, 10)).wait_us == 0
        assert (await limiter.take(name, RATE, 1)).wait_us > 0


async def test_without_redis_the_rate_is_stricter_and_never_none(embedded_redis: EmbeddedRedis) -> None:
    """Each of two routers gives half of the rate and no burst; who waits as told gets in; and with Redis back all is as before."""
    clock = ManualClock(100.0)
    limiter = limiter_of(embedded_redis, clock=clock)
    assert (await limiter.take("requests:acme", RATE, 1)).is_shared
    assert mode_of(limiter) == "redis"
    embedded_redis.kill()
    grants = [await limiter.take("requests:acme", RATE, 1) for _ in range(10)]
    assert [grant.wait_us for grant in grants] == [0] + [20_000_000] * 9
    assert not any(grant.is_shared for grant in grants)
    assert mode_of(limiter) == "strict"
    # The breaker holds the later ones back.
    assert limiter.stats().num_strict == 10
    assert limiter.stats().num_failures + limiter.stats().num_skipped == 10
    assert limiter.stats().num_skipped > 0
    clock.advance(20.0)
    assert (await limiter.take("requests:acme", RATE, 1)).wait_us == 0
    embedded_redis.start()
    clock.advance(2.0)
    assert (await limiter.take("requests:acme", RATE, 1)).is_shared
    assert mode_of(limiter) == "redis"
    await limiter.aclose()


async def test_without_redis_tokens_go_one_request_after_the_other(embedded_redis: EmbeddedRedis) -> None:
    """A request of any size gets in when what came before has drained, and gives back to the bucket that it was taken from."""
    clock = ManualClock(100.0)
    limiter = limiter_of(embedded_redis, clock=clock)
    embedded_redis.kill()
    rate = Rate(per_minute=600, burst=1000)
    grant = await limiter.take("tokens:acme", rate, 900)
    assert grant.wait_us == 0
    assert (await limiter.take("tokens:acme", rate, 10)).wait_us == 180_000_000
    limiter.give_back("tokens:acme", rate, 800, grant)
    assert (await limiter.take("tokens:acme", rate, 500)).wait_us == 20_000_000
    clock.advance(20.0)
    assert (await limiter.take("tokens:acme", rate, 500)).wait_us == 0
    await limiter.aclose()


async def test_a_paused_redis_costs_the_budget_and_is_stricter(embedded_redis: EmbeddedRedis) -> None:
    """Who gets no answer in time is let in by the router's share."""
    calls = RedisCalls(embedded_redis.url, limit_s=20.0)
    limiter = RedisRateLimiter(calls, budget_s=0.05, num_routers=2, clock=ManualClock())
    embedded_redis.pause()
    assert not (await limiter.take("requests:acme", RATE, 1)).is_shared
    assert (await limiter.take("requests:acme", RATE, 1)).wait_us == 20_000_000
    embedded_redis.resume()
    await limiter.aclose()


async def test_whoever_leaves_before_it_is_told_takes_nothing(
    limiter: RedisRateLimiter, embedded_redis: EmbeddedRedis
) -> None:
    """What Redis gives it comes back, and of what Redis refuses it nothing does."""
    assert (await limiter.take("tokens:acme", RATE, 4)).wait_us == 0
    embedded_redis.pause()
    leaving = [asyncio.create_task(limiter.take("tokens:acme", RATE, cost)) for cost in (5, 9)]
    await until(lambda: len(limiter._calls.under_way) == 2)
    for taking in leaving:
        taking.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    embedded_redis.resume()
    await until(lambda: not limiter._calls.under_way)
    await limiter.settled()
    assert (await limiter.take("tokens:acme", RATE, 6)).wait_us == 0
    assert (await limiter.take("tokens:acme", RATE, 1)).wait_us > 0


@pytest.mark.parametrize("lie", ["'x'", "-1", "{1}", "9007199254740993"])
async def test_an_answer_that_cannot_be_is_none(
    limiter: RedisRateLimiter, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    """What is no wait counts as no answer, and the router decides itself."""
    monkeypatch.setattr("router.rate_limit.POUR", f"return {lie}")
    grant = await limiter.take("requests:acme", RATE, 1)
    assert (grant.wait_us, grant.is_shared) == (0, False)


async def test_a_limiter_without_redis_has_the_whole_rate() -> None:
    """The only router gives the burst, and then the rate."""
    clock = ManualClock()
    limiter = LocalRateLimiter(clock)
    assert [(await limiter.take("requests:acme", RATE, 1)).wait_us for _ in range(11)] == [0] * 10 + [
        10_000_000
    ]
    clock.advance(10.0)
    assert (await limiter.take("requests:acme", RATE, 1)).wait_us == 0
    assert limiter.mode == "local"
