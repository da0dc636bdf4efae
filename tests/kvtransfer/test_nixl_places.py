"""Where an engine that writes in place is sent: looked at before, since it asks nobody. It needs no NIXL."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.chunks import KvReference, PullEnd, ReferenceMessage
from kvtransfer.offer import MemoryOffer, NixlOffer
from kvtransfer.sender import KVSender
from kvtransfer.transports.base import TransportBrokenError
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.nixl import Nixl
from paceline.core.clock import Clock, ManualClock
from paceline.core.kv_layout import BlockId
from tests.kvtransfer.hand_over import BLOCK_BYTES, FINGERPRINT, INTO, NUM_POOL_BLOCKS, HookedStore, Owner

Lie = Callable[[KvReference], KvReference]
LIES: dict[str, Lie] = {
    "a place that is held": lambda block: replace(block, ordinal=block.ordinal - 1),
    "a later place": lambda block: replace(block, ordinal=block.ordinal + 1),
    "a place that there is not": lambda block: replace(block, ordinal=99),
    "a block that there is not": lambda block: replace(block, block_id=BlockId(NUM_POOL_BLOCKS)),
}


class Agent:
    """An engine that is not there; it must not be asked to write."""

    name = "nobody"
    num_transfers = 0

    def register_memory(self, *_: object) -> None:
        """Takes anything."""

    def deregister_memory(self, _: object) -> None:
        """Forgets it."""

    def get_agent_metadata(self) -> bytes:
        """Nothing."""
        return b""

    def add_remote_agent(self, _: bytes) -> None:
        """Reaches everybody."""

    def get_new_notifs(self) -> None:
        """Hears nothing."""

    def get_xfer_descs(self, places: object, _: str) -> object:
        """As they are."""
        return places

    def initialize_xfer(self, *_: object) -> Any:
        """Would begin to write."""
        self.num_transfers += 1
        raise AssertionError("asked to write")


class LyingSender(KVSender):
    """Names other blocks, or other places, than it was asked for."""

    lie: Lie

    async def pull_references(self, *args: Any) -> AsyncGenerator[ReferenceMessage, None]:
        """See KVSender.pull_references."""
        async with aclosing(super().pull_references(*args)) as messages:
            async for message in messages:
                yield message if isinstance(message, PullEnd) else tuple(map(self.lie, message))


class LyingOwner(Owner):
    """Has such a sender."""

    sender: LyingSender

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.sender = LyingSender(self.leases, self.store, FINGERPRINT, self.boot_epoch)


@pytest.fixture
def owner(clock: ManualClock) -> LyingOwner:
    """Whom the server of the other fixtures serves."""
    return LyingOwner(clock)


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_an_engine_is_sent_to_the_next_places_only(
    lie: Lie, owner: LyingOwner, store: HookedStore, grpc_transport: GrpcTransport
) -> None:
    """An owner that names another place gets nothing written: a held block is read by others already."""
    owner.sender.lie = lie
    agent = Agent()
    nixl = Nixl(agent, store.pool, BLOCK_BYTES, grpc_transport, lambda: False)
    offer = MemoryOffer(NUM_POOL_BLOCKS, BLOCK_BYTES, nixl=NixlOffer("owner", b"", 0))
    lease = owner.granted([5, 6, 7])
    pull = nixl.connect(offer).pull(owner.ticket(lease), lease.block_hashes[:1], INTO[:3])
    with pytest.raises(TransportBrokenError, match="names block"):
        async with aclosing(pull) as messages:
            await anext(messages)
    assert agent.num_transfers == 0
    await nixl.aclose()
