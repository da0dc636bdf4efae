"""Blocks cut in one way become blocks cut in another, byte for byte, against a token-by-token description of both."""

from collections.abc import AsyncGenerator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.block_store import MemoryBlockStore
from kvtransfer.chunks import KvMessage, KvWritten, LeaseState
from kvtransfer.conversion import BlockConversion
from kvtransfer.landing import ConvertingLanding
from kvtransfer.leases import LeaseTable
from kvtransfer.receiver import KVReceiver
from kvtransfer.sender import KVSender
from kvtransfer.transports.faulty import Fault, FaultKind, FaultyTransport
from kvtransfer.transports.local import LocalTransport
from paceline.core.block_hash import BlockHash
from paceline.core.errors import FingerprintMismatchError, KvChecksumError, KvLostError
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.kv_layout import ALL_HEADS, BlockId, HeadPart, KVLayout, LayerKV
from paceline.core.request import BootEpoch, WorkerId
from paceline.core.ticket import KvTicket, ReadyBlock
from tests.factories import make_fingerprint, make_id
from tests.kvtransfer.cuts import each_place, filled, layout_of, require_tokens
from tests.kvtransfer.hand_over import FIRST_TOKENS, block_hashes

PARTS = [ALL_HEADS, HeadPart(0, 2), HeadPart(1, 2)]


