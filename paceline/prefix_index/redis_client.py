"""A client of the Redis that an address names, whichever form it has, that never tries again and never reads without end."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

# The parser that the client itself would use; there is no public name to derive from.
from redis._parsers import _AsyncRESP2Parser
from redis.asyncio import (
    Connection,
    ConnectionPool,
    Redis,
    RedisCluster,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import InvalidResponse

from paceline.prefix_index.redis_line import ScriptLine, Word
from paceline.prefix_index.redis_url import RedisAddress

# Ours are far smaller; the largest is a cluster's list of all of its server's commands, which takes a fifth of this.
MAX_REPLY_BYTES = 4 << 20
# What an element of a reply takes in memory, beside its bytes.
_ELEMENT_BYTES = 64


class BoundedParser(_AsyncRESP2Parser):
    """Gives up a reply that takes more than about `MAX_REPLY_BYTES` of memory, however its server divides it up."""

    _num_left = 0

    async def read_response(self, disable_decoding: bool = False) -> Any:  # noqa: FBT001, FBT002 - the client's own signature
        """One reply; raises InvalidResponse for one that is too long, and the client drops the connection."""
        self._num_left = MAX_REPLY_BYTES
        return await super().read_response(disable_decoding=disable_decoding)

    async def _read(self, length: int) -> bytes:
        self._spend(length)
        return await super()._read(length)

    async def _readline(self) -> bytes:
        # The stream itself bounds a line.
        self._spend(_ELEMENT_BYTES)
        return await super()._readline()

    def _spend(self, num_bytes: int) -> None:
        self._num_left -= num_bytes
        if self._num_left < 0 or num_bytes < 0:
            raise InvalidResponse(f"a reply of more than {MAX_REPLY_BYTES} bytes")


class ScriptRunner(Protocol):
    """Runs scripts, each an atomic step."""

    def __call__(self, script: str, keys: Sequence[Word], arguments: Sequence[Word]) -> Awaitable[object]:
        """A script's answer, or RedisError."""
        ...


@dataclass(frozen=True, slots=True)
class RedisClient:
    """`commands` runs them, and `run_script` scripts. On a Redis Cluster a script reads the keys of one slot alone."""

    commands: Redis | RedisCluster
    run_script: ScriptRunner
    is_cluster: bool
    aclose: Callable[[], Awaitable[None]]


def connect(address: RedisAddress, *, timeout_s: float, max_connections: int) -> RedisClient:
    """A client that connects when it is first used, in `timeout_s` seconds or not at all. It fails when more calls run at once.

    How long a call may last is for its caller, who cancels it.
    """
    login = {"username": address.username, "password": address.password}
    options = {**login, **_transport(timeout_s), **(address.tls or {})}
    # One for scripts; and a timer of its own for each step of a call would cost more than the step.
    server = {**options, "max_connections": max_connections + 1, "socket_timeout": None}
    match address.kind:
        case "sentinel":
            return _through_sentinels(address, server, timeout_s)
        case "cluster":
            return _of_cluster(address, options, max_connections)
        case _:
            return _of_server(address, server)


def _transport(timeout_s: float) -> dict[str, Any]:
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        # By default the client tries again with back-off, long past any budget.
        "retry": Retry(NoBackoff(), 0),
        # Nothing but a login is said before the first command: a new connection costs no round trip of its own.
        "protocol": 2,
        "driver_info": None,
    }


def _of_server(address: RedisAddress, options: dict[str, Any]) -> RedisClient:
    if address.kind == "unix":
        place: dict[str, Any] = {"connection_class": UnixDomainSocketConnection, "path": address.path}
    else:
        host, port = address.hosts[0]
        secure = Connection if address.tls is None else SSLConnection
        place = {"connection_class": secure, "host": host, "port": port}
    pool = ConnectionPool(db=address.db, parser_class=BoundedParser, **place, **options)
    client, line = Redis(connection_pool=pool), ScriptLine(pool)

    async def aclose() -> None:
        await line.aclose()
        await client.aclose(close_connection_pool=True)

    return RedisClient(client, line.run, is_cluster=False, aclose=aclose)


def _through_sentinels(address: RedisAddress, options: dict[str, Any], timeout_s: float) -> RedisClient:
    secure = {} if address.tls is None else {"ssl": True, **address.tls}
    their_login = {"username": address.sentinel_username, "password": address.sentinel_password}
    # They are asked one after the other: one that is silent leaves time for the next ones, and for the master.
    times = _transport(timeout_s / (len(address.hosts) + 1))
    sentinels = Sentinel(  # type: ignore[no-untyped-call] # it has no types
        address.hosts, sentinel_kwargs={**their_login, **times, **secure}
    )
    for sentinel in sentinels.sentinels:
        sentinel.connection_pool.connection_kwargs["parser_class"] = BoundedParser
    client = sentinels.master_for(
        address.service,
        db=address.db,
        parser_class=BoundedParser,
        **(options | secure),
    )
    line = ScriptLine(client.connection_pool)

    async def aclose() -> None:
        await line.aclose()
        await client.aclose(close_connection_pool=True)
        await sentinels.aclose()

    return RedisClient(client, line.run, is_cluster=False, aclose=aclose)


def _of_cluster(address: RedisAddress, options: dict[str, Any], max_connections: int) -> RedisClient:
    nodes = [ClusterNode(host, port) for host, port in address.hosts]
    secure: dict[str, Any] = {} if address.tls is None else {"ssl": True}
    client = RedisCluster(
        startup_nodes=nodes, max_connections=max_connections, require_full_coverage=False, **secure, **options
    )
    # Nodes are made out of these, now and whenever more are found.
    for kwargs in (client.connection_kwargs, *(node.connection_kwargs for node in client.startup_nodes)):
        kwargs["parser_class"] = BoundedParser

    async def run_script(script: str, keys: Sequence[Word], arguments: Sequence[Word]) -> object:
        """By the client itself, who knows which server has the keys."""
        return await client.execute_command("EVAL", script, len(keys), *keys, *arguments)

    return RedisClient(client, run_script, is_cluster=True, aclose=client.aclose)
