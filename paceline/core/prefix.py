"""What is said about cached blocks between an engine, the prefix table and the router."""

from typing import NamedTuple

from paceline.core.block_hash import BlockHash
from paceline.core.kv_layout import BlockId
from paceline.core.request import BootEpoch, WorkerId


class WorkerKey(NamedTuple):
    """A worker in one of its lives; a restarted worker is cold and has another key."""

    worker_id: WorkerId
    boot_epoch: BootEpoch


class PrefixOwner(NamedTuple):
    """A worker in one of its lives, and where others reach it."""

    worker_id: WorkerId
    address: str
    boot_epoch: BootEpoch


class PrefixHint(NamedTuple):
    """A worker that is believed to have the first `num_tokens` tokens of a prompt cached, in full blocks."""

    owner: PrefixOwner
    num_tokens: int


class PrefixEntry(NamedTuple):
    """A full block that a worker holds. `head_hash` is the hash of the first block of its chain."""

    block_hash: BlockHash
    head_hash: BlockHash
    block_id: BlockId


class PrefixChanges(NamedTuple):
    """What an engine's cache gained and lost in one step. No entry is in both."""

    published: tuple[PrefixEntry, ...] = ()
    evicted: tuple[PrefixEntry, ...] = ()
