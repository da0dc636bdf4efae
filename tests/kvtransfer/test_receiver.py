"""All blocks of a hand-over arrive as they left, or none of them counts."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import pytest

from kvtransfer.chunks import KvChunk, KvMessage, LeaseState, PullEnd
from kvtransfer.receiver import HandOverTimes, KVReceiver, ReceivedKv
from kvtransfer.transports.base import KVTransport
from kvtransfer.transports.faulty import Fault, FaultKind, FaultyTransport
from kvtransfer.transports.late import LateTransport
from kvtransfer.transports.local import LocalTransport
from paceline.core.block_hash import BlockHash
from paceline.core.errors import (
    FingerprintMismatchError,
    KvChecksumError,
    KvError,
    KvLostError,
    LeaseExpiredError,
)
from paceline.core.kv_layout import BlockId
from paceline.core.request import BootEpoch
from paceline.core.ticket import KvTicket
from tests.kvtransfer.hand_over import (
    BLOCK_BYTES,
    FINGERPRINT,
    FIRST_TOKENS,
    NUM_POOL_BLOCKS,
    Owner,
    ScriptedTransport,
    contents,
    random_store,
)
from tests.virtual_time import in_virtual_time, virtual_clock

POOL = [BlockId(index) for index in range(NUM_POOL_BLOCKS)]
# Where the tests receive; every other block of the pool is somebody else's.
RESERVED = [BlockId(12), BlockId(3), BlockId(8)]
OTHERS = [block_id for block_id in POOL if block_id not in RESERVED]


class Bench:
    """An owner with one complete lease of three blocks, the last of them partial, and a receiver."""

    def __init__(self, *faults: Fault, ttl_s: float = 30.0, in_place: bool = False) -> None:
        self.owner = Owner(virtual_clock, ttl_s=ttl_s)
        self.lease = self.owner.granted([5, 1, 7], num_full=2)
        self.ticket = self.owner.ticket(self.lease)
        self.computed = contents(self.owner.store, self.owner.blocks_of(self.lease))
        self.store = random_store(2)
        self.before = contents(self.store, POOL)
        self.local = LocalTransport(self.owner.sender, FINGERPRINT)
        late = LateTransport(self.owner.sender, FINGERPRINT, self.owner.store, self.store)
        self.transport: KVTransport = FaultyTransport(late if in_place else self.local, faults)
        self.receiver = KVReceiver(self.transport, self.store, FINGERPRINT)

    async def receive(self, *, num_held: int = 0) -> ReceivedKv:
        """The hand-over into the reserved blocks."""
        return await self.receiver.receive(self.ticket, RESERVED, num_held)

    def assert_others_untouched(self) -> None:
        """Nothing outside of the reserved blocks was written."""
        assert contents(self.store, OTHERS) == [self.before[block_id] for block_id in OTHERS]

    def assert_given_back(self) -> None:
        """The owner's blocks are free again, and were freed once."""
        assert self.owner.ended == [self.lease.sequence_id]


@in_virtual_time
async def test_a_prompt_is_handed_over_whole() -> None:
    """Every block arrives in its place, the first token comes along, and the owner's blocks are free."""
    bench = Bench()
    received = await bench.receive()
    assert received == ReceivedKv(FIRST_TOKENS, num_blocks=3, num_bytes=3 * BLOCK_BYTES)
    assert contents(bench.store, RESERVED) == bench.computed
    bench.assert_others_untouched()
    bench.assert_given_back()
    assert bench.owner.leases.stats().num_late_releases == 0


@in_virtual_time
async def test_a_fault_counts_once_it_has_happened() -> None:
    """One that is planned for a message that never comes does not, nor one that changes nothing."""
    bench = Bench()
    end, behind = 6, 7
    faults = [Fault(FaultKind.DELAY, 0, 1.0), Fault(FaultKind.REORDER, end), Fault(FaultKind.CORRUPT, behind)]
    transport = FaultyTransport(bench.local, faults)
    await KVReceiver(transport, bench.store, FINGERPRINT).receive(bench.ticket, RESERVED, 0)
    assert +transport.struck == {FaultKind.DELAY: 1}


