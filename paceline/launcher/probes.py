"""Ways to see from outside that something works: a port that is free, a Redis that answers, a service that serves."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.core.errors import ConfigError
from paceline.launcher.process import Probe
from paceline.prefix_index.redis_client import connect
from paceline.prefix_index.redis_url import parse_redis_url, redacted

_ANSWER_S = 2.0
_REDIS_ERRORS = (redis.RedisError, redis.exceptions.RedisClusterException, OSError)


def free_port(host: str, port: int, flag: str = "--port") -> int:
    """`port`, or any free one for 0; raises ConfigError, which names the flag, when nobody could listen there."""
    with listening(host, port, flag) as taken:
        return taken


@contextmanager
def listening(host: str, port: int, flag: str) -> Iterator[int]:
    """Keeps a port until the end of the block, so that nobody else gets it; see free_port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as server:
            yield int(server.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use; choose another with {flag}") from error
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error
        raise ConfigError(f"cannot listen on {host}, port {port}: {reason}") from error


def serving(address: str) -> Probe:
    """Whether the gRPC server at `address` says that it serves."""
    request = health_pb2.HealthCheckRequest(service="")

    async def probe() -> bool:
        # A channel for each question: one that stays would report every stop of its server on our stderr.
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(request, timeout=_ANSWER_S)  # type: ignore[attr-defined] # absent in its types
            except grpc.aio.AioRpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    return probe


def answering(redis_url: str) -> Probe:
    """Whether the Redis at `redis_url` answers a PING."""

    async def probe() -> bool:
        try:
            await _ping(redis_url)
        except _REDIS_ERRORS:
            return False
        return True

    return probe


async def require_redis(url: str) -> None:
    """Raises ConfigError when there is no Redis at `url`."""
    try:
        await _ping(url)
    except (*_REDIS_ERRORS, ValueError) as error:
        # Behind it the client shows its own objects, one for each Sentinel.
        reason = str(error).partition(" : <")[0]
        raise ConfigError(f"no Redis answers at {redacted(url)}: {reason}") from error


async def _ping(url: str) -> None:
    client = connect(parse_redis_url(url), timeout_s=_ANSWER_S, max_connections=1)
    try:
        await client.commands.ping()
    finally:
        await client.aclose()