@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    num_tokens=st.integers(1, 40),
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "int4"]),
    data=st.data(),
)
def test_every_token_that_is_not_held_lies_where_it_belongs(
    sizes: tuple[int, int], num_tokens: int, dtype: str, data: st.DataObject
) -> None:
    """Whatever the two block sizes, the type, and the parts of the heads: and nothing else is touched."""
    theirs, ours = (layout_of(size, dtype, data.draw(st.sampled_from(PARTS))) for size in sizes)
    num_held = data.draw(st.integers(0, num_tokens // ours.block_size)) * ours.block_size
    source = filled(theirs, num_tokens)
    num_blocks = -(-num_tokens // ours.block_size)
    target, block_ids = (
        MemoryBlockStore(num_blocks + 1, ours.block_bytes),
        [BlockId(i + 1) for i in range(num_blocks)],
    )
    conversion = BlockConversion(theirs, ours)
    for ordinal in range(conversion.num_their_blocks_held(num_held), -(-num_tokens // theirs.block_size)):
        conversion.write(ordinal, source.read(BlockId(ordinal)), target, block_ids, num_held)
    assert bytes(target.read(BlockId(0))) == bytes(ours.block_bytes)
    for token in range(num_tokens):
        ordinal, slot = divmod(token, ours.block_size)
        block = target.read(block_ids[ordinal])
        theirs_has = {data for _, data in each_place(theirs, 0, token)}
        for offset, expected in each_place(ours, slot, token):
            comes = token >= num_held and expected in theirs_has
            assert bytes(block[offset : offset + len(expected)]) == (
                expected if comes else bytes(len(expected))
            )


@pytest.mark.parametrize("block_sizes", [(8, 16), (16, 8), (16, 16)])
def test_two_halves_of_the_heads_make_a_whole(block_sizes: tuple[int, int]) -> None:
    """Two workers that hold half of the heads each fill the blocks of one that holds all; and one fills those of two."""
    whole = layout_of(block_sizes[0])
    halves = [layout_of(block_sizes[1], part=HeadPart(index, 2)) for index in range(2)]
    num_tokens = 37
    joined = MemoryBlockStore(-(-num_tokens // whole.block_size), whole.block_bytes)
    ids = [BlockId(i) for i in range(-(-num_tokens // whole.block_size))]
    for half in halves:
        source = filled(half, num_tokens)
        for ordinal in range(-(-num_tokens // half.block_size)):
            BlockConversion(half, whole).write(ordinal, source.read(BlockId(ordinal)), joined, ids, 0)
    require_tokens(joined, whole, num_tokens)
    for half in halves:
        part = MemoryBlockStore(-(-num_tokens // half.block_size), half.block_bytes)
        part_ids = [BlockId(i) for i in range(-(-num_tokens // half.block_size))]
        for ordinal in ids:
            BlockConversion(whole, half).write(ordinal, joined.read(ordinal), part, part_ids, 0)
        require_tokens(part, half, num_tokens)


@pytest.mark.parametrize(
    ("change", "name"),
    [({"block_size": 8}, "block_size"), ({"kv_part": "1/2"}, "kv_part"), ({"kv_part": "all"}, "kv_part")],
)
def test_blocks_that_cannot_be_converted_are_refused(change: dict[str, str | int], name: str) -> None:
    """With windows, since which blocks of one somebody needs depends on where they begin; and heads that do not divide."""
    windowed = KVLayout((LayerKV(3, 8, 8, window=6), LayerKV(3, 8, 8)), 16, "float32")
    theirs = make_fingerprint(**{"block_size": 16, "kv_layout": windowed.digest(), **change})
    with pytest.raises(FingerprintMismatchError, match=name):
        BlockConversion.between(theirs, windowed)
    with pytest.raises(FingerprintMismatchError, match="kv_part"):
        BlockConversion.between(
            make_fingerprint(block_size=16, kv_part="1/2"), KVLayout((LayerKV(3, 8, 8),), 16, "float32")
        )


def test_blocks_that_are_cut_alike_need_no_conversion() -> None:
    """Also of a model with windows."""
    windowed = KVLayout((LayerKV(3, 8, 8, window=6), LayerKV(3, 8, 8)), 16, "float32")
    assert BlockConversion.between(make_fingerprint(block_size=16), windowed) is None


# -- through a receiver


class CutOwner:
    """A worker with one computed prompt, in blocks of its own cut."""

    def __init__(self, name: str, layout: KVLayout, num_tokens: int) -> None:
        self.fingerprint = make_fingerprint(
            block_size=layout.block_size,
            kv_dtype=layout.dtype,
            kv_layout=layout.digest(),
            kv_part=str(layout.part),
        )
        store, num_blocks = filled(layout, num_tokens), -(-num_tokens // layout.block_size)
        self.leases = LeaseTable(lambda _: None)
        sender = KVSender(self.leases, store, self.fingerprint, BootEpoch(1), max_chunk_bytes=50)
        hashes = block_hashes(num_tokens // layout.block_size)
        lease = self.leases.grant(make_id(name), num_blocks, hashes)
        ready = [ReadyBlock(BlockId(i), store.checksum(BlockId(i))) for i in range(num_blocks)]
        self.leases.progress(lease.lease_id, ready)
        self.leases.complete(lease.lease_id, FIRST_TOKENS)
        self.ticket = KvTicket(
            lease.lease_id, WorkerId(name), name, BootEpoch(1), self.fingerprint, hashes, num_blocks
        )
        self.sender = sender


class ByOwner:
    """Asks the owner that the ticket names, as a worker with a certain fingerprint."""

    def __init__(
        self, fingerprint: ModelFingerprint, *owners: CutOwner, faults: Sequence[Fault] = ()
    ) -> None:
        self._owners = {
            owner.ticket.owner_address: FaultyTransport(LocalTransport(owner.sender, fingerprint), faults)
            for owner in owners
        }

    def pull(
        self, ticket: KvTicket, held_hashes: Sequence[BlockHash], into: Sequence[BlockId]
    ) -> AsyncGenerator[KvMessage, None]:
        """See KVTransport."""
        return self._owners[ticket.owner_address].pull(ticket, held_hashes, into)

    def settling(self, into: Sequence[BlockId]) -> None:
        """See KVTransport."""

    async def renew(self, tickets: Sequence[KvTicket]) -> list[LeaseState]:
        """See KVTransport."""
        return await self._owners[tickets[0].owner_address].renew(tickets)

    async def release(self, ticket: KvTicket) -> LeaseState:
        """See KVTransport."""
        return await self._owners[ticket.owner_address].release(ticket)


class CutReceiver:
    """A worker that receives into blocks of its own cut, all but the first of its pool."""

    def __init__(
        self, layout: KVLayout, num_tokens: int, *owners: CutOwner, faults: Sequence[Fault] = ()
    ) -> None:
        self.layout, self.num_tokens = layout, num_tokens
        num_blocks = -(-num_tokens // layout.block_size)
        self.store = MemoryBlockStore(num_blocks, layout.block_bytes)
        self.block_ids = [BlockId(i) for i in range(num_blocks)]
        fingerprint = make_fingerprint(
            block_size=layout.block_size,
            kv_dtype=layout.dtype,
            kv_layout=layout.digest(),
            kv_part=str(layout.part),
        )
        transport = ByOwner(fingerprint, *owners, faults=faults)
        self.receiver = KVReceiver(transport, self.store, fingerprint, layout=layout)

    def hold(self, num_blocks: int) -> None:
        """It has the first blocks already."""
        whole = filled(self.layout, self.num_tokens)
        for block_id in self.block_ids[:num_blocks]:
            self.store.write(block_id, 0, whole.read(block_id))


@pytest.mark.parametrize("num_held_tokens", [0, 8, 16, 48])
@pytest.mark.parametrize("sizes", [(8, 16), (16, 8), (6, 4), (16, 16)])
async def test_a_hand_over_between_block_sizes(sizes: tuple[int, int], num_held_tokens: int) -> None:
    """All tokens arrive where they belong, and what the receiver has in whole blocks of the owner's does not travel."""
    theirs, ours = (layout_of(size) for size in sizes)
    owner = CutOwner("owner", theirs, 51)
    receiver = CutReceiver(ours, 51, owner)
    num_held = num_held_tokens // ours.block_size
    receiver.hold(num_held)
    received = await receiver.receiver.receive(owner.ticket, receiver.block_ids, num_held)
    require_tokens(receiver.store, ours, 51)
    assert received.first_tokens == FIRST_TOKENS
    num_travelled = owner.ticket.num_blocks - num_held * ours.block_size // theirs.block_size
    assert (received.num_blocks, received.num_bytes) == (num_travelled, num_travelled * theirs.block_bytes)
    assert owner.leases.stats().num_released == 1


@pytest.mark.parametrize("sizes", [(16, 16), (8, 16)])
async def test_hand_overs_between_parts_of_the_heads(sizes: tuple[int, int]) -> None:
    """A worker with half of the heads takes its half from one with all; one with all takes both halves, or refuses one alone."""
    whole, half = layout_of(sizes[0]), layout_of(sizes[1], part=HeadPart(1, 2))
    owner = CutOwner("whole", whole, 30)
    receiver = CutReceiver(half, 30, owner)
    await receiver.receiver.receive(owner.ticket, receiver.block_ids, 0)
    require_tokens(receiver.store, half, 30)
    owners = [CutOwner(f"half {i}", layout_of(sizes[1], part=HeadPart(i, 2)), 30) for i in range(2)]
    joining = CutReceiver(whole, 30, *owners)
    with pytest.raises(FingerprintMismatchError, match="kv_part"):
        await joining.receiver.receive(owners[0].ticket, joining.block_ids, 0)
    owners = [CutOwner(f"half {i}", layout_of(sizes[1], part=HeadPart(i, 2)), 30) for i in range(2)]
    joining = CutReceiver(whole, 30, *owners)
    await joining.receiver.receive_parts([each.ticket for each in owners], joining.block_ids, 0)
    require_tokens(joining.store, whole, 30)
    assert [each.leases.stats().num_active for each in owners] == [0, 0]


async def test_another_type_is_refused_and_named() -> None:
    """Keys and values in 8 bits are other numbers: nothing is asked for, and the owner has its blocks back."""
    owner = CutOwner("owner", layout_of(16, "int8"), 20)
    receiver = CutReceiver(layout_of(8), 20, owner)
    with pytest.raises(FingerprintMismatchError, match="kv_dtype differs: float32 here, int8 there"):
        await receiver.receiver.receive(owner.ticket, receiver.block_ids, 0)
    assert owner.leases.stats().num_active == 0


async def test_a_damaged_block_is_not_converted() -> None:
    """It is checked before anything of it is written among ours."""
    owner = CutOwner("owner", layout_of(16), 40)
    receiver = CutReceiver(layout_of(8), 40, owner, faults=[Fault(FaultKind.CORRUPT, 0)])
    with pytest.raises(KvChecksumError):
        await receiver.receiver.receive(owner.ticket, receiver.block_ids, 0)
    assert all(not any(receiver.store.read(block_id)) for block_id in receiver.block_ids)


def test_a_block_that_was_written_in_place_is_not_converted() -> None:
    """An engine puts it where a block of ours belongs."""
    conversion = BlockConversion(layout_of(8), layout_of(16))
    store = MemoryBlockStore(1, conversion.ours.block_bytes)
    landing = ConvertingLanding(conversion, store, [BlockId(0)], num_held=0, num_their_blocks=2)
    with pytest.raises(KvLostError):
        landing.take(KvWritten(0, conversion.theirs.block_bytes, 0))
