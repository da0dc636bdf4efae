"""The owner's side of a hand-over: turns a lease into messages, for whichever transport carries them."""

from collections.abc import AsyncGenerator, Callable, Sequence

from kvtransfer.block_store import BlockStore
from kvtransfer.chunks import (
    MAX_CHUNK_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_REFERENCES,
    ChunkMessage,
    KvChunk,
    KvReference,
    LeaseState,
    PullEnd,
    ReferenceMessage,
)
from kvtransfer.leases import Lease, LeaseTable
from kvtransfer.offer import MemoryOffer
from paceline.core.block_hash import BlockHash
from paceline.core.errors import KvLostError
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.request import BootEpoch, LeaseId, SequenceId


class KVSender:
    """Serves the leases of one worker in one of its lives; whoever names another life gets nothing.

    `offer` says how others may read the blocks themselves; without it they ask for the bytes. `on_read` is called when somebody is about
    to.
    """

    def __init__(
        self,
        leases: LeaseTable,
        store: BlockStore,
        fingerprint: ModelFingerprint,
        boot_epoch: BootEpoch,
        *,
        offer: MemoryOffer | None = None,
        on_read: Callable[[], None] = lambda: None,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._leases = leases
        self._store = store
        self._fingerprint = fingerprint
        self._boot_epoch = boot_epoch
        self._offer = offer or MemoryOffer(num_blocks=0, block_bytes=store.block_bytes)
        self._on_read = on_read
        self._max_chunk_bytes = max_chunk_bytes
        self._max_message_bytes = max_message_bytes

    async def pull(
        self,
        lease_id: LeaseId,
        boot_epoch: BootEpoch,
        fingerprint: ModelFingerprint,
        held_hashes: Sequence[BlockHash],
    ) -> AsyncGenerator[ChunkMessage, None]:
        """The blocks after the held ones in pieces, in order, of those that are computed as much as fits at a time; then the end.

        A piece is a view of the pool, good until the loop runs again. May be asked again for the same lease. Raises KvError or
        FingerprintMismatchError.
        """
        lease = self._open(lease_id, boot_epoch, fingerprint, held_hashes)
        ordinal, offset = len(held_hashes), 0
        while ordinal < lease.num_blocks:
            await self._leases.wait_ready(lease, ordinal)
            pieces = self._pieces(lease, ordinal, offset)
            yield pieces
            ordinal, offset = self._behind(pieces[-1])
        yield PullEnd(await self._leases.wait_complete(lease))

    async def pull_references(
        self,
        lease_id: LeaseId,
        boot_epoch: BootEpoch,
        fingerprint: ModelFingerprint,
        held_hashes: Sequence[BlockHash],
    ) -> AsyncGenerator[ReferenceMessage, None]:
        """Like `pull`, but says where the blocks lie, of all that are computed at a time. It names them only while the lease holds.

        What was read is right if the lease then still holds: who reads has it released, and hears whether it did.
        """
        lease = self._open(lease_id, boot_epoch, fingerprint, held_hashes)
        ordinal = len(held_hashes)
        while ordinal < lease.num_blocks:
            await self._leases.wait_ready(lease, ordinal)
            self._on_read()
            references = _references(lease, ordinal)
            yield references
            ordinal += len(references)
        yield PullEnd(await self._leases.wait_complete(lease))

    def describe(self, boot_epoch: BootEpoch) -> MemoryOffer:
        """How the blocks may be read; raises KvLostError for another life."""
        self._require_epoch(boot_epoch)
        return self._offer

    def renew(self, lease_ids: Sequence[LeaseId], boot_epoch: BootEpoch) -> list[LeaseState]:
        """Keeps leases alive."""
        if boot_epoch != self._boot_epoch:
            return [LeaseState.EXPIRED] * len(lease_ids)
        return self._leases.renew(lease_ids)

    def release(self, lease_ids: Sequence[LeaseId], boot_epoch: BootEpoch) -> list[LeaseState]:
        """Ends leases."""
        if boot_epoch != self._boot_epoch:
            return [LeaseState.EXPIRED] * len(lease_ids)
        return self._leases.release(lease_ids)

    def release_sequence(self, sequence_id: SequenceId, boot_epoch: BootEpoch) -> None:
        """Ends the lease of a sequence, if there is one."""
        if boot_epoch == self._boot_epoch:
            self._leases.release_sequence(sequence_id)

    def _open(
        self,
        lease_id: LeaseId,
        boot_epoch: BootEpoch,
        fingerprint: ModelFingerprint,
        held_hashes: Sequence[BlockHash],
    ) -> Lease:
        self._require_epoch(boot_epoch)
        self._fingerprint.require_same_content(fingerprint)
        lease = self._leases.get(lease_id)
        if lease.block_hashes[: len(held_hashes)] != tuple(held_hashes):
            raise KvLostError("the held blocks are not the first blocks of this lease")
        return lease

    def _require_epoch(self, boot_epoch: BootEpoch) -> None:
        if boot_epoch != self._boot_epoch:
            raise KvLostError("the worker that granted this lease has restarted since; prefill again")

    def _pieces(self, lease: Lease, ordinal: int, offset: int) -> tuple[KvChunk, ...]:
        """From there on, of what is computed, as many as a message holds; one at least."""
        # Asked and, by whoever takes them, copied in one step: the reader may have kept us waiting, and a block that is not held
        # any more may already be another request's.
        self._leases.require_held(lease)
        pieces: list[KvChunk] = []
        num_bytes = 0
        while ordinal < len(lease.ready):
            piece = self._piece(lease, ordinal, offset)
            num_bytes += len(piece.data)
            if pieces and num_bytes > self._max_message_bytes:
                break
            pieces.append(piece)
            ordinal, offset = self._behind(piece)
        return tuple(pieces)

    def _piece(self, lease: Lease, ordinal: int, offset: int) -> KvChunk:
        block = lease.ready[ordinal]
        data = self._store.read(block.block_id)[offset : offset + self._max_chunk_bytes]
        return KvChunk(ordinal, offset, data, block.checksum)

    def _behind(self, piece: KvChunk) -> tuple[int, int]:
        """Block and offset where the next piece begins."""
        end = piece.offset + len(piece.data)
        return (piece.ordinal, end) if end < self._store.block_bytes else (piece.ordinal + 1, 0)


def _references(lease: Lease, first: int) -> tuple[KvReference, ...]:
    """From ordinal `first` on, as many as are ready and fit into a message."""
    ready = lease.ready[first : first + MAX_REFERENCES]
    return tuple(
        KvReference(ordinal, block.block_id, block.checksum) for ordinal, block in enumerate(ready, first)
    )
