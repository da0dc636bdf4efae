"""What the tests of the hand-over share: an owner of leases, a place to receive, and transports that follow a script."""

import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from kvtransfer.block_store import MemoryBlockStore
from kvtransfer.chunks import KvChunk, KvMessage, KvWritten, LeaseState, PullEnd
from kvtransfer.leases import Lease, LeaseTable
from kvtransfer.offer import MemoryOffer
from kvtransfer.sender import KVSender
from kvtransfer.transports.base import KVTransport
from paceline.core.block_hash import BlockHash
from paceline.core.clock import Clock
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.kv_layout import BlockId
from paceline.core.request import BootEpoch, FirstToken, RequestId, SequenceId, WorkerId
from paceline.core.ticket import KvTicket, ReadyBlock

BLOCK_BYTES = 64
NUM_POOL_BLOCKS = 32
# Where tests that reserve nothing receive.
INTO = tuple(BlockId(30 - index) for index in range(8))
# Of two candidates.
FIRST_TOKENS = (FirstToken(7), FirstToken(8, candidate=2))
FINGERPRINT = ModelFingerprint(
    weights="w",
    tokenizer="t",
    chat_template="c",
    config="g",
    dtype="float32",
    block_size=4,
    kv_dtype="float32",
    kv_layout="l",
    kv_part="0/1",
    quantization="none",
    arithmetic="fast",
)


def block_hashes(num_blocks: int) -> tuple[BlockHash, ...]:
    """Names for blocks; their content does not matter to a hand-over."""
    return tuple(BlockHash(bytes([index]) * 16) for index in range(num_blocks))


def random_store(seed: int, *, block_bytes: int = BLOCK_BYTES) -> MemoryBlockStore:
    """A pool full of bytes that occur nowhere else."""
    store = MemoryBlockStore(NUM_POOL_BLOCKS, block_bytes)
    rng = random.Random(seed)
    for index in range(NUM_POOL_BLOCKS):
        store.write(BlockId(index), 0, rng.randbytes(block_bytes))
    return store


class HookedStore(MemoryBlockStore):
    """Calls `on_checksum` when a block is about to be checked."""

    on_checksum: Callable[[], None] | None = None

    def checksum(self, block_id: BlockId) -> int:
        """See BlockStore.checksum."""
        if self.on_checksum is not None:
            self.on_checksum()
        return super().checksum(block_id)


@dataclass(frozen=True, slots=True)
class Arrived:
    """A whole block, as it has come to the receiver."""

    ordinal: int
    content: bytes
    checksum: int


async def arrivals(
    transport: KVTransport, store: MemoryBlockStore, ticket: KvTicket, held: Sequence[BlockHash] = ()
) -> AsyncGenerator[Arrived | PullEnd, None]:
    """A pull block by block, whatever pieces it comes in. Transports that write in place do so in `store`, from INTO on."""
    into, content = INTO[: ticket.num_blocks], b""
    async with aclosing(transport.pull(ticket, held, into)) as messages:
        async for message in messages:
            match message:
                case PullEnd():
                    assert not content
                    yield message
                case KvWritten():
                    content = bytes(store.read(into[message.ordinal]))
                case KvChunk():
                    assert message.offset == len(content)
                    content += bytes(message.data)
            if not isinstance(message, PullEnd) and len(content) == store.block_bytes:
                yield Arrived(message.ordinal, content, message.checksum)
                content = b""


def contents(store: MemoryBlockStore, block_ids: Sequence[BlockId]) -> list[bytes]:
    """The bytes of some blocks."""
    return [bytes(store.read(block_id)) for block_id in block_ids]


