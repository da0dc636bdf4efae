"""Decides at the door whether a request is taken: whether there is room for one more, and whether its tenant may have it now.

Room is this router's own; rates, and what a tenant has under way, are counted by a `RateLimiter` and by `Slots`, for all routers.
"""

import math
from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass

from paceline.core.errors import DrainingError, QueueFullError, RateLimitedError, ScopeForbiddenError
from router.rate_limit import Grant, LimiterMode, Rate, RateLimiter
from router.slots import RETRY_AFTER_S, Slots
from router.tenants import Tenant
from router.turnstile import Turnstile

_NO_BOUND = 1 << 62
_ONE_REQUEST = 1


@dataclass(frozen=True, slots=True)
class AdmissionStats:
    """A picture of the door. Who is refused for a rate, or for a tenant's own bound, was not refused for want of room."""

    num_active: int
    num_bytes: int
    num_admitted: int
    num_refused: int


class Door:
    """Bounds how many requests are under way, and their bytes."""

    def __init__(self, max_requests: int, max_bytes: int = _NO_BOUND) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._closed = False
        self._num_active = self._num_bytes = self._num_admitted = self._num_refused = 0

    @contextmanager
    def enter(self, num_bytes: int = 0) -> Iterator[int]:
        """Holds a place for the request; gives how many were there before it.

        Raises QueueFullError, or DrainingError once closed.
        """
        if self._closed:
            raise DrainingError("the server is shutting down; send the request to another one")
        self._require_room(num_bytes)
        position = self._num_active
        self._num_active += 1
        self._num_bytes += num_bytes
        self._num_admitted += 1
        try:
            yield position
        finally:
            self._num_active -= 1
            self._num_bytes -= num_bytes

    def close(self) -> None:
        """Takes nobody any more."""
        self._closed = True

    def stats(self) -> AdmissionStats:
        """A picture of now."""
        return AdmissionStats(self._num_active, self._num_bytes, self._num_admitted, self._num_refused)

    def _require_room(self, num_bytes: int) -> None:
        problem = ""
        if self._num_active >= self._max_requests:
            problem = f"{self._num_active} requests are under way, and no more are taken"
        # One that is alone always fits: its own limit is another.
        elif self._num_active and self._num_bytes + num_bytes > self._max_bytes:
            problem = f"the requests under way have {self._num_bytes} bytes, and no more are taken"
        if problem:
            self._num_refused += 1
            raise QueueFullError(problem, retry_after_s=RETRY_AFTER_S)


class Visit:
    """A request that has been taken, and the tokens that it may use."""

    def __init__(self, position: int, tenant: Tenant, limiter: RateLimiter, request: Grant | None) -> None:
        self.position = position
        self.tenant = tenant
        # What counts the request before it is placed.
        self.unplaced = ExitStack()
        self._limiter = limiter
        self._request = request
        self._reserved: tuple[Rate, int, Grant] | None = None
        self._num_used = 0

    async def reserve(self, num_tokens: int) -> None:
        """Takes the most that the request can use. Raises RateLimitedError, or ScopeForbiddenError for what never fits."""
        rate = self.tenant.tokens
        if rate is None:
            return
        if num_tokens > rate.burst:
            raise ScopeForbiddenError(
                "stopping.max_tokens",
                f"and the prompt come to {num_tokens} tokens with all candidates, and this tenant may use {rate.burst} at once",
            )
        grant = await self._limiter.take(_bucket(self.tenant, "tokens"), rate, num_tokens)
        if grant.wait_us:
            self.give_request_back()
            raise _rate_limited("tokens", rate, grant)
        self._reserved = rate, num_tokens, grant

    def use(self, num_tokens: int) -> None:
        """What the request has really used so far."""
        self._num_used = num_tokens

    def settle(self) -> None:
        """Gives back what was reserved and not used; a request that was never placed is not expected any more."""
        self.unplaced.close()
        if self._reserved is not None:
            rate, num_reserved, grant = self._reserved
            self._reserved = None
            num_left = num_reserved - self._num_used
            if num_left > 0:
                self._limiter.give_back(_bucket(self.tenant, "tokens"), rate, num_left, grant)

    def give_request_back(self) -> None:
        """It was not served, so it does not count."""
        if self._request is not None and self.tenant.requests is not None:
            name = _bucket(self.tenant, "requests")
            self._limiter.give_back(name, self.tenant.requests, _ONE_REQUEST, self._request)
            self._request = None


class AdmissionController:
    """Owned by the router's event loop."""

    def __init__(
        self, door: Door, limiter: RateLimiter, slots: Slots, turnstile: Turnstile | None = None
    ) -> None:
        self._door = door
        self._limiter = limiter
        self._slots = slots
        # Of the two, where they can be asked together.
        self._turnstile = turnstile

    @asynccontextmanager
    async def admit(self, tenant: Tenant, num_bytes: int) -> AsyncIterator[Visit]:
        """Holds a place for the request, and settles what it used in the end.

        Raises DrainingError, QueueFullError or RateLimitedError; whoever is refused for want of room is not charged.
        """
        with self._door.enter(num_bytes) as position:
            async with self._entered(tenant) as request:
                visit = Visit(position, tenant, self._limiter, request)
                try:
                    yield visit
                finally:
                    visit.settle()

    async def charge_request(self, tenant: Tenant) -> Grant | None:
        """Counts a request against the tenant's rate, and gives the grant if there is a rate; raises RateLimitedError."""
        if tenant.requests is None:
            return None
        grant = await self._limiter.take(_bucket(tenant, "requests"), tenant.requests, _ONE_REQUEST)
        return _granted(grant, tenant.requests)

    @property
    def limiter_mode(self) -> LimiterMode:
        """Who counts rates at this moment."""
        return self._limiter.mode

    def close(self) -> None:
        """Takes nobody any more."""
        self._door.close()

    def stats(self) -> AdmissionStats:
        """A picture of now."""
        return self._door.stats()

    @asynccontextmanager
    async def _entered(self, tenant: Tenant) -> AsyncIterator[Grant | None]:
        """Holds a slot, and has counted the request if there is a rate."""
        most, rate, turnstile = tenant.max_concurrent, tenant.requests, self._turnstile
        if turnstile is None or most is None or rate is None:
            async with self._slot(tenant):
                yield await self.charge_request(tenant)
            return
        async with turnstile.enter(tenant.name, most, _bucket(tenant, "requests"), rate) as grant:
            yield _granted(grant, rate)

    def _slot(self, tenant: Tenant) -> AbstractAsyncContextManager[None]:
        if tenant.max_concurrent is None:
            return nullcontext()
        return self._slots.hold(tenant.name, tenant.max_concurrent)


def _bucket(tenant: Tenant, unit: str) -> str:
    """What stands in braces is the same in the name of the tenant's slots."""
    return f"{unit}:{{{tenant.name}}}"


def _granted(grant: Grant, rate: Rate) -> Grant:
    """A grant of a request, or RateLimitedError."""
    if grant.wait_us:
        raise _rate_limited("requests", rate, grant)
    return grant


def _rate_limited(unit: str, rate: Rate, grant: Grant) -> RateLimitedError:
    # Up to the next millisecond: who comes a moment too early is refused again.
    return RateLimitedError(unit, rate.per_minute, retry_after_s=math.ceil(grant.wait_us / 1000) / 1000)
