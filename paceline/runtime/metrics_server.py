"""Serves a registry of metrics over HTTP, on a thread of its own. It knows no metric."""

import asyncio
import errno
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager
from socketserver import TCPServer
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from paceline.core.errors import ConfigError
from paceline.runtime.log import get_logger
from paceline.runtime.metrics import Sample

if TYPE_CHECKING:  # a module of types, which does not exist at run time
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

NO_METRICS = -1
# Of a service that listens on a unix socket.
METRICS_HOST = "127.0.0.1"
_ANSWER_S = 5.0
# How long a stop may take at most.
_POLL_S = 0.1

log = get_logger()


class _Server(ThreadingWSGIServer):
    """Answers each call on a thread of its own, so that one that reads slowly holds up nobody."""

    def server_bind(self) -> None:
        """Not the base's: that asks the name service for our name, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    """The log is for events, and a call is none. Whoever is silent for long holds no thread."""

    timeout = _ANSWER_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Nothing."""


def check_metrics_port(port: int) -> None:
    """Raises ConfigError for what is neither a port, nor 0 for any, nor -1 for none."""
    if not NO_METRICS <= port <= 65535:
        raise ConfigError(f"--metrics-port {port} is not between 0 and 65535; 0: any that is free, -1: none")


def metrics_host(listen: str) -> str:
    """The host of a service's address; a unix socket has none, and its metrics stay on loopback."""
    if listen.startswith(("unix:", "unix-abstract:")):
        return METRICS_HOST
    return listen.rpartition(":")[0].strip("[]") or METRICS_HOST


def on_loop(
    read: Callable[[], Iterable[Sample]], loop: asyncio.AbstractEventLoop
) -> Callable[[], Iterable[Sample]]:
    """`read` for other threads: it runs on the event loop, which owns what it looks at."""

    async def look() -> Iterable[Sample]:
        return read()

    return lambda: asyncio.run_coroutine_threadsafe(look(), loop).result(_ANSWER_S)


@asynccontextmanager
async def serving_metrics(listen: str, port: int, registry: CollectorRegistry) -> AsyncIterator[None]:
    """Serves `registry` at /metrics, on the host of `listen`, until the end of the block.

    Raises ConfigError when nobody can listen there.
    """
    if port == NO_METRICS:
        yield
        return
    server = _bind(metrics_host(listen), port, registry)
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True)
    thread.start()
    host = f"[{server.server_name}]" if ":" in server.server_name else server.server_name
    log.info("metrics", address=f"{host}:{server.server_port}")
    try:
        yield
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()


def _app(registry: CollectorRegistry) -> "Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]":
    """The registry as a page; while nobody can be asked, at the very end of a process, an empty one."""
    page: Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]] = make_wsgi_app(registry)

    def app(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        try:
            return page(environ, start_response)
        except (RuntimeError, TimeoutError, CancelledError):
            start_response("503 Service Unavailable", [])
            return [b""]

    return app


def _bind(host: str, port: int, registry: CollectorRegistry) -> ThreadingWSGIServer:
    kind = _Server6 if ":" in host else _Server
    try:
        return make_server(host, port, _app(registry), kind, _QuietHandler)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            problem = f"port {port} on {host} is in use; choose another"
        else:
            problem = f"cannot listen on {host}, port {port}: {os.strerror(error.errno or 0)}"
        raise ConfigError(f"--metrics-port: {problem}, 0 for any that is free, or -1 for none") from error
