"""The prefix table within one process: the twin of the Redis one for tests, the simulator and clusters without Redis."""

from collections.abc import Sequence

from paceline.core.block_hash import BlockHash
from paceline.core.kv_layout import BlockId
from paceline.core.prefix import PrefixEntry, WorkerKey
from paceline.core.request import BootEpoch, WorkerId
from paceline.prefix_index.index import IndexMode, IndexStats, Renewal
from paceline.prefix_index.matching import leading_blocks


class MemoryPrefixIndex:
    """Entries last until they are removed or the worker's next life overwrites them."""

    def __init__(self) -> None:
        self._holders: dict[BlockHash, dict[WorkerId, tuple[BootEpoch, BlockId]]] = {}
        self._num_lookups = 0

    @property
    def mode(self) -> IndexMode:
        """No other process sees this table."""
        return "none"

    async def publish(self, worker: WorkerKey, entries: Sequence[PrefixEntry]) -> bool:
        """The worker holds these blocks now."""
        for entry in entries:
            holders = self._holders.setdefault(entry.block_hash, {})
            holders[worker.worker_id] = (worker.boot_epoch, entry.block_id)
        return True

    async def remove(self, worker: WorkerKey, entries: Sequence[PrefixEntry]) -> bool:
        """The worker holds these blocks no more."""
        for entry in entries:
            holders = self._holders.get(entry.block_hash, {})
            if holders.get(worker.worker_id) == (worker.boot_epoch, entry.block_id):
                del holders[worker.worker_id]
            if not holders:
                self._holders.pop(entry.block_hash, None)
        return True

    async def renew(self, worker: WorkerKey) -> Renewal:  # noqa: ARG002 - a table's signature
        """Nothing is ever forgotten here."""
        return "known"

    async def lookup(self, hashes: Sequence[BlockHash]) -> dict[WorkerKey, int]:
        """How many leading blocks each worker holds."""
        self._num_lookups += 1
        return leading_blocks(self._keys(block_hash) for block_hash in hashes)

    async def aclose(self) -> None:
        """Forgets everything."""
        self._holders.clear()

    def stats(self) -> IndexStats:
        """Only look-ups can happen to it."""
        return IndexStats(num_lookups=self._num_lookups)

    def _keys(self, block_hash: BlockHash) -> set[WorkerKey]:
        holders = self._holders.get(block_hash, {})
        return {WorkerKey(worker_id, boot_epoch) for worker_id, (boot_epoch, _) in holders.items()}
