"""Scripts of one Redis server over one connection, one behind the other; those of one turn of the event loop leave together.

A call of the client's own takes a connection out of a pool, and a task and timers for each way. That costs a router several times
what its question is worth.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as BrokenError
from redis.exceptions import ResponseError

Word = str | int | bytes


class ScriptLine:
    """Answers come in the order of the questions. When its connection breaks all who wait are told so, and the next one makes it anew."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        # Nobody is connected before the first call.
        self._life: _Life | None = None
        # The present life's and those that are still ending.
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, script: str, keys: Sequence[Word], arguments: Sequence[Word]) -> "asyncio.Future[object]":
        """The script's answer, or RedisError.

        Whoever cancels it gives up all of the line: what does not come in time holds up what is behind it.
        """
        life = self._living()
        answer = life.ask(("EVAL", script, len(keys), *keys, *arguments))
        answer.add_done_callback(life.note_end)
        return answer

    def _living(self) -> "_Life":
        if self._life is None or self._life.has_ended:
            self._life = _Life(self._pool)
            self._tasks.add(self._life.task)
            self._life.task.add_done_callback(self._tasks.discard)
        return self._life

    async def aclose(self) -> None:
        """Closes the connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Life:
    """Of one connection, from its first question until it breaks."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.has_ended = False
        self._problem: BaseException = BrokenError("the connection was given up")
        self._outbox: list[bytes] = []
        self._has_more = asyncio.Event()
        self._asked: deque[asyncio.Future[object]] = deque()
        self.task = asyncio.create_task(self._run(pool))
        # Not in the task itself: cancelled before it begins, it would never get there.
        self.task.add_done_callback(lambda _: self._end())

    def ask(self, command: Sequence[Word]) -> "asyncio.Future[object]":
        """Sends a command; its answer."""
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._outbox.append(_packed(command))
        self._asked.append(answer)
        self._has_more.set()
        return answer

    def note_end(self, answer: "asyncio.Future[object]") -> None:
        """Once one is cancelled nobody asks any more, and those who wait are told that the connection has broken."""
        if answer.cancelled():
            self.has_ended = True
            self.task.cancel()

    async def _run(self, pool: ConnectionPool) -> None:
        try:
            async with _connected(pool) as connection, asyncio.TaskGroup() as ways:
                ways.create_task(self._write(connection))
                ways.create_task(self._read(connection))
        except ExceptionGroup as group:
            self._problem = group.exceptions[0]
        except Exception as error:  # noqa: BLE001 - whatever it was, those who wait must hear of it
            self._problem = error

    async def _write(self, connection: AbstractConnection) -> None:
        while True:
            await self._has_more.wait()
            self._has_more.clear()
            outbox, self._outbox = self._outbox, []
            await connection.send_packed_command(outbox)

    async def _read(self, connection: AbstractConnection) -> None:
        """Also while nobody asks, to see at once that the other side has closed."""
        while True:
            try:
                reply: object = await connection.read_response(timeout=math.inf)
            except ResponseError as error:
                reply = error
            if not self._asked:
                raise BrokenError("an answer to nothing")
            answer = self._asked.popleft()
            if answer.done():  # its caller has left
                continue
            if isinstance(reply, ResponseError):
                answer.set_exception(reply)
            else:
                answer.set_result(reply)

    def _end(self) -> None:
        self.has_ended = True
        for answer in self._asked:
            if not answer.done():
                answer.set_exception(self._problem)


@asynccontextmanager
async def _connected(pool: ConnectionPool) -> AsyncIterator[AbstractConnection]:
    """A connection of the pool's for as long as it works; it is closed then, since answers may still be on their way."""
    connection = await pool.get_connection()  # type: ignore[no-untyped-call] # it has no types
    try:
        yield connection
    finally:
        await connection.disconnect(nowait=True)
        await pool.release(connection)


def _packed(command: Sequence[Word]) -> bytes:
    parts = [b"*%d\r\n" % len(command)]
    for word in command:
        data = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)
