"""What only an engine that writes in place can get wrong, with a real one and an owner in another process."""

import asyncio
import os
import secrets
import signal

import pytest

from benchmarks.kv_owner import FINGERPRINT
from benchmarks.kv_transports import Owner, running_owner
from kvtransfer.block_store import MemoryBlockStore
from kvtransfer.receiver import KVReceiver, ReceivedKv
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.negotiated import NegotiatedTransport
from kvtransfer.transports.nixl import Nixl
from paceline.core.kv_layout import BlockId

pytest.importorskip("nixl_cu12", reason="NIXL is an optional extra, and is not installed")

NUM_BLOCKS, BLOCK_BYTES = 128, 256 << 10
INTO = [BlockId(index) for index in range(NUM_BLOCKS)]


class Receiver:
    """A worker without a model."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.store = MemoryBlockStore(NUM_BLOCKS, BLOCK_BYTES)
        self.grpc = GrpcTransport(owner.channels, FINGERPRINT)
        name = f"receiver-{secrets.token_hex(8)}"
        self.nixl = Nixl.open(name, self.store.pool, BLOCK_BYTES, self.grpc, lambda: False)
        self.transport = NegotiatedTransport(self.grpc, [self.nixl])
        self.receiver = KVReceiver(self.transport, self.store, FINGERPRINT)

    async def receive(self) -> ReceivedKv:
        """All blocks."""
        return await self.receiver.receive(await self.owner.lease(NUM_BLOCKS), INTO, 0)

    async def until_writing(self) -> None:
        """Returns when the engine is at work."""
        async with asyncio.timeout(20):
            while not len(self.nixl._in_flight):  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the kernel's copies between processes, which are done before one can look."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_blocks_of_a_stopped_owner_are_settled_when_it_dies(number: signal.Signals) -> None:
    """While it is stopped its bytes may still come, and the blocks are nobody's; then the engine says that it has failed."""
    async with running_owner(NUM_BLOCKS, BLOCK_BYTES) as owner:
        receiver = Receiver(owner)
        assert (await receiver.receive()).num_blocks == NUM_BLOCKS
        receiving = asyncio.create_task(receiver.receive())
        await receiver.until_writing()
        os.kill(owner.pid, signal.SIGSTOP)
        receiving.cancel()
        await asyncio.wait({receiving})
        settling = receiver.transport.settling(INTO)
        assert settling is not None
        for _ in range(50):
            await asyncio.sleep(0)
        assert not settling.done()
        os.kill(owner.pid, number)
        os.kill(owner.pid, signal.SIGCONT)
        async with asyncio.timeout(60):
            await settling
        assert receiver.transport.settling(INTO) is None
        after = bytes(receiver.store.pool.buffer)
        for _ in range(50):
            receiver.nixl._agent.get_new_notifs()
        assert bytes(receiver.store.pool.buffer) == after
        await receiver.transport.aclose()


async def test_an_owner_that_goes_on_can_be_pulled_from_again() -> None:
    """A hand-over that was given up leaves nothing behind that the next one would stumble over."""
    async with running_owner(NUM_BLOCKS, BLOCK_BYTES) as owner:
        receiver = Receiver(owner)
        for _ in range(5):
            receiving = asyncio.create_task(receiver.receive())
            await receiver.until_writing()
            receiving.cancel()
            await asyncio.wait({receiving})
            await receiver.receiver.until_settled(INTO)
            assert (await receiver.receive()).num_blocks == NUM_BLOCKS
        assert receiver.transport.stats()["nixl"].num_ended == 5
        assert receiver.transport.num_fallbacks == 0
        await receiver.transport.aclose()