@in_virtual_time
async def test_held_blocks_are_neither_pulled_nor_written() -> None:
    """What the receiver has stays as it is; only the rest moves."""
    bench = Bench()
    received = await bench.receive(num_held=2)
    assert (received.num_blocks, received.num_bytes) == (1, BLOCK_BYTES)
    assert contents(bench.store, RESERVED[2:]) == bench.computed[2:]
    assert contents(bench.store, RESERVED[:2]) == [bench.before[block_id] for block_id in RESERVED[:2]]


@in_virtual_time
async def test_another_fingerprint_is_refused_before_any_byte_moves() -> None:
    """The error names the field, nothing is written, and the owner gets its blocks back."""
    bench = Bench()
    bench.ticket = replace(bench.ticket, fingerprint=replace(FINGERPRINT, dtype="bfloat16"))
    with pytest.raises(FingerprintMismatchError) as caught:
        await bench.receive()
    assert caught.value.field == "dtype"
    assert contents(bench.store, POOL) == bench.before
    bench.assert_given_back()


@in_virtual_time
async def test_a_lease_that_expires_during_a_slow_read_is_not_a_success() -> None:
    """All bytes and the end arrived, but after the lease was over: LEASE_EXPIRED, although every byte is right."""
    late_end = Fault(FaultKind.DELAY, at=6, delay_s=15)
    bench = Bench(late_end, Fault(FaultKind.LOSE_RENEWALS), ttl_s=10)
    with pytest.raises(LeaseExpiredError):
        await bench.receive()
    assert contents(bench.store, RESERVED) == bench.computed
    bench.assert_given_back()


@in_virtual_time
async def test_a_release_that_is_not_valid_is_not_a_success() -> None:
    """The receiver commits on VALID alone, whatever arrived."""
    bench = Bench()
    messages = [message async for message in bench.local.pull(bench.ticket, [], RESERVED)]
    receiver = KVReceiver(ScriptedTransport(messages, state=LeaseState.EXPIRED), bench.store, FINGERPRINT)
    with pytest.raises(LeaseExpiredError):
        await receiver.receive(bench.ticket, RESERVED, 0)


@pytest.mark.parametrize("kind", [FaultKind.LOSE_RELEASE, FaultKind.LOSE_RELEASE_ANSWER])
@in_virtual_time
async def test_a_lost_answer_to_the_release_is_kv_lost(kind: FaultKind) -> None:
    """Who was not told VALID cannot know that what it read was still the prompt's."""
    with pytest.raises(KvLostError):
        await Bench(Fault(kind)).receive()


@in_virtual_time
async def test_renewals_keep_a_lease_through_a_slow_hand_over() -> None:
    """A hand-over that takes longer than a lease succeeds as long as blocks keep coming."""
    bench = Bench(*(Fault(FaultKind.DELAY, at=index, delay_s=15) for index in range(7)))
    await bench.receive()
    assert virtual_clock() == pytest.approx(7 * 15)
    assert contents(bench.store, RESERVED) == bench.computed


@in_virtual_time
async def test_a_lease_is_kept_alive_while_there_is_no_room_for_its_blocks() -> None:
    """A receiver may wait for room as long as it likes, and pull then."""
    bench = Bench()
    async with bench.receiver.hold(bench.ticket) as hand_over:
        await asyncio.sleep(300)
        await hand_over.receive(RESERVED, 0)
    assert contents(bench.store, RESERVED) == bench.computed
    bench.assert_given_back()
    assert bench.owner.leases.stats().num_late_releases == 0


