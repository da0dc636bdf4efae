"""What is done to a cluster. One worker of a tier at a time, so that every request has another one to go to."""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from redis.asyncio import Redis
from redis.exceptions import RedisError

from benchmarks.chaos.relay import Relay
from paceline.client import PacelineClient
from paceline.client_error import PacelineRpcError
from paceline.launcher.cluster import LocalCluster

_POLL_S = 0.1
_REDIS = "redis"

Say = Callable[[str], None]


class Faults:
    """Hurts a cluster until it is told to stop, and leaves it whole."""

    def __init__(
        self,
        cluster: LocalCluster,
        watchers: Sequence[PacelineClient],
        relays: Mapping[str, Relay],
        *,
        seed: int,
        pause_s: float,
        say: Say,
    ) -> None:
        self._cluster = cluster
        # One to each router.
        self._watchers = watchers
        self._relays = relays
        self._seed = seed
        self._pause_s = pause_s
        self._say = say
        self._stopping = asyncio.Event()
        self.counts = Counter[str]()
        # A router would see a frozen worker after ten seconds; some are back before, and some are not.
        self._of_workers: dict[str, Callable[[str, random.Random], Awaitable[None]]] = {
            "kill": self._kill,
            "drain": self._drain,
            "stop": self._freeze,
            "cut": self._cut,
            "silence": self._silence,
        }
        self._of_routers: dict[str, Callable[[str, random.Random], Awaitable[None]]] = {"drain": self._drain}
        self._of_redis: dict[str, Callable[[str, random.Random], Awaitable[None]]] = {
            "kill": self._kill,
            "stop": self._freeze,
            "slow": self._slow,
            "flush": self._flush,
        }

    async def run(self) -> None:
        """Every tier, and Redis, for itself. Returns once they have been stopped and all is whole again."""
        layout = self._cluster.layout
        async with asyncio.TaskGroup() as group:
            for names, kinds in (
                (layout.prefill, self._of_workers),
                (layout.decode, self._of_workers),
                ((_REDIS,), self._of_redis),
                # A lone one leaves nobody to go to.
                (layout.routers if len(layout.routers) > 1 else (), self._of_routers),
            ):
                if names:
                    group.create_task(self._hurt(names, kinds))

    async def restart_all(self) -> None:
        """One after the other drains and comes back, as in an upgrade: workers, Redis left out, and then routers."""
        layout = self._cluster.layout
        for name in (*layout.prefill, *layout.decode, *layout.routers):
            self._say(f"restarting {name}")
            await self._end(name, signal.SIGTERM)
            await self._until_whole(name)

    def stop(self) -> None:
        """Nothing new is done."""
        self._stopping.set()

    async def _hurt(
        self, names: tuple[str, ...], kinds: Mapping[str, Callable[[str, random.Random], Awaitable[None]]]
    ) -> None:
        rng = random.Random(f"{self._seed}-{names[0]}")  # noqa: S311 - to be drawn again, no secret
        while not await self._is_stopped_within(rng.expovariate(1 / self._pause_s)):
            name, kind = rng.choice(names), rng.choice(list(kinds))
            self._say(f"{kind} {name}")
            self.counts[f"{kind}_{name.partition('-')[0]}"] += 1
            await kinds[kind](name, rng)
            await self._until_whole(name)

    async def _is_stopped_within(self, wait_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._stopping.wait()
        return self._stopping.is_set()

    # -- what can be done

    async def _kill(self, name: str, _: random.Random) -> None:
        await self._end(name, signal.SIGKILL)

    async def _drain(self, name: str, _: random.Random) -> None:
        await self._end(name, signal.SIGTERM)

    async def _end(self, name: str, number: signal.Signals) -> None:
        pid = self._cluster.pids[name]
        self._cluster.kill(name, number)
        while self._cluster.pids.get(name) in (None, pid):  # noqa: ASYNC110 - another process has no event to wait for
            await asyncio.sleep(_POLL_S)

    async def _freeze(self, name: str, rng: random.Random) -> None:
        with _frozen(self._cluster.pids[name]):
            await asyncio.sleep(rng.choice((0.2, 2.0, 13.0)))

    async def _cut(self, name: str, rng: random.Random) -> None:
        self._relays[name].cut()
        await asyncio.sleep(rng.uniform(0.0, 4.0))
        self._relays[name].heal()

    async def _silence(self, name: str, rng: random.Random) -> None:
        self._relays[name].hold()
        await asyncio.sleep(rng.choice((0.2, 2.0, 13.0)))
        self._relays[name].heal()

    async def _slow(self, name: str, rng: random.Random) -> None:
        """It answers, mostly too late: awake a moment, and asleep for longer."""
        for _ in range(20):
            with _frozen(self._cluster.pids[name]):
                await asyncio.sleep(rng.uniform(0.02, 0.3))
            await asyncio.sleep(0.02)

    async def _flush(self, _: str, __: random.Random) -> None:
        async with Redis.from_url(self._cluster.redis_url) as redis:
            with suppress(RedisError):
                await redis.flushall()

    # -- whole again

    async def _until_whole(self, name: str) -> None:
        """The process is up, and the routers see it: only then may the next one be hurt."""
        while not (self._cluster.ready and await self._is_seen(name)):  # noqa: ASYNC110 - as above
            await asyncio.sleep(_POLL_S)

    async def _is_seen(self, name: str) -> bool:
        if name not in self._cluster.worker_addresses:
            return True
        try:
            infos = [await watcher.server_info(timeout_s=5.0) for watcher in self._watchers]
        except PacelineRpcError:
            return False
        return all(name in {worker.worker_id for worker in info.workers} for info in infos)


@contextmanager
def _frozen(pid: int) -> Iterator[None]:
    """A process stands still inside."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