class Owner:
    """A worker that has computed prompts. Blocks whose lease has ended are at once another request's."""

    def __init__(
        self, clock: Clock, *, ttl_s: float = 30.0, max_chunk_bytes: int = 32, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self.store = random_store(1, block_bytes=block_bytes)
        self.boot_epoch = BootEpoch(11)
        self.address = "nowhere"
        self.ended: list[SequenceId] = []
        self.leases = LeaseTable(self._on_end, ttl_s=ttl_s, clock=clock)
        self.sender = KVSender(
            self.leases,
            self.store,
            FINGERPRINT,
            self.boot_epoch,
            offer=MemoryOffer(NUM_POOL_BLOCKS, block_bytes, self.store.pool.offer),
            max_chunk_bytes=max_chunk_bytes,
        )
        self._blocks: dict[SequenceId, list[BlockId]] = {}

    def restart(self, boot_epoch: BootEpoch) -> None:
        """Another life of the process, as far as others can tell."""
        self.boot_epoch = self.sender._boot_epoch = boot_epoch

    def offer(self, offer: MemoryOffer | None) -> None:
        """What it says of its memory from now on; None: nobody may ask."""
        self.sender._offer = offer  # type: ignore[assignment] # None fails, and shall

    def grant(self, block_ids: Sequence[int], *, num_full: int | None = None) -> Lease:
        """An open lease on these blocks; all of them full unless told otherwise."""
        sequence_id = SequenceId(RequestId(f"request-{len(self._blocks)}"), 0)
        num_full = len(block_ids) if num_full is None else num_full
        self._blocks[sequence_id] = [BlockId(block_id) for block_id in block_ids]
        return self.leases.grant(sequence_id, len(block_ids), block_hashes(num_full))

    def blocks_of(self, lease: Lease) -> list[BlockId]:
        """The blocks under the lease, ready or not."""
        return self._blocks[lease.sequence_id]

    def compute(self, lease: Lease, num_blocks: int) -> None:
        """The next blocks are ready."""
        ready = self.blocks_of(lease)[len(lease.ready) : len(lease.ready) + num_blocks]
        blocks = [ReadyBlock(block_id, self.store.checksum(block_id)) for block_id in ready]
        self.leases.progress(lease.lease_id, blocks)

    def finish(self, lease: Lease) -> None:
        """All blocks are ready, and the first token is known."""
        self.compute(lease, lease.num_blocks - len(lease.ready))
        self.leases.complete(lease.lease_id, FIRST_TOKENS)

    def granted(self, block_ids: Sequence[int], *, num_full: int | None = None) -> Lease:
        """A complete lease."""
        lease = self.grant(block_ids, num_full=num_full)
        self.finish(lease)
        return lease

    def ticket(self, lease: Lease) -> KvTicket:
        """The right to pull the lease's blocks."""
        return KvTicket(
            lease_id=lease.lease_id,
            owner_id=WorkerId("prefill-0"),
            owner_address=self.address,
            boot_epoch=self.boot_epoch,
            fingerprint=FINGERPRINT,
            block_hashes=lease.block_hashes,
            num_blocks=lease.num_blocks,
        )

    def _on_end(self, sequence_id: SequenceId) -> None:
        self.ended.append(sequence_id)
        for block_id in self._blocks[sequence_id]:
            self.store.write(block_id, 0, b"\xee" * self.store.block_bytes)


class ScriptedTransport:
    """Sends what it is told to, and answers every renewal and release in one way."""

    def __init__(self, messages: Sequence[KvMessage], *, state: LeaseState = LeaseState.VALID) -> None:
        self._messages = messages
        self._state = state

    async def pull(
        self, ticket: KvTicket, held_hashes: Sequence[BlockHash], into: Sequence[BlockId]
    ) -> AsyncGenerator[KvMessage, None]:
        """The script's messages."""
        for message in self._messages:
            yield message

    def settling(self, into: Sequence[BlockId]) -> None:
        """It writes nothing itself."""

    async def renew(self, tickets: Sequence[KvTicket]) -> list[LeaseState]:
        """The script's answer."""
        return [self._state] * len(tickets)

    async def release(self, ticket: KvTicket) -> LeaseState:
        """The script's answer."""
        return self._state
