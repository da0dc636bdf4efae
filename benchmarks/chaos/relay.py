"""The network between a worker and everybody else: carries bytes both ways, and can be cut or go silent."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 1 << 16


class Relay:
    """Listens on one unix socket and carries each connection to another, which need not be there yet."""

    def __init__(self, path: Path, target: Callable[[], Path]) -> None:
        self._path = path
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._carrying: set[asyncio.Task[None]] = set()
        self._is_cut = False
        self._flows = asyncio.Event()
        self._flows.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._begin, str(self._path))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None, "entered before"
        self._server.close()
        self.cut()
        self._flows.set()
        await asyncio.gather(*self._carrying)

    def cut(self) -> None:
        """Every connection breaks, and new ones break at once."""
        self._is_cut = True
        for writer in self._writers:
            writer.close()

    def hold(self) -> None:
        """Nothing passes, and nobody is told."""
        self._flows.clear()

    def heal(self) -> None:
        """As it was. What was held passes now."""
        self._is_cut = False
        self._flows.set()

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(reader, writer))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            # A connection that breaks is what this is for.
            with suppress(OSError):
                await self._carry_to_target(reader, writer)
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _carry_to_target(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            return
        target_reader, target_writer = await asyncio.open_unix_connection(str(self._target()))
        self._writers.add(target_writer)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(reader, target_writer))
                group.create_task(self._copy(target_reader, writer))
        finally:
            self._writers.discard(target_writer)
            target_writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        # The other way ends with it: gRPC keeps no half of a connection. That one end is gone is nothing to be told either.
        await self._flows.wait()
        writer.close()
