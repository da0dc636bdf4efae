"""A server that speaks the protocol of Redis and means no good: it hears what workers publish, and lies to whoever asks."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

from paceline.prefix_index import scripts

Command = list[bytes]
Lie = Callable[["LyingRedis", Command, asyncio.StreamWriter], Awaitable[None]]

HONEST = "honest"
_CHUNK = 1 << 16


class LyingRedis:
    """Its `mood` says how it answers; an honest one is a table that knows nothing. `num_lies` counts what else it said to look-ups."""

    def __init__(self) -> None:
        self.mood = HONEST
        self.num_lies = self.num_answers = 0
        self.workers: dict[bytes, bytes] = {}
        self._writers: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Serves until the end of the block; gives its URL."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        try:
            yield f"redis://{host}:{port}"
        finally:
            server.close()
            for writer in self._writers:
                writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                command = [part async for part in _parts(reader)]
                self._note(command)
                if self.mood == HONEST:
                    writer.write(_honest(command))
                else:
                    self.num_lies += _is_lookup(command)
                    self.num_answers += 1
                    await LIES[self.mood](self, command, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def _note(self, command: Command) -> None:
        if command[1:2] == [scripts.PUBLISH.encode()]:
            arguments = command[3 + int(command[2]) :]
            self.workers[arguments[0]] = arguments[2].split(b":")[0]


async def _parts(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    for _ in range(int((await reader.readuntil(b"\r\n"))[1:])):
        length = int((await reader.readuntil(b"\r\n"))[1:])
        yield (await reader.readexactly(length + 2))[:-2]


def _honest(command: Command) -> bytes:
    if command[0] == b"PING":
        return b"+PONG\r\n"
    if command[0] == b"SET":
        return b"$-1\r\n"
    return b"*1\r\n:0\r\n" if _is_lookup(command) else b":0\r\n"


def _is_lookup(command: Command) -> bool:
    return command[1:2] == [scripts.LOOKUP.encode()]


def _bulk(data: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(data), data)


def _holders(holders: Iterator[tuple[bytes, bytes, int]]) -> bytes:
    parts = [_bulk(worker_id) + _bulk(epoch) + b":%d\r\n" % number for worker_id, epoch, number in holders]
    return b"*%d\r\n:0\r\n" % (1 + 3 * len(parts)) + b"".join(parts)


async def _everybody_has_everything(self: LyingRedis, command: Command, writer: asyncio.StreamWriter) -> None:
    number = int(command[2]) if _is_lookup(command) else 0
    everybody = ((worker_id, epoch, number) for worker_id, epoch in self.workers.items())
    writer.write(_holders(everybody) if number else _honest(command))


async def _one_has_everything(self: LyingRedis, command: Command, writer: asyncio.StreamWriter) -> None:
    number = int(command[2]) if _is_lookup(command) else 0
    one = sorted(self.workers.items())[self.num_answers % max(1, len(self.workers))]
    writer.write(_holders(iter([(*one, number)])) if number else _honest(command))


async def _stale(self: LyingRedis, command: Command, writer: asyncio.StreamWriter) -> None:
    number = int(command[2]) if _is_lookup(command) else 0
    dead = ((worker_id, b"%d" % (int(epoch) ^ 1), number) for worker_id, epoch in self.workers.items())
    writer.write(_holders(dead) if number else _honest(command))


async def _garbage(self: LyingRedis, command: Command, writer: asyncio.StreamWriter) -> None:
    answers = (
        b"*4\r\n:0\r\n:1\r\n*0\r\n$-1\r\n",
        b"$3\r\nabc\r\n",
        b"*2\r\n*-1\r\n+OK\r\n",
        b"%1\r\n+a\r\n+b\r\n",
        b"\x00\xff\r\n",
    )
    writer.write(answers[self.num_answers % len(answers)])


async def _refusals(self: LyingRedis, command: Command, writer: asyncio.StreamWriter) -> None:
    answers = (
        b"-ERR no\r\n",
        b"-LOADING wait\r\n",
        b"-MOVED 1 127.0.0.1:1\r\n",
        b"-NOAUTH who\r\n",
        b"-READONLY no\r\n",
    )
    writer.write(answers[self.num_answers % len(answers)])


async def _twice(self: LyingRedis, command: Command, writer: asyncio.StreamWriter) -> None:
    writer.write(2 * _holders((worker_id, epoch, 40) for worker_id, epoch in self.workers.items()))


async def _endless_string(self: LyingRedis, command: Command, writer: asyncio.StreamWriter) -> None:
    writer.write(b"$2000000000\r\n")
    await _flood(writer, b"x" * _CHUNK)


async def _endless_list(self: LyingRedis, command: Command, writer: asyncio.StreamWriter) -> None:
    writer.write(b"*2000000000\r\n")
    await _flood(writer, b":1\r\n" * (_CHUNK // 4))


async def _flood(writer: asyncio.StreamWriter, data: bytes) -> None:
    while not writer.is_closing():
        writer.write(data)
        await writer.drain()


async def _silence(self: LyingRedis, command: Command, writer: asyncio.StreamWriter) -> None:
    pass


async def _half(self: LyingRedis, command: Command, writer: asyncio.StreamWriter) -> None:
    answer = _holders((worker_id, epoch, 40) for worker_id, epoch in self.workers.items())
    writer.write(answer[: len(answer) // 2])
    await writer.drain()
    raise ConnectionAbortedError


LIES: dict[str, Lie] = {
    "everybody-has-everything": _everybody_has_everything,
    "one-has-everything": _one_has_everything,
    "stale-epochs": _stale,
    "garbage": _garbage,
    "refusals": _refusals,
    "twice": _twice,
    "endless-string": _endless_string,
    "endless-list": _endless_list,
    "silence": _silence,
    "half-and-close": _half,
}