@in_virtual_time
async def test_a_lease_is_given_back_when_its_receiver_leaves_before_there_is_room() -> None:
    """A request that is cancelled while it waits for room frees the owner's blocks at once."""
    bench = Bench()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(7), bench.receiver.hold(bench.ticket):
            await asyncio.sleep(300)
    assert virtual_clock() == pytest.approx(7)
    bench.assert_given_back()


@in_virtual_time
async def test_a_held_lease_that_nobody_reads_is_given_back() -> None:
    """A receiver that finds it needs nothing leaves nothing behind either."""
    bench = Bench()
    async with bench.receiver.hold(bench.ticket):
        pass
    bench.assert_given_back()


@in_virtual_time
async def test_renewals_stop_with_the_hand_over() -> None:
    """After a hand-over nobody renews: its tasks are gone."""
    bench = Bench(Fault(FaultKind.LOSE_RENEWALS))
    await bench.receive()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@in_virtual_time
async def test_a_stall_is_kv_lost() -> None:
    """When nothing comes for too many stall time-outs the receiver gives up, though the owner answers."""
    bench = Bench(Fault(FaultKind.STALL, at=3))
    with pytest.raises(KvLostError):
        await bench.receive()
    assert virtual_clock() == pytest.approx(15 * 20)
    bench.assert_given_back()


@in_virtual_time
async def test_a_stall_of_an_owner_that_is_gone_is_kv_lost_at_once() -> None:
    """When nothing comes and the owner does not answer either, one stall time-out is enough."""
    bench = Bench(Fault(FaultKind.STALL, at=3), Fault(FaultKind.LOSE_RENEWALS))
    with pytest.raises(KvLostError):
        await bench.receive()
    assert virtual_clock() < 20 + 5
    bench.assert_given_back()


@in_virtual_time
async def test_a_chunk_that_waits_behind_others_is_no_stall() -> None:
    """While the owner answers, a block may take longer than the stall time-out."""
    bench = Bench(Fault(FaultKind.DELAY, at=3, delay_s=70.0))
    received = await bench.receive()
    assert received.num_blocks == 3


@in_virtual_time
async def test_a_prefill_that_computes_slowly_is_no_stall() -> None:
    """The clock of the stall starts anew with each message."""
    bench = Bench()
    lease = bench.owner.grant([2, 4, 6])
    receiving = asyncio.create_task(bench.receiver.receive(bench.owner.ticket(lease), RESERVED, 0))
    for _ in range(3):
        await asyncio.sleep(19)
        bench.owner.compute(lease, 1)
    await asyncio.sleep(19)
    bench.owner.finish(lease)
    received = await receiving
    assert received.num_blocks == 3


DAMAGE = [
    FaultKind.CUT,
    FaultKind.BREAK,
    FaultKind.BREAK_WAY,
    FaultKind.DROP,
    FaultKind.DUPLICATE,
    FaultKind.REORDER,
    FaultKind.TRUNCATE,
    FaultKind.CORRUPT,
    FaultKind.MISPLACE,
]


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("at", range(3))
@in_virtual_time
async def test_a_damaged_word_of_an_engine_fails_the_whole_hand_over(kind: FaultKind, at: int) -> None:
    """The same of blocks that are written in place: what is said of them must be the next one, whole, and as it was computed."""
    bench = Bench(Fault(kind, at=at), in_place=True)
    with pytest.raises(KvError):
        await bench.receive()
    bench.assert_others_untouched()
    bench.assert_given_back()


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("at", range(6))
@in_virtual_time
async def test_a_damaged_piece_fails_the_whole_hand_over(kind: FaultKind, at: int) -> None:
    """Whatever happens to whichever piece ends in a KvError; no other block is touched, and the lease is given back."""
    bench = Bench(Fault(kind, at=at))
    with pytest.raises(KvError):
        await bench.receive()
    bench.assert_others_untouched()
    bench.assert_given_back()


