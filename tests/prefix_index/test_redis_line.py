"""Scripts that share a connection: whose answer is whose, and what becomes of them when it breaks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.exceptions import RedisError, ResponseError

from paceline.prefix_index.redis_client import RedisClient, connect
from paceline.prefix_index.redis_url import parse_redis_url
from tests.prefix_index.conftest import EmbeddedRedis

ECHO = "return ARGV[1]"
COUNT = "return redis.call('INCR', KEYS[1])"


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[RedisClient]:
    """One that is closed at the end."""
    client = connect(parse_redis_url(url), timeout_s=20.0, max_connections=4)
    try:
        yield client
    finally:
        await client.aclose()


async def num_connections(client: RedisClient) -> int:
    """Those that the server has, the one that asks included."""
    found = await client.commands.execute_command("CLIENT", "LIST")
    return len(found if isinstance(found, list) else found.splitlines())


async def test_each_caller_has_its_own_answer_over_one_connection(embedded_redis: EmbeddedRedis) -> None:
    """Of hundreds at once, and whatever words they send; in the order in which they asked."""
    async with client_of(embedded_redis.url) as client:
        words = [f"{number} ç🙂\r\n$" for number in range(300)]
        echoes = [client.run_script(ECHO, [], [word]) for word in words]
        assert await asyncio.gather(*echoes) == [word.encode() for word in words]
        counts = [client.run_script(COUNT, [b"key"], []) for _ in range(300)]
        assert await asyncio.gather(*counts) == list(range(1, 301))
        assert await num_connections(client) == 2


async def test_an_error_is_that_of_its_caller_alone(embedded_redis: EmbeddedRedis) -> None:
    """A script that fails leaves the others, and the connection, as they are."""
    async with client_of(embedded_redis.url) as client:
        answers = await asyncio.gather(
            *(client.run_script(script, [], ["same"]) for script in (ECHO, "return nonsense(", ECHO)),
            return_exceptions=True,
        )
        assert isinstance(answers[1], ResponseError)
        assert [answers[0], answers[2]] == [b"same", b"same"]


async def test_all_who_wait_hear_that_the_server_is_lost_and_the_next_finds_a_new_one(
    embedded_redis: EmbeddedRedis,
) -> None:
    """Nobody waits for an answer that cannot come any more, and a server that is back is asked."""
    async with client_of(embedded_redis.url) as client:
        assert await client.run_script(ECHO, [], ["before"]) == b"before"
        embedded_redis.pause()
        waiting = [asyncio.ensure_future(client.run_script(ECHO, [], ["lost"])) for _ in range(3)]
        await asyncio.sleep(0)
        embedded_redis.kill()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(answer, RedisError) for answer in answers)
        with pytest.raises(RedisError):
            await client.run_script(ECHO, [], ["nobody there"])
        embedded_redis.start()
        assert await client.run_script(ECHO, [], ["after"]) == b"after"


async def test_a_caller_who_gives_up_ends_the_line_and_no_answer_goes_to_another_question(
    embedded_redis: EmbeddedRedis,
) -> None:
    """Those behind it hear so at once; whoever asks next has the answer to its own question, over a new connection."""
    async with client_of(embedded_redis.url) as client:
        assert await client.run_script(ECHO, [], ["before"]) == b"before"
        embedded_redis.pause()
        late, behind = (asyncio.ensure_future(client.run_script(ECHO, [], [word])) for word in ("1", "2"))
        await asyncio.sleep(0)
        late.cancel()
        with pytest.raises(RedisError):
            await behind
        assert late.cancelled()
        following = asyncio.ensure_future(client.run_script(ECHO, [], ["3"]))
        embedded_redis.resume()
        assert await following == b"3"


async def test_a_caller_who_gives_up_before_the_first_connection_leaves_nobody_waiting(
    embedded_redis: EmbeddedRedis,
) -> None:
    """In the same turn in which it asked, when nothing has begun yet."""
    async with client_of(embedded_redis.url) as client:
        leaving, staying = (asyncio.ensure_future(client.run_script(ECHO, [], ["x"])) for _ in range(2))
        asyncio.get_running_loop().call_soon(leaving.cancel)
        with pytest.raises(RedisError):
            await staying
        assert await client.run_script(ECHO, [], ["next"]) == b"next"


async def test_an_answer_to_nothing_ends_the_connection() -> None:
    """A server that says more than it was asked would otherwise be believed about the next question."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the first chunk twice, and hears when the other side closes."""
        await reader.read(1000)
        writer.write(b":1\r\n:2\r\n")
        while await reader.read(1000):
            pass
        writer.close()
        closed.set()

    closed = asyncio.Event()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with client_of(f"redis://{host}:{port}") as client:
            assert await client.run_script(ECHO, [], ["x"]) == 1
            await closed.wait()


async def test_a_connection_that_the_server_closes_while_nobody_asks_is_made_anew(
    embedded_redis: EmbeddedRedis,
) -> None:
    """The next question is not sent to where nobody listens."""
    async with client_of(embedded_redis.url) as client:
        assert await client.run_script(ECHO, [], ["before"]) == b"before"
        await client.commands.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        while await num_connections(client) > 1:
            pass
        # It is closed by now; a few turns of the loop until all here have heard of it.
        for _ in range(20):
            await asyncio.sleep(0)
        assert await client.run_script(ECHO, [], ["after"]) == b"after"
