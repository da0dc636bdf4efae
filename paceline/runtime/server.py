"""A gRPC server as all our services run it: health, reflection, keepalive, a drain on SIGTERM.

It knows no service; what it serves is added by the caller.
"""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from paceline.core.errors import ConfigError, PacelineError
from paceline.runtime.channels import KEEPALIVE_OPTIONS
from paceline.runtime.log import get_logger, on_unhandled

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_LIVENESS = "liveness"
MAX_METADATA_BYTES = 16 << 10

log = get_logger()


class GrpcServer:
    """A server on one address; not serving until told so. With `credentials` it speaks TLS, and `interceptors` see each call first.

    What can also be reached at `plain_listen` is the same, without TLS.
    """

    def __init__(
        self,
        listen: str,
        *,
        max_receive_bytes: int = 4 << 20,
        credentials: grpc.ServerCredentials | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        plain_listen: str = "",
    ) -> None:
        options = (
            *KEEPALIVE_OPTIONS,
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            # Of a message as it is written, and again of what it is once it is decompressed.
            ("grpc.max_receive_message_length", max_receive_bytes),
            # All metadata of a call together. The two apart would refuse what lies between them by chance.
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
            # Without this two servers can share one port, and each gets half of the calls.
            ("grpc.so_reuseport", 0),
        )
        self.listen = listen
        self._plain_listen = plain_listen
        self._credentials = credentials
        self.grpc = grpc.aio.server(options=options, interceptors=tuple(interceptors))
        self._health = HealthServicer()
        self._services: tuple[str, ...] = ()

    async def start(self, services: Iterable[str]) -> None:
        """Binds and starts; `services` are full names for health and reflection. Raises ConfigError on a busy port."""
        self._services = tuple(services)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        names = (*self._services, reflection.SERVICE_NAME, "grpc.health.v1.Health")
        reflection.enable_server_reflection(names, self.grpc)
        await self.set_serving(serving=False)
        await self._health.set(_LIVENESS, _SERVING)
        self._bind(self.listen, self._credentials)
        if self._plain_listen:
            self._bind(self._plain_listen, None)
        await self.grpc.start()

    def _bind(self, address: str, credentials: grpc.ServerCredentials | None) -> None:
        try:
            if credentials is None:
                self.grpc.add_insecure_port(address)
            else:
                self.grpc.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: is the port in use? choose another") from error

    async def set_serving(self, *, serving: bool) -> None:
        """What readiness says: for the whole server ("") and for each service."""
        status = _SERVING if serving else _NOT_SERVING
        for name in ("", *self._services):
            await self._health.set(name, status)

    async def set_dead(self) -> None:
        """What liveness says once the process cannot make progress any more."""
        await self._health.set(_LIVENESS, _NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Takes no new call, waits up to `grace_s` seconds for those under way, then ends them."""
        await self.set_serving(serving=False)
        await self.grpc.stop(grace_s)


def run_service(main: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Runs `main` until it returns; its event is set by SIGTERM or SIGINT. Gives the exit status.

    An error of ours ends the process with one line on stderr and status 1.
    """
    try:
        asyncio.run(_with_signals(main))
    except PacelineError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


async def _with_signals(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(on_unhandled)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await main(stop)
