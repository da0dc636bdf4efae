"""Who says where the workers of a tier are: the settings, DNS, or what workers have registered in Redis.

A source only names addresses. Who is there is for `router/workers.py`, and nobody is gone because a source falls silent.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from paceline.prefix_index.registration import Tier, WorkerTable
from paceline.runtime.addresses import join_host
from router.places import Place

# The IP addresses of a name; raises OSError when nobody says.
Resolve = Callable[[str], Awaitable[frozenset[str]]]


class WorkerSource(Protocol):
    """Names the addresses of one tier."""

    @property
    def name(self) -> str:
        """How the log calls it."""

    @property
    def is_fixed(self) -> bool:
        """Whether it names what somebody has written down, and so expects to be there."""

    def sets(self) -> AsyncIterator[frozenset[str] | None]:
        """All addresses, again and again; None when that cannot be said now. Ends when they will not change any more."""


@dataclass(frozen=True, slots=True)
class StaticSource:
    """The addresses of a setting."""

    addresses: frozenset[str]
    name: str = "settings"
    is_fixed: bool = True

    async def sets(self) -> AsyncIterator[frozenset[str] | None]:
        """Once."""
        yield self.addresses


async def resolve(host: str) -> frozenset[str]:
    """Asks as the machine is set up to ask: its hosts file, its name servers."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return frozenset(str(where[0]) for *_, where in found)


@dataclass(frozen=True, slots=True)
class DnsSource:
    """Every address that a name has, of both families, with one port."""

    host: str
    port: int
    every_s: float
    resolve: Resolve = resolve
    is_fixed: bool = False

    @property
    def name(self) -> str:
        """The name that is looked up."""
        return f"dns:{self.host}:{self.port}"

    async def sets(self) -> AsyncIterator[frozenset[str] | None]:
        """One look-up after the other; one that is slow delays the next."""
        while True:
            yield await self._look_up()
            await asyncio.sleep(self.every_s)

    async def _look_up(self) -> frozenset[str] | None:
        try:
            hosts = await self.resolve(self.host)
        except (OSError, UnicodeError):
            return None
        # A name without addresses is one that nobody has filled in yet, or not any more by mistake.
        return frozenset(join_host(host, self.port) for host in hosts) or None


@dataclass(frozen=True, slots=True)
class RegisteredSource:
    """Those that have registered in Redis and still say that they are there."""

    table: WorkerTable
    tier: Tier
    every_s: float
    name: str = "redis"
    is_fixed: bool = False

    async def sets(self) -> AsyncIterator[frozenset[str] | None]:
        """What the table says; None when it says nothing."""
        while True:
            yield await self.table.addresses(self.tier)
            await asyncio.sleep(self.every_s)


def sources_of(
    places: tuple[Place, ...], tier: Tier, table: WorkerTable | None, every_s: float
) -> list[WorkerSource]:
    """One for all addresses, one for each name, one for the table, where the places have them."""
    fixed = frozenset(place.address for place in places if place.kind == "address")
    sources: list[WorkerSource] = [StaticSource(fixed)] if fixed else []
    for place in dict.fromkeys(places):
        if place.kind == "dns":
            host, _, port = place.address.rpartition(":")
            sources.append(DnsSource(host.strip("[]"), int(port), every_s))
        elif place.kind == "redis":
            assert table is not None, "checked with the settings"
            sources.append(RegisteredSource(table, tier, every_s))
    return sources
