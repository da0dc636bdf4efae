"""Sends one client its responses, and gives up a client that takes none of them for too long. It knows nothing of what they say."""

import asyncio
from types import TracebackType
from typing import Protocol, Self

import grpc

from paceline.core.errors import SlowConsumerError
from paceline.v1 import inference_pb2


class Writer(Protocol):
    """Where responses go: a gRPC call."""

    async def write(self, message: inference_pb2.GenerateResponse) -> None:
        """Returns when there is room for the next one; that may be never."""


class Sender:
    """Of the task that makes it. A client that reads nothing lets its writes wait, and with them all that its request holds.

    One timer a request looks whether the same write has waited since it looked last: a timer for each would cost as much as the write.
    """

    def __init__(self, writer: Writer, patience_s: float) -> None:
        self._writer = writer
        self._patience_s = patience_s
        task = asyncio.current_task()
        assert task is not None, "a handler is a task"
        self._task = task
        self._num_begun = self._num_ended = 0
        self._num_seen = 0
        self._is_given_up = False
        self._timer = asyncio.get_running_loop().call_later(patience_s, self._look)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    async def send(self, response: inference_pb2.GenerateResponse) -> None:
        """Sends the next one. Raises SlowConsumerError when the client takes nothing for once to twice its patience."""
        self._num_begun += 1
        try:
            await self._writer.write(response)
        except asyncio.CancelledError:
            if self._is_given_up and self._task.uncancel() == 0:
                raise SlowConsumerError(
                    "the client takes nothing of its answer; read it, or ask for less", retry_after_s=1
                ) from None
            raise
        except grpc.aio.InternalError:
            # The client has left: the write hears of it before our task does.
            raise asyncio.CancelledError from None
        self._num_ended += 1

    def _look(self) -> None:
        is_waiting = self._num_begun > self._num_ended
        if is_waiting and self._num_seen == self._num_begun:
            self._is_given_up = True
            self._task.cancel()
            return
        self._num_seen = self._num_begun if is_waiting else 0
        self._timer = asyncio.get_running_loop().call_later(self._patience_s, self._look)
