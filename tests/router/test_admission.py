"""The door of the router, and what a tenant may have of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from paceline.core.clock import ManualClock
from paceline.core.errors import DrainingError, QueueFullError, RateLimitedError, ScopeForbiddenError
from router.admission import AdmissionController, Door, Visit
from router.rate_limit import LocalRateLimiter, Rate
from router.slots import LocalSlots
from router.tenants import Tenant

ACME = Tenant(name="acme", requests=Rate(60, 2), tokens=Rate(6000, 100))


class Admission:
    """An admission on a clock that stands."""

    def __init__(self, max_requests: int = 100, max_bytes: int = 1 << 20) -> None:
        self.clock = ManualClock(1000.0)
        door, limiter = Door(max_requests, max_bytes), LocalRateLimiter(self.clock)
        self.controller = AdmissionController(door, limiter, LocalSlots())

    @asynccontextmanager
    async def visit(self, tenant: Tenant = ACME, num_tokens: int = 0, used: int = 0) -> AsyncIterator[Visit]:
        """A request with its tokens reserved."""
        async with self.controller.admit(tenant, 10) as visit:
            await visit.reserve(num_tokens)
            visit.use(used)
            yield visit

    async def come_and_go(self, tenant: Tenant = ACME, num_tokens: int = 0, used: int = 0) -> None:
        """A request from its begin to its end."""
        async with self.visit(tenant, num_tokens, used):
            pass

    async def is_limited(self, tenant: Tenant = ACME, num_tokens: int = 0) -> RateLimitedError:
        """What a request hears that is refused for a rate."""
        with pytest.raises(RateLimitedError) as caught:
            await self.come_and_go(tenant, num_tokens)
        return caught.value


def test_places_are_counted_from_zero() -> None:
    """Each request hears how many were there before it."""
    door = Door(3)
    with door.enter() as first, door.enter() as second:
        assert (first, second) == (0, 1)
        assert door.stats().num_active == 2
    assert door.stats().num_active == 0


def test_a_full_router_refuses_and_says_when_to_come_back() -> None:
    """The bound is exact: the last place is given, one more is refused, and a place that becomes free is given again."""
    door = Door(2)
    with door.enter():
        with door.enter(), pytest.raises(QueueFullError) as caught, door.enter():
            pass
        assert caught.value.retry_after_s > 0
        with door.enter() as position:
            assert position == 1
    stats = door.stats()
    assert (stats.num_active, stats.num_admitted, stats.num_refused) == (0, 3, 1)


def test_the_bytes_under_way_are_bounded_and_one_alone_always_fits() -> None:
    """Together they stay within the bound; a request that is longer by itself is let in when nobody else is there."""
    door = Door(10, max_bytes=100)
    with door.enter(60):
        with pytest.raises(QueueFullError, match="bytes"), door.enter(41):
            pass
        with door.enter(40):
            assert door.stats().num_bytes == 100
    with door.enter(1000):
        assert door.stats().num_bytes == 1000
    assert door.stats().num_bytes == 0


def test_a_place_comes_back_however_the_request_ends() -> None:
    """After an exception nothing is held."""
    door = Door(1)
    for _ in range(2):
        with pytest.raises(ValueError, match="a bug"), door.enter():
            raise ValueError("a bug")
    assert door.stats().num_active == 0


def test_a_closed_door_takes_nobody_and_leaves_those_inside() -> None:
    """While draining, new requests hear DRAINING, and those under way keep their places."""
    door = Door(2)
    with door.enter():
        door.close()
        with pytest.raises(DrainingError), door.enter():
            pass
        assert door.stats().num_active == 1
    assert door.stats().num_active == 0


async def test_who_waits_as_long_as_it_is_told_gets_in() -> None:
    """The delay of RATE_LIMITED is exact: a millisecond before it the request is refused, and after it taken."""
    admission = Admission()
    for _ in range(2):
        await admission.come_and_go()
    refused = await admission.is_limited()
    assert (refused.limit, refused.per_minute, refused.retry_after_s) == ("requests", 60, 1.0)
    admission.clock.advance(refused.retry_after_s - 0.001)
    again = await admission.is_limited()
    assert again.retry_after_s == pytest.approx(0.001)
    admission.clock.advance(again.retry_after_s)
    await admission.come_and_go()


async def test_a_delay_that_is_no_whole_number_is_rounded_up() -> None:
    """Seven a minute are one each 8.571428.. seconds; who waits what it was told gets in."""
    admission = Admission()
    tenant = Tenant("acme", requests=Rate(7, 1))
    await admission.come_and_go(tenant)
    refused = await admission.is_limited(tenant)
    assert refused.retry_after_s == 8.572
    admission.clock.advance(refused.retry_after_s)
    await admission.come_and_go(tenant)


async def test_who_is_over_both_rates_hears_of_one_after_the_other() -> None:
    """Tokens are known once a request has been counted, so that its delay says nothing of them; who has waited for both gets in."""
    admission = Admission()
    tenant = Tenant("acme", requests=Rate(60, 1), tokens=Rate(600, 60))
    await admission.come_and_go(tenant, 60, used=60)
    for limit, delay_s in (("requests", 1.0), ("tokens", 4.0)):
        refused = await admission.is_limited(tenant, 50)
        assert refused.limit == limit
        assert refused.retry_after_s == pytest.approx(delay_s)
        admission.clock.advance(refused.retry_after_s)
    await admission.come_and_go(tenant, 50)


async def test_tokens_that_were_reserved_and_not_used_come_back() -> None:
    """A request takes the most that it may need, and in the end costs what it used, also when it fails."""
    admission = Admission()
    tenant = replace(ACME, requests=None)
    async with admission.visit(tenant, 90, used=30):
        assert (await admission.is_limited(tenant, 11)).limit == "tokens"
        await admission.come_and_go(tenant, 10)
    with pytest.raises(ValueError, match="a bug"):
        async with admission.visit(tenant, 50):
            raise ValueError("a bug")
    await admission.come_and_go(tenant, 70, used=70)
    assert (await admission.is_limited(tenant, 1)).retry_after_s == pytest.approx(0.01)


async def test_who_is_refused_for_its_tokens_has_not_spent_a_request() -> None:
    """After the delay both rates let the request in."""
    admission = Admission()
    async with admission.visit(num_tokens=100, used=100):
        refused = await admission.is_limited(num_tokens=50)
    admission.clock.advance(refused.retry_after_s)
    await admission.come_and_go(num_tokens=50)


async def test_who_finds_no_room_has_not_spent_a_request() -> None:
    """QUEUE_FULL comes before the rate is asked."""
    admission = Admission(max_requests=1)
    async with admission.visit():
        for _ in range(5):
            with pytest.raises(QueueFullError):
                await admission.come_and_go()
    await admission.come_and_go()
    assert (await admission.is_limited()).limit == "requests"


async def test_what_never_fits_is_refused_for_good() -> None:
    """More tokens than the burst is no matter of waiting, and costs nothing."""
    admission = Admission()
    with pytest.raises(ScopeForbiddenError, match="101 tokens"):
        await admission.come_and_go(num_tokens=101)
    await admission.come_and_go(num_tokens=100)


async def test_a_tenant_has_so_many_requests_under_way_and_no_more() -> None:
    """The bound is a tenant's own, and a place that becomes free is given again."""
    admission = Admission()
    narrow, other = Tenant("narrow", max_concurrent=1), Tenant("other", max_concurrent=1)
    for _ in range(2):
        async with admission.visit(narrow), admission.visit(other):
            with pytest.raises(QueueFullError, match="of this tenant"):
                await admission.come_and_go(narrow)
    stats = admission.controller.stats()
    assert (stats.num_active, stats.num_bytes) == (0, 0)


async def test_a_tenant_without_limits_is_never_refused() -> None:
    """The anonymous one of a server without a file of tenants is such a one."""
    admission = Admission()
    for _ in range(50):
        await admission.come_and_go(Tenant(), num_tokens=1_000_000)
