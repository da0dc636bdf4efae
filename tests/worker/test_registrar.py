"""A worker that says where it is, on a clock of the test's own."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from paceline.core.errors import ConfigError
from paceline.core.prefix import WorkerKey
from paceline.core.request import BootEpoch, WorkerId
from paceline.prefix_index.redis_calls import RedisCalls
from paceline.prefix_index.registration import TTL_S, Registration, WorkerTable
from paceline.worker.config import WorkerConfig
from paceline.worker.registrar import Registrar, registered
from tests.prefix_index.conftest import EmbeddedRedis, embedded_redis
from tests.virtual_time import in_virtual_time, virtual_clock
from tests.worker.bench import PREFILL, serving_worker

__all__ = ["embedded_redis"]

WHERE = Registration("prefill", "10.0.0.1:1", WorkerKey(WorkerId("anne"), BootEpoch(1)), b"")


class ScriptedTable(WorkerTable):
    """Keeps when it was told what, and hears a word unless the script says otherwise."""

    def __init__(self, *heard: bool) -> None:
        self._heard = list(heard)
        self.told: list[tuple[float, str]] = []

    async def register(self, registration: Registration) -> bool:
        """See WorkerTable."""
        assert registration == WHERE
        self.told.append((virtual_clock(), "there"))
        return self._heard.pop(0) if self._heard else True

    async def leave(self, registration: Registration) -> None:
        """See WorkerTable."""
        assert registration == WHERE
        self.told.append((virtual_clock(), "gone"))


async def run_for(table: WorkerTable, seconds: float) -> list[str]:
    """A worker registers, and drains after so many seconds; gives what was logged."""
    draining = asyncio.Event()
    registrar = Registrar(table, WHERE, draining)
    with capture_logs() as logs:
        await registrar.beat()
        running = asyncio.create_task(registrar.run())
        await asyncio.sleep(seconds)
        draining.set()
        await running
    return [entry["event"] for entry in logs]


@in_virtual_time
async def test_it_says_so_three_times_before_it_would_be_forgotten() -> None:
    """Every five seconds until it drains, and then at once that it is gone; one line in the log."""
    table = ScriptedTable()
    assert await run_for(table, 12) == ["registered"]
    assert table.told == [(0, "there"), (5, "there"), (10, "there"), (12, "gone")]
    assert TTL_S == 3 * 5


@in_virtual_time
async def test_what_nobody_hears_is_said_every_second() -> None:
    """Until it is heard again; the log says once that it is not, and once that it is."""
    table = ScriptedTable(False, False, False, True, False, True)
    assert await run_for(table, 11) == ["not_registered", "registered", "not_registered", "registered"]
    assert table.told[:-1] == [(second, "there") for second in (0, 1, 2, 3, 8, 9)]
    assert table.told[-1] == (11, "gone")


async def test_a_worker_is_in_the_table_while_it_takes_requests(
    tiny_tokenizer_dir: Path, embedded_redis: EmbeddedRedis
) -> None:
    """From when it says that it serves, until it drains, or ends in any other way; without the setting never."""
    table = WorkerTable(RedisCalls(embedded_redis.url, limit_s=20.0))
    config = WorkerConfig(model="m", listen="127.0.0.1:1", redis=embedded_redis.url, register=True)
    async with serving_worker(tiny_tokenizer_dir, "anne", PREFILL) as worker:
        async with registered(config, worker, "prefill"):
            assert await table.addresses("prefill") == frozenset({worker.address})
        assert await table.addresses("prefill") == frozenset()
        with pytest.raises(InterruptedError):
            async with registered(config, worker, "prefill"):
                raise InterruptedError
        assert await table.addresses("prefill") == frozenset()
        async with registered(config, worker, "prefill"):
            worker.draining.set()
            async with asyncio.timeout(20):
                while await table.addresses("prefill"):
                    pass
        silent = WorkerConfig(model="m", listen="127.0.0.1:1", redis=embedded_redis.url)
        async with registered(silent, worker, "prefill"):
            assert await table.addresses("prefill") == frozenset()
    await table.aclose()


def test_an_address_that_nobody_can_call_is_not_registered() -> None:
    """A port that is chosen later, an interface that is all of them: the worker is told what to say instead."""
    with pytest.raises(ConfigError, match="--redis"):
        WorkerConfig(model="m", register=True, listen="127.0.0.1:1")
    with pytest.raises(ConfigError, match="--advertise"):
        WorkerConfig(model="m", register=True, redis="redis://h")
    open_door = WorkerConfig("t", allow_plaintext=True, model="m", listen="0.0.0.0:1")
    with pytest.raises(ConfigError, match="--advertise"):
        replace(open_door, register=True, redis="redis://h")
    replace(open_door, register=True, redis="redis://h", advertise="10.0.0.1:1")
