"""Hundreds of bad days: hand-overs under random faults end right, or cleanly failed."""

import asyncio
import random
from dataclasses import dataclass

import pytest

from kvtransfer.leases import Lease, sweep_forever
from kvtransfer.receiver import KVReceiver
from kvtransfer.transports.base import KVTransport
from kvtransfer.transports.faulty import FaultyTransport, random_faults
from kvtransfer.transports.late import LateTransport
from kvtransfer.transports.local import LocalTransport
from paceline.core.errors import KvError
from paceline.core.kv_layout import BlockId
from tests.kvtransfer.hand_over import (
    BLOCK_BYTES,
    FINGERPRINT,
    FIRST_TOKENS,
    NUM_POOL_BLOCKS,
    Owner,
    contents,
    random_store,
)
from tests.virtual_time import run_in_virtual_time, virtual_clock

NUM_SCHEDULES = 400


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the hand-overs of one schedule ended."""

    num_right: int
    num_failed: int


class Day:
    """One schedule: an owner, a receiver, and two hand-overs at a time, each with faults of its own."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.owner = Owner(virtual_clock, ttl_s=10, max_chunk_bytes=self.rng.choice([16, 48, BLOCK_BYTES]))
        self.store = random_store(2)
        self.unreserved = [BlockId(index) for index in range(NUM_POOL_BLOCKS)]
        self.rng.shuffle(self.unreserved)
        self.unleased = list(range(NUM_POOL_BLOCKS))

    async def run(self) -> Outcome:
        """Lives through the schedule and what comes after it."""
        sweeper = asyncio.create_task(sweep_forever(self.owner.leases))
        hand_overs = [HandOver(self, index) for index in range(2)]
        others = contents(self.store, self.unreserved)
        are_right = await asyncio.gather(*(hand_over.run() for hand_over in hand_overs))
        after = contents(self.store, [BlockId(index) for index in range(NUM_POOL_BLOCKS)])
        await asyncio.sleep(300)
        assert contents(self.store, [BlockId(index) for index in range(NUM_POOL_BLOCKS)]) == after
        assert contents(self.store, self.unreserved) == others
        self._assert_every_lease_ended_once()
        sweeper.cancel()
        return Outcome(sum(are_right), len(are_right) - sum(are_right))

    def _assert_every_lease_ended_once(self) -> None:
        self.owner.leases.check_invariants()
        stats = self.owner.leases.stats()
        assert (stats.num_active, stats.num_granted) == (0, 2)
        assert len(self.owner.ended) == len(set(self.owner.ended)) == 2


class HandOver:
    """A prefill, its receiver, and perhaps somebody who cancels."""

    def __init__(self, day: Day, index: int) -> None:
        self.owner, self.store, self.rng = day.owner, day.store, day.rng
        num_blocks = self.rng.randint(1, 6)
        num_full = num_blocks - self.rng.randint(0, 1)
        self.num_held = self.rng.randint(0, num_full)
        self.lease = self.owner.grant([day.unleased.pop() for _ in range(num_blocks)], num_full=num_full)
        self.block_ids = [day.unreserved.pop() for _ in range(num_blocks)]
        self.computed = contents(self.owner.store, self.owner.blocks_of(self.lease))
        self.held = contents(self.store, self.block_ids[: self.num_held])
        faults = random_faults(2 * day.seed + index, num_messages=num_blocks + 2)
        self.receiver = KVReceiver(FaultyTransport(self._transport(), faults), self.store, FINGERPRINT)

    def _transport(self) -> KVTransport:
        """One that leaves the writing to the receiver, or one that does it itself, and slowly."""
        sender = self.owner.sender
        if self.rng.random() < 0.5:
            return LocalTransport(sender, FINGERPRINT)
        write_s = self.rng.uniform(0, 4)
        return LateTransport(sender, FINGERPRINT, self.owner.store, self.store, write_s=write_s)

    async def run(self) -> bool:
        """Whether the hand-over succeeded; it is asserted that it then is right."""
        prefill = asyncio.create_task(_prefill(self.owner, self.lease, self.rng))
        receiving = asyncio.create_task(
            self.receiver.receive(self.owner.ticket(self.lease), self.block_ids, self.num_held)
        )
        if self.rng.random() < 0.1:
            asyncio.get_running_loop().call_later(self.rng.uniform(0, 20), receiving.cancel)
        try:
            received = await receiving
        except (KvError, asyncio.CancelledError):
            await self.receiver.until_settled(self.block_ids)
            return False
        finally:
            await prefill
        assert received.first_tokens == FIRST_TOKENS
        assert contents(self.store, self.block_ids) == self.held + self.computed[self.num_held :]
        return True


async def _prefill(owner: Owner, lease: Lease, rng: random.Random) -> None:
    """Computes block by block, and fails now and then."""
    fails_at = rng.randint(0, lease.num_blocks) if rng.random() < 0.1 else None
    for ordinal in range(lease.num_blocks):
        await asyncio.sleep(rng.uniform(0, 3))
        if ordinal == fails_at or lease.first_tokens:
            break
        owner.compute(lease, 1)
    else:
        owner.leases.complete(lease.lease_id, FIRST_TOKENS)
    owner.leases.drop(lease.lease_id)


@pytest.mark.parametrize("seed", range(NUM_SCHEDULES))
def test_a_hand_over_under_faults_is_right_or_cleanly_failed(seed: int) -> None:
    """Right bytes or a KvError; no other block written, not even later; none at all once settled; every lease ended exactly once."""
    run_in_virtual_time(Day(seed).run())


def test_the_schedules_show_both_ends() -> None:
    """The schedules are neither harmless nor hopeless: many hand-overs succeed, and many fail."""
    outcomes = [run_in_virtual_time(Day(seed).run()) for seed in range(100)]
    assert sum(outcome.num_right for outcome in outcomes) > 40
    assert sum(outcome.num_failed for outcome in outcomes) > 40


@pytest.mark.slow
def test_ten_thousand_schedules() -> None:
    """The same for ten thousand more."""
    for seed in range(NUM_SCHEDULES, NUM_SCHEDULES + 10_000):
        run_in_virtual_time(Day(seed).run())
