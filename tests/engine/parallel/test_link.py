"""The line between two processes of a worker."""

import socket
import threading
from collections.abc import Iterator

import pytest

from paceline.core.errors import EngineFailedError
from paceline.engine.parallel.link import Link

Ends = tuple[Link, Link]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Rank 0's and rank 1's."""
    sockets = socket.socketpair()
    with sockets[0], sockets[1]:
        yield Link(sockets[0], "rank 1"), Link(sockets[1], "rank 0")


def test_messages_come_whole_and_in_order(ends: Ends) -> None:
    """However long they are, the empty one too."""
    messages = [b"", b"a", bytes(range(256)) * 5000, b"z"]

    def send() -> None:
        for message in messages:
            ends[0].send(message)

    thread = threading.Thread(target=send)
    thread.start()
    assert [ends[1].receive() for _ in messages] == messages
    thread.join()


def test_who_listens_hears_that_the_other_end_is_gone(ends: Ends) -> None:
    """At once, and whatever was sent before comes first."""
    ends[0].send(b"last")
    ends[0].close()
    assert ends[1].receive() == b"last"
    with pytest.raises(EngineFailedError, match="rank 0 is lost"):
        ends[1].receive()


def test_who_speaks_hears_it_too(ends: Ends) -> None:
    """A process that is gone takes nothing."""
    ends[1].close()
    with pytest.raises(EngineFailedError, match="rank 1 is lost"):
        ends[0].send(b"message")


def test_silence_ends(ends: Ends) -> None:
    """Who waits for an answer waits as long as it has said."""
    with pytest.raises(EngineFailedError, match="rank 1 is silent"):
        ends[0].receive(timeout_s=0.001)


def test_who_does_not_read_keeps_nobody_waiting_for_ever(ends: Ends) -> None:
    """A process that hangs takes a message or two into its buffer, and no more."""
    with pytest.raises(EngineFailedError, match="rank 1 is silent"):
        ends[0].send(bytes(64 << 20), timeout_s=0.001)