def _piece(ordinal: int, offset: int, num_bytes: int) -> KvChunk:
    return KvChunk(ordinal, offset, bytes(num_bytes), checksum=0)


@pytest.mark.parametrize(
    "piece",
    [
        _piece(0, 0, BLOCK_BYTES + 1),
        _piece(0, 8, 8),
        _piece(1, 0, 8),
        _piece(3, 0, 8),
        _piece(2**32 - 1, 0, 8),
    ],
)
@in_virtual_time
async def test_a_piece_that_does_not_belong_is_not_written(piece: KvChunk) -> None:
    """Oversize, misplaced and unknown pieces are KV_LOST, and no byte of them reaches any block."""
    bench = Bench()
    receiver = KVReceiver(ScriptedTransport([piece]), bench.store, FINGERPRINT)
    with pytest.raises(KvLostError):
        await receiver.receive(bench.ticket, RESERVED, 0)
    assert contents(bench.store, POOL) == bench.before


@pytest.mark.parametrize(
    "messages",
    [
        [_piece(0, 0, 40), _piece(0, 40, 40)],
        [_piece(0, 0, 8), _piece(1, 0, 8)],
        [_piece(0, 0, 8), _piece(0, 0, 8)],
        [PullEnd(FIRST_TOKENS)],
        [],
    ],
)
@in_virtual_time
async def test_pieces_that_do_not_fit_together_are_refused(messages: Sequence[KvMessage]) -> None:
    """Pieces that overlap, skip or repeat bytes, or end too early, are KV_LOST, and stay out of other blocks."""
    bench = Bench()
    receiver = KVReceiver(ScriptedTransport(messages), bench.store, FINGERPRINT)
    with pytest.raises(KvLostError):
        await receiver.receive(bench.ticket, RESERVED, 0)
    bench.assert_others_untouched()


@in_virtual_time
async def test_an_empty_piece_is_refused() -> None:
    """A peer that sends nothing, again and again, does not look alive."""
    bench = Bench()
    messages = [message async for message in bench.local.pull(bench.ticket, [], RESERVED)]
    receiver = KVReceiver(ScriptedTransport([_piece(0, 0, 0), *messages]), bench.store, FINGERPRINT)
    with pytest.raises(KvLostError):
        await receiver.receive(bench.ticket, RESERVED, 0)


@in_virtual_time
async def test_a_piece_after_the_last_block_is_refused() -> None:
    """More blocks than the ticket names are KV_LOST."""
    bench = Bench()
    messages = [message async for message in bench.local.pull(bench.ticket, [], RESERVED)]
    extra = [*messages[:-1], _piece(3, 0, 8), messages[-1]]
    receiver = KVReceiver(ScriptedTransport(extra), bench.store, FINGERPRINT)
    with pytest.raises(KvLostError):
        await receiver.receive(bench.ticket, RESERVED, 0)
    bench.assert_others_untouched()


@in_virtual_time
async def test_a_block_is_checked_as_it_lies_in_the_store() -> None:
    """A block that somebody else overwrites while its last pieces are on the way does not pass."""
    bench = Bench(Fault(FaultKind.DELAY, at=1, delay_s=10))
    receiving = asyncio.create_task(bench.receive())
    await asyncio.sleep(5)
    bench.store.write(RESERVED[0], 0, b"somebody else")
    with pytest.raises(KvChecksumError) as caught:
        await receiving
    assert caught.value.ordinal == 0


@in_virtual_time
async def test_a_ticket_of_a_dead_owner_is_kv_lost() -> None:
    """A ticket from before the owner's restart gives nothing, and frees nothing in its new life."""
    bench = Bench()
    bench.ticket = replace(bench.ticket, boot_epoch=BootEpoch(10))
    with pytest.raises(KvLostError):
        await bench.receive()
    assert bench.owner.ended == []


