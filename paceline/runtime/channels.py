"""One gRPC channel for each address, made once and used by every call to it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar, cast

import grpc

from paceline.runtime.membership import Membership

# A call may be silent for long (a prefill of thousands of tokens); pings tell a slow peer from a dead one.
KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Its default of a minute would win over the line above.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
# A worker that comes back is found again within a second.
_RECONNECT_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

_Response = TypeVar("_Response")


class Channels:
    """Channels by address (`host:port` or `unix:/path`), closed together. Their calls prove membership in the cluster."""

    def __init__(self, membership: Membership | None = None) -> None:
        self._membership = membership or Membership()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._retired: list[grpc.aio.Channel] = []

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to `address`; connecting happens at the first call. Raises PeerLostError, see Membership.open_channel."""
        if address not in self._channels:
            options = (*KEEPALIVE_OPTIONS, *_RECONNECT_OPTIONS)
            self._channels[address] = self._membership.open_channel(address, options)
        return self._channels[address]

    def renew(self) -> None:
        """Who asks from now on gets new channels, with the certificates of now. Calls under way go on over the old ones."""
        self._retired += self._channels.values()
        self._channels = {}

    async def drop(self, address: str) -> None:
        """Closes the channel to an address where nobody is any more; calls under way end as cancelled."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close()

    async def aclose(self) -> None:
        """Closes every channel; calls under way end as cancelled."""
        channels = [*self._channels.values(), *self._retired]
        self._channels, self._retired = {}, []
        await asyncio.gather(*(channel.close() for channel in channels))


def responses_of(
    call: "grpc.aio.UnaryStreamCall[Any, _Response]",
) -> "aclosing[AsyncGenerator[_Response, None]]":
    """A call's responses, for an `async with` around their reader, who may leave before their end.

    gRPC gives them by a generator; one that is only left wakes the event loop and has a task made to be closed.
    """
    return aclosing(cast("AsyncGenerator[_Response, None]", aiter(call)))
