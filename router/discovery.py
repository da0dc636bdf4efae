"""Follows what sources name: an address that comes is watched, one that goes is watched for as long as its worker is there.

A worker leaves the router's view only when its stream dies. So a source that is lost, empties or lies takes nobody away; at
worst it sends the router to addresses where nobody of ours is.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from paceline.runtime.log import get_logger
from paceline.v1 import inference_pb2
from router.worker_sources import WorkerSource
from router.workers import WorkerRegistry

# More workers of one tier than one router could ever serve are a mistake or a lie.
MAX_ADDRESSES = 256

Role = inference_pb2.WorkerRole

log = get_logger()


class Discovery:
    """Owned by the router's event loop; `start` it, and `aclose` it in the end."""

    def __init__(self, registry: WorkerRegistry, tiers: Mapping[Role, Sequence[WorkerSource]]) -> None:
        self._registry = registry
        self._sources = [(role, source) for role, sources in tiers.items() for source in sources]
        # What each source said last, by its place among them, and which of them say nothing now.
        self._named: dict[int, frozenset[str]] = {}
        self._silent: set[int] = set()
        self._hearing: list[asyncio.Task[None]] = []
        self._following: dict[tuple[Role, str], asyncio.Task[None]] = {}

    def start(self) -> None:
        """Asks every source from now on."""
        self._hearing = [asyncio.create_task(self._hear(place)) for place in range(len(self._sources))]

    async def aclose(self) -> None:
        """Asks nobody and follows nobody any more."""
        tasks = [*self._hearing, *self._following.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def num_silent(self) -> int:
        """Sources that cannot say now where workers are."""
        return len(self._silent)

    @property
    def is_complete(self) -> bool:
        """Whether all that is named is there: every source has been asked, and every address.

        What was written down is waited for; of what is only said to be there one look is enough.
        """
        return len(self._named) == len(self._sources) and all(
            self._is_settled(place, address) for place, named in self._named.items() for address in named
        )

    def _is_settled(self, place: int, address: str) -> bool:
        role, source = self._sources[place]
        state = self._registry.state(address, role)
        return state == "there" or (state == "away" and not source.is_fixed)

    async def _hear(self, place: int) -> None:
        _, source = self._sources[place]
        async for addresses in source.sets():
            self._take(place, addresses)
            self._registry.notify()
            await self._registry.close_left()

    def _take(self, place: int, addresses: frozenset[str] | None) -> None:
        role, source = self._sources[place]
        before = self._named.setdefault(place, frozenset())
        if addresses is None:
            if place not in self._silent:
                log.warning("source_lost", source=source.name, tier=_TIERS[role], num_addresses=len(before))
            self._silent.add(place)
            return
        if place in self._silent:
            log.info("source_found", source=source.name, tier=_TIERS[role], num_addresses=len(addresses))
            self._silent.remove(place)
        self._named[place] = self._bounded(place, addresses, before)
        for address in sorted(self._named[place]):
            if (role, address) not in self._following:
                self._following[role, address] = asyncio.create_task(self._follow(role, address))

    def _bounded(self, place: int, addresses: frozenset[str], before: frozenset[str]) -> frozenset[str]:
        """As many as there may be, those first that were there before."""
        _, source = self._sources[place]
        if source.is_fixed or len(addresses) <= MAX_ADDRESSES:
            return addresses
        if len(before) < MAX_ADDRESSES:
            log.warning(
                "too_many_addresses", source=source.name, num_addresses=len(addresses), most=MAX_ADDRESSES
            )
        return frozenset(sorted(addresses, key=lambda each: (each not in before, each))[:MAX_ADDRESSES])

    async def _follow(self, role: Role, address: str) -> None:
        is_named = partial(self._is_named, role, address)
        while is_named():
            await self._registry.watch(address, role, is_named)
        del self._following[role, address]

    def _is_named(self, role: Role, address: str) -> bool:
        return any(
            address in named for place, named in self._named.items() if self._sources[place][0] == role
        )


_TIERS = {inference_pb2.WORKER_ROLE_PREFILL: "prefill", inference_pb2.WORKER_ROLE_DECODE: "decode"}
