"""DecodeService: one stream with a router, over which all its sequences come and all their tokens go."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from decode_service.session import DecodeSession
from paceline.v1 import decode_pb2, decode_pb2_grpc
from paceline.worker.worker import Worker


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Serves one decode worker; each stream has a session of its own."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def Decode(
        self,
        request_iterator: AsyncIterator[decode_pb2.DecodeRequest],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        """Takes sequences and gives tokens until the stream breaks; then everything it brought is given up."""
        session = DecodeSession(self._worker)
        reader = asyncio.create_task(_read(session, request_iterator))
        # However the reading ends, by the router or by a bug of ours, the stream ends too.
        reader.add_done_callback(lambda _: session.end())
        try:
            while events := await session.take_events():
                yield decode_pb2.DecodeResponse(events=events)
            await reader
        finally:
            reader.cancel()
            await session.aclose()


async def _read(session: DecodeSession, requests: AsyncIterator[decode_pb2.DecodeRequest]) -> None:
    async for request in requests:
        if request.WhichOneof("command") == "submit":
            session.submit(request.submit)
        else:
            session.cancel(request.cancel)
