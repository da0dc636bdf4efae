"""Names for full KV blocks: a keyed, chained 128-bit digest over everything that the block's content depends on.

Two blocks have the same hash only if model, all earlier tokens, their own tokens and, behind what is public, the cache
scope's salt are the same.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence
from typing import NewType

from paceline.core.cache_scope import CacheScope

BlockHash = NewType("BlockHash", bytes)

_KEY = b"paceline.block.v1"
_DIGEST_BYTES = 16
# It has taken the key in already, which is half of the work.
_KEYED = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=_KEY)


def chain_root(fingerprint: bytes, cache_scope: str) -> BlockHash:
    """What the chain starts from: requests with another model share no block, nor do those of other scopes with one salt each."""
    salt = CacheScope.parse(cache_scope).root_salt
    return _digest(_with_length(fingerprint) + _with_length(salt.encode()))


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of one full block that follows the block named `parent`."""
    return _digest(parent + array("I", token_ids).tobytes())


def salted(parent: BlockHash, cache_scope: str, start: int, end: int) -> BlockHash:
    """What the block of the tokens from `start` up to `end` follows: `parent`, with the salt where its scope becomes private."""
    # Nearly always: what has no public part, and that is seen at once.
    if not cache_scope.startswith("public:"):
        return parent
    scope = CacheScope.parse(cache_scope)
    return _digest(parent + _with_length(scope.salt.encode())) if scope.begins_private(start, end) else parent


def hash_full_blocks(
    root: BlockHash, token_ids: Sequence[int], block_size: int, cache_scope: str = ""
) -> tuple[BlockHash, ...]:
    """The hashes of the full blocks of `token_ids`, in order; a partial last block has none.

    `root` is the chain's, of this scope.
    """
    hashes: list[BlockHash] = []
    parent = root
    for end in range(block_size, len(token_ids) + 1, block_size):
        start = end - block_size
        parent = hash_block(salted(parent, cache_scope, start, end), token_ids[start:end])
        hashes.append(parent)
    return tuple(hashes)


def group_hash(block_hash: BlockHash, group: int) -> BlockHash:
    """The name of the block that a KV group keeps for the tokens of `block_hash`; the first group's is that itself."""
    return block_hash if group == 0 else BlockHash(block_hash + bytes([group]))


def _with_length(field: bytes) -> bytes:
    return struct.pack("<I", len(field)) + field


def _digest(data: bytes) -> BlockHash:
    digest = _KEYED.copy()
    digest.update(data)
    return BlockHash(digest.digest())
