"""The owner's side of a hand-over: turns a lease into messages, for whichever transport carries them."""

from collections.abc import AsyncGenerator, Sequence

from kvtransfer.block_store import BlockStore
from kvtransfer.chunks import (
    MAX_CHUNK_BYTES,
    MAX_REFERENCES,
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
from paceline.core.ticket import ReadyBlock


class KVSender:
    """Serves the leases of one worker in one of its lives; whoever names another life gets nothing.

    `offer` says how others may read the blocks themselves; without it they ask for the bytes.
    """

    def __init__(
        self,
        leases: LeaseTable,
        store: BlockStore,
        fingerprint: ModelFingerprint,
        boot_epoch: BootEpoch,
        *,
        offer: MemoryOffer | None = None,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
    ) -> None:
        self._leases = leases
        self._store = store
        self._fingerprint = fingerprint
        self._boot_epoch = boot_epoch
        self._offer = offer or MemoryOffer(num_blocks=0, block_bytes=store.block_bytes)
        self._max_chunk_bytes = max_chunk_bytes

    async def pull(
        self,
        lease_id: LeaseId,
        boot_epoch: BootEpoch,
        fingerprint: ModelFingerprint,
        held_hashes: Sequence[BlockHash],
    ) -> AsyncGenerator[KvChunk | PullEnd, None]:
        """The blocks after the held ones, in order, each as soon as it is computed; then the end.

        A piece is a view of the pool, good until the loop runs again. May be asked again for the same lease. Raises KvError or
        FingerprintMismatchError.
        """
        lease = self._open(lease_id, boot_epoch, fingerprint, held_hashes)
        for ordinal in range(len(held_hashes), lease.num_blocks):
            block = await self._leases.wait_ready(lease, ordinal)
            for offset in range(0, self._store.block_bytes, self._max_chunk_bytes):
                yield self._chunk(lease, ordinal, offset, block)
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

    def _chunk(self, lease: Lease, ordinal: int, offset: int, block: ReadyBlock) -> KvChunk:
        # Asked and, by whoever takes it, copied in one step: the reader may have kept us waiting since the last chunk, and a
        # block that is not held any more may already be another request's.
        self._leases.require_held(lease)
        content = self._store.read(block.block_id)
        return KvChunk(ordinal, offset, content[offset : offset + self._max_chunk_bytes], block.checksum)


def _references(lease: Lease, first: int) -> tuple[KvReference, ...]:
    """From ordinal `first` on, as many as are ready and fit into a message."""
    ready = lease.ready[first : first + MAX_REFERENCES]
    return tuple(
        KvReference(ordinal, block.block_id, block.checksum) for ordinal, block in enumerate(ready, first)
    )
