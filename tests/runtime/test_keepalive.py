"""Connections on which nothing is said: one that is well stays, and one whose other end is gone is found out, from both sides."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self

import grpc
import pytest

from benchmarks.chaos.relay import Relay
from paceline.client_channel import open_channel
from paceline.runtime.channels import Channels
from paceline.runtime.server import GrpcServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# gRPC ends a connection for the fifth ping that comes sooner than its server likes, which is after 80 s with ours.
LONG_S = 110.0
# A ping in 20 s, and 10 s for the answer.
FOUND_OUT_S = 40.0
# How a process of ours calls another one, and how a client calls a router.
CALLERS: dict[str, Callable[[str], grpc.aio.Channel]] = {
    "process": lambda address: Channels().get(address),
    "client": open_channel,
}


class Silent:
    """A server whose one method says a word and then nothing for long."""

    def __init__(self, address: str) -> None:
        self._server = GrpcServer(address)
        self.has_ended = asyncio.Event()
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(self._wait)
        self._server.grpc.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("Silent", {"Wait": handler}),)
        )

    async def __aenter__(self) -> Self:
        await self._server.start(["Silent"])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(grace_s=0)

    async def _wait(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        try:
            yield b"begun"
            await asyncio.sleep(LONG_S)
            yield b"done"
        finally:
            self.has_ended.set()


def wait_at(channel: grpc.aio.Channel) -> Any:
    """A call of the method."""
    method: Any = channel.unary_stream("/Silent/Wait")
    return method(b"")


async def said(channel: grpc.aio.Channel) -> list[bytes]:
    """All that the method says."""
    return [message async for message in wait_at(channel)]


async def test_a_call_may_be_silent_for_long(tmp_path: Path) -> None:
    """Nearly two minutes without a word, as in a long prefill: no side takes the other one's pings for an attack, or it for dead."""
    address = f"unix:{tmp_path / 'socket'}"
    async with Silent(address):
        channels = [open_channel(address) for open_channel in CALLERS.values()]
        answers = await asyncio.gather(*map(said, channels))
        for channel in channels:
            await channel.close()
    assert answers == [[b"begun", b"done"]] * len(CALLERS)


@pytest.mark.parametrize("caller", CALLERS)
async def test_a_peer_that_is_gone_without_a_word_is_found_out(tmp_path: Path, caller: str) -> None:
    """The caller hears UNAVAILABLE, and the server ends the handler, both within half a minute and some."""
    async with (
        Silent(f"unix:{tmp_path / 'server'}") as server,
        Relay(tmp_path / "relay", lambda: tmp_path / "server") as relay,
    ):
        channel = CALLERS[caller](f"unix:{tmp_path / 'relay'}")
        call = wait_at(channel)
        assert await call.read() == b"begun"
        relay.hold()
        async with asyncio.timeout(FOUND_OUT_S):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            await server.has_ended.wait()
        await channel.close()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
