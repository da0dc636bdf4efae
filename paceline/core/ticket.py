"""The right to pull one computed prompt's blocks; it travels from the prefill worker over the router to decode."""

from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.block_hash import BlockHash
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.kv_layout import BlockId
from paceline.core.request import BootEpoch, LeaseId, WorkerId


@dataclass(frozen=True, slots=True)
class KvTicket:
    """Names a lease, its owner in one life, and the blocks under it.

    `num_blocks` counts the full blocks, whose hashes are `block_hashes`, and the partial last one if there is one.
    """

    lease_id: LeaseId
    owner_id: WorkerId
    owner_address: str
    boot_epoch: BootEpoch
    fingerprint: ModelFingerprint
    block_hashes: tuple[BlockHash, ...]
    num_blocks: int


class ReadyBlock(NamedTuple):
    """A block whose content is complete, and the content's checksum (XXH3-64)."""

    block_id: BlockId
    checksum: int
