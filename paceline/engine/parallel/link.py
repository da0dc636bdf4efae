"""A stream of messages between two processes of one worker, over a socket pair that nobody else can reach."""

import socket
import struct

from paceline.core.errors import EngineFailedError

_LENGTH = struct.Struct("<I")


class Link:
    """One end. Raises EngineFailedError when the other end is closed, as it is when its process has died, or silent for too long.

    `name` is what errors call the other end.
    """

    def __init__(self, end: socket.socket, name: str) -> None:
        self._end = end
        self._name = name

    def send(self, message: bytes, *, timeout_s: float | None = None) -> None:
        """Returns when the other end has it, or will have it."""
        self._end.settimeout(timeout_s)
        try:
            self._end.sendall(_LENGTH.pack(len(message)) + message)
        except OSError as error:
            raise self._lost(error) from error

    def receive(self, *, timeout_s: float | None = None) -> bytes:
        """The next message."""
        self._end.settimeout(timeout_s)
        try:
            (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
            return bytes(self._take(length))
        except OSError as error:
            raise self._lost(error) from error

    def close(self) -> None:
        """The other end hears of it."""
        self._end.close()

    def _take(self, length: int) -> bytearray:
        data = bytearray(length)
        rest = memoryview(data)
        while rest:
            num_bytes = self._end.recv_into(rest)
            if not num_bytes:
                raise ConnectionResetError("its end of the link is closed")
            rest = rest[num_bytes:]
        return data

    def _lost(self, error: OSError) -> EngineFailedError:
        what = "is silent" if isinstance(error, TimeoutError) else f"is lost ({error})"
        return EngineFailedError(f"{self._name} {what}; see the worker's log")
