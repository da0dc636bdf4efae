"""Chains and workers for the tests of the prefix table."""

from collections.abc import Sequence

from paceline.core.block_hash import BlockHash, chain_root, hash_full_blocks
from paceline.core.kv_layout import BlockId
from paceline.core.prefix import PrefixEntry, WorkerKey
from paceline.core.request import BootEpoch, WorkerId

ANNE = WorkerKey(WorkerId("prefill-0"), BootEpoch(2**63 + 5))
BERT = WorkerKey(WorkerId("prefill-1"), BootEpoch(8))
ANNE_REBORN = WorkerKey(ANNE.worker_id, BootEpoch(9))


def chain(name: int, num_blocks: int) -> tuple[BlockHash, ...]:
    """The hashes of one prompt."""
    return hash_full_blocks(chain_root(b"model", ""), [name] * num_blocks, 1)


def entries(hashes: Sequence[BlockHash], *, first_block: int = 0) -> list[PrefixEntry]:
    """The whole chain in consecutive blocks of a worker."""
    return [
        PrefixEntry(block_hash, hashes[0], BlockId(first_block + index))
        for index, block_hash in enumerate(hashes)
    ]
