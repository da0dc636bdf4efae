"""A worker tells routers where it is: it says so in Redis every few seconds, and takes it back when it drains or ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from paceline.prefix_index.redis_calls import RedisCalls
from paceline.prefix_index.registration import Registration, Tier, WorkerTable
from paceline.runtime.log import get_logger
from paceline.worker.config import WorkerConfig
from paceline.worker.worker import Worker

# A third of what a word lasts; while nobody hears it, it is said more often.
_BEAT_S = 5.0
_RETRY_S = 1.0

log = get_logger()


class Registrar:
    """Says it for one worker, until it drains."""

    def __init__(self, table: WorkerTable, registration: Registration, draining: asyncio.Event) -> None:
        self._table = table
        self._registration = registration
        self._draining = draining
        # Whether the table has heard the last word; at first nobody knows.
        self._is_heard: bool | None = None

    async def beat(self) -> None:
        """Says it once."""
        is_heard = await self._table.register(self._registration)
        if is_heard and not self._is_heard:
            log.info("registered", address=self._registration.address)
        if not is_heard and self._is_heard is not False:
            log.warning("not_registered", address=self._registration.address)
        self._is_heard = is_heard

    async def run(self) -> None:
        """Says it again and again, and takes it back when the worker drains."""
        while not self._draining.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_BEAT_S if self._is_heard else _RETRY_S):
                    await self._draining.wait()
                break
            await self.beat()
        await self._table.leave(self._registration)


@asynccontextmanager
async def registered(config: WorkerConfig, worker: Worker, tier: Tier) -> AsyncIterator[None]:
    """Routers can find the worker from now on, where the settings say so, until it drains or the block ends."""
    if not config.register:
        yield
        return
    table = WorkerTable(RedisCalls(config.redis))
    registration = Registration(tier, worker.address, worker.key, worker.loaded.fingerprint.digest())
    registrar = Registrar(table, registration, worker.draining)
    await registrar.beat()
    beating = asyncio.create_task(registrar.run())
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await table.leave(registration)
        await table.aclose()
