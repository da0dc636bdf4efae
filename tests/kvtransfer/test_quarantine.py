"""Blocks that an engine may still write to are nobody else's, however the hand-over has ended."""

import asyncio

import pytest

from kvtransfer.receiver import KVReceiver
from kvtransfer.transports.base import KVTransport
from kvtransfer.transports.late import LateTransport
from paceline.core.errors import KvError
from paceline.core.kv_layout import BlockId
from tests.kvtransfer.hand_over import FINGERPRINT, INTO, Owner, contents, random_store
from tests.virtual_time import in_virtual_time, virtual_clock


class Bench:
    """An owner of three blocks, and an engine that takes 10 s for each."""

    def __init__(self, *, write_s: float = 10.0) -> None:
        self.owner = Owner(virtual_clock)
        self.lease = self.owner.granted([5, 1, 7])
        self.computed = contents(self.owner.store, self.owner.blocks_of(self.lease))
        self.store = random_store(2)
        self.transport: KVTransport = LateTransport(
            self.owner.sender, FINGERPRINT, self.owner.store, self.store, write_s=write_s
        )
        self.receiver = KVReceiver(self.transport, self.store, FINGERPRINT)
        self.settled_s: list[float] = []

    def receiving(self) -> asyncio.Task[object]:
        """A hand-over under way."""
        return asyncio.create_task(self.receiver.receive(self.owner.ticket(self.lease), INTO[:3], 0))

    def watch(self) -> None:
        """Notes when the blocks are settled."""
        self.receiver.when_settled(INTO[:3], lambda: self.settled_s.append(virtual_clock()))


@in_virtual_time
async def test_what_was_received_is_settled() -> None:
    """After a success the blocks are the receiver's alone."""
    bench = Bench()
    await bench.receiving()
    assert contents(bench.store, INTO[:3]) == bench.computed
    bench.watch()
    assert bench.settled_s == [30.0]


@in_virtual_time
async def test_a_cancelled_hand_over_is_over_at_once_and_settled_later() -> None:
    """The lease is given back and the caller told within the same moment; the engine writes on, and then no more."""
    bench = Bench()
    receiving = bench.receiving()
    await asyncio.sleep(15)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    assert virtual_clock() == 15
    assert bench.owner.ended == [bench.lease.sequence_id]
    before = contents(bench.store, INTO[:3])
    bench.watch()
    assert bench.settled_s == []
    await asyncio.sleep(60)
    assert bench.settled_s == [30.0]
    assert contents(bench.store, INTO[:3]) != before, "it was still writing"
    after = contents(bench.store, INTO[:3])
    await asyncio.sleep(60)
    assert contents(bench.store, INTO[:3]) == after


@in_virtual_time
async def test_a_stalled_engine_is_kv_lost_before_it_has_settled() -> None:
    """An engine that hangs does not keep the request waiting, only its blocks."""
    bench = Bench(write_s=1000.0)
    with pytest.raises(KvError):
        await bench.receiving()
    assert virtual_clock() == pytest.approx(15 * 20)
    bench.watch()
    await asyncio.sleep(5000)
    assert bench.settled_s == [3000.0]


@in_virtual_time
async def test_other_blocks_are_not_waited_for() -> None:
    """Each hand-over has its own."""
    bench = Bench()
    receiving = bench.receiving()
    await asyncio.sleep(5)
    assert bench.transport.settling([BlockId(0), BlockId(1)]) is None
    assert bench.transport.settling([BlockId(0), INTO[2]]) is not None
    await receiving


@in_virtual_time
async def test_waiting_for_it_outlasts_a_cancel() -> None:
    """Whoever waits knows in the end that nothing writes any more, cancelled meanwhile or not."""
    bench = Bench()
    receiving = bench.receiving()
    await asyncio.sleep(15)
    receiving.cancel()
    await asyncio.wait({receiving})
    waiting = asyncio.create_task(bench.receiver.until_settled(INTO[:3]))
    await asyncio.sleep(1)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert (virtual_clock(), waiting.cancelled()) == (30, True)
    await bench.receiver.until_settled(INTO[:3])
    assert virtual_clock() == 30