@in_virtual_time
async def test_a_cancelled_hand_over_gives_the_lease_back_and_writes_no_more() -> None:
    """After a cancel the owner's blocks are free at once, and the reserved ones are the caller's again."""
    bench = Bench(Fault(FaultKind.DELAY, at=3, delay_s=10))
    receiving = asyncio.create_task(bench.receive())
    await asyncio.sleep(5)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    bench.assert_given_back()
    after = contents(bench.store, POOL)
    await asyncio.sleep(60)
    assert contents(bench.store, POOL) == after
    assert asyncio.all_tasks() == {asyncio.current_task()}


@in_virtual_time
async def test_a_second_cancel_does_not_lose_the_release() -> None:
    """A receiver that is cancelled again while it gives the lease back ends at once, and the lease ends too."""
    bench = Bench(Fault(FaultKind.STALL, at=3))
    bench.receiver = KVReceiver(_SlowRelease(bench.transport), bench.store, FINGERPRINT)
    receiving = asyncio.create_task(bench.receive())
    await asyncio.sleep(5)
    receiving.cancel()
    await asyncio.sleep(0.5)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    assert bench.owner.ended == []
    await asyncio.sleep(1)
    bench.assert_given_back()


@in_virtual_time
async def test_a_receiver_that_reaches_nobody_still_comes_back() -> None:
    """With an owner that never answers, giving the lease back is not waited for, and the first error is the one raised."""
    bench = Bench(Fault(FaultKind.CORRUPT, at=1))
    bench.receiver = KVReceiver(_SlowRelease(bench.transport, delay_s=1e6), bench.store, FINGERPRINT)
    with pytest.raises(KvChecksumError):
        await bench.receive()
    assert virtual_clock() == pytest.approx(0.2)


@in_virtual_time
async def test_an_owner_that_never_answers_the_release_is_kv_lost() -> None:
    """Waiting for VALID is bounded too."""
    bench = Bench()
    bench.receiver = KVReceiver(_SlowRelease(bench.transport, delay_s=1e6), bench.store, FINGERPRINT)
    with pytest.raises(KvLostError):
        await bench.receive()


class _SlowRelease(FaultyTransport):
    """Passes releases on a little later."""

    def __init__(self, next_transport: KVTransport, *, delay_s: float = 1.0) -> None:
        super().__init__(next_transport, ())
        self._delay_s = delay_s

    async def release(self, ticket: KvTicket) -> LeaseState:
        await asyncio.sleep(self._delay_s)
        return await super().release(ticket)


class _Frozen:
    """An owner that is stopped in the middle: no message, no answer, no end of the connection."""

    async def pull(
        self, ticket: KvTicket, held_hashes: Sequence[BlockHash], into: Sequence[BlockId]
    ) -> AsyncGenerator[KvMessage, None]:
        """Nothing comes."""
        await asyncio.Event().wait()
        yield PullEnd(())

    def settling(self, into: Sequence[BlockId]) -> None:
        """It writes nothing itself."""

    async def renew(self, tickets: Sequence[KvTicket]) -> list[LeaseState]:
        """No answer."""
        await asyncio.sleep(600)
        raise AssertionError

    async def release(self, ticket: KvTicket) -> LeaseState:
        """No answer."""
        await asyncio.sleep(600)
        raise AssertionError


@in_virtual_time
async def test_a_loan_of_a_frozen_owner_costs_the_second_that_it_is_given() -> None:
    """Whoever could compute the blocks itself asks a silent owner no further questions, and waits for no thanks."""
    owner = Owner(virtual_clock)
    times = HandOverTimes(stall_timeout_s=1.0, max_stalls=1)
    receiver = KVReceiver(_Frozen(), random_store(2), FINGERPRINT, times)
    begin_s = virtual_clock()
    with pytest.raises(KvLostError):
        await receiver.receive(owner.ticket(owner.granted([1, 2])), POOL[:2], 0)
    assert virtual_clock() - begin_s == pytest.approx(1.0, abs=0.5)
