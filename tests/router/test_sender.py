"""What becomes of a client that does not take what it is sent."""

import asyncio

import pytest

from paceline.core.errors import SlowConsumerError
from paceline.v1 import inference_pb2
from router.sender import Sender
from tests.virtual_time import in_virtual_time, virtual_clock

RESPONSE = inference_pb2.GenerateResponse()


class Client:
    """Takes each message so many seconds after it was sent."""

    def __init__(self, *delays_s: float) -> None:
        self._delays_s = list(delays_s)
        self.num_taken = 0

    async def write(self, message: inference_pb2.GenerateResponse) -> None:
        """See Writer."""
        await asyncio.sleep(self._delays_s.pop(0))
        self.num_taken += 1


@in_virtual_time
async def test_a_client_that_takes_something_now_and_then_hears_everything() -> None:
    """However slow it is, and however long the pauses between messages are."""
    client = Client(0.0, 9.9, 9.9, 9.9, 0.0)
    with Sender(client, 10.0) as sender:
        for _ in range(5):
            await asyncio.sleep(25.0)
            await sender.send(RESPONSE)
    assert client.num_taken == 5


@in_virtual_time
async def test_a_client_that_takes_nothing_is_given_up() -> None:
    """After once to twice the time that it is given, whenever in its stream that is; the task goes on with the error."""
    for pause_s in (0.0, 3.0, 9.9):
        begin_s = virtual_clock()
        with Sender(Client(0.0, 1e6), 10.0) as sender:
            await sender.send(RESPONSE)
            await asyncio.sleep(pause_s)
            with pytest.raises(SlowConsumerError):
                await sender.send(RESPONSE)
        assert 10.0 <= virtual_clock() - begin_s - pause_s <= 20.0
        await asyncio.sleep(1.0)


@in_virtual_time
async def test_a_client_that_leaves_has_left() -> None:
    """A cancel from outside stays one, also in the moment in which the client is given up."""
    for wait_s in (5.0, 20.0):
        sending = asyncio.create_task(_send_to(Client(1e6)))
        await asyncio.sleep(wait_s)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending


async def _send_to(client: Client) -> None:
    with Sender(client, 10.0) as sender:
        await sender.send(RESPONSE)


@in_virtual_time
async def test_nothing_is_looked_at_after_the_end() -> None:
    """The timer ends with the block: a minute later nobody is cancelled, whatever the task does then."""
    with Sender(Client(0.0), 10.0) as sender:
        await sender.send(RESPONSE)
    await asyncio.sleep(60.0)
