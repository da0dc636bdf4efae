"""Writes blocks that were cut in one way into blocks that are cut in another: other numbers of tokens, other parts of the heads.

The KV of a token is the same numbers in both (`ModelFingerprint.require_same_content`). What moves is planned as runs of bytes:

    their blocks of 16    [ layer 0 keys: 16 tokens | values: 16 | layer 1 keys ... ]
    our blocks of 8       [ keys: 8 | values: 8 | ... ] [ keys: 8 | values: 8 | ... ]
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kvtransfer.block_store import BlockStore
from paceline.core.errors import FingerprintMismatchError
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.kv_layout import BlockId, HeadPart, KVLayout


class _Region(NamedTuple):
    """Where in a block something of all its tokens lies: so many bytes for each head of each token."""

    offset: int
    num_heads: int
    head_bytes: int

    @property
    def token_bytes(self) -> int:
        return self.num_heads * self.head_bytes


class _Run(NamedTuple):
    """Bytes that lie side by side in both: the first one's place in a token's share of theirs, and of ours."""

    theirs: _Region
    ours: _Region
    their_start: int
    our_start: int
    num_bytes: int


@dataclass(frozen=True)
class BlockConversion:
    """From `theirs` to `ours`: one is the other one, recut, and both have one KV group without a window."""

    theirs: KVLayout
    ours: KVLayout

    @classmethod
    def between(cls, fingerprint: ModelFingerprint, ours: KVLayout) -> "BlockConversion | None":
        """From the blocks of a worker with this fingerprint, whose content is ours; None when they are cut alike.

        Raises FingerprintMismatchError for what cannot be converted.
        """
        if (fingerprint.block_size, fingerprint.kv_part) == (ours.block_size, str(ours.part)):
            return None
        differing = "kv_part" if fingerprint.block_size == ours.block_size else "block_size"
        values = {
            "block_size": (ours.block_size, fingerprint.block_size),
            "kv_part": (ours.part, fingerprint.kv_part),
        }
        mismatch = FingerprintMismatchError(differing, *map(str, values[differing]))
        # Which blocks of a window somebody needs depends on where they begin.
        if len(ours.groups) > 1 or ours.groups[0].is_windowed or fingerprint.block_size < 1:
            raise mismatch
        try:
            theirs = ours.recut(fingerprint.block_size, HeadPart.parse(fingerprint.kv_part))
        except ValueError as error:
            raise mismatch from error
        return cls(theirs, ours)

    def num_their_blocks_held(self, num_tokens_held: int) -> int:
        """How many of their blocks need not come to somebody who has so many leading tokens."""
        return num_tokens_held // self.theirs.block_size

    def write(
        self,
        ordinal: int,
        block: memoryview,
        store: BlockStore,
        block_ids: Sequence[BlockId],
        num_tokens_held: int,
    ) -> None:
        """Puts what their block at `ordinal` holds into our blocks, apart from tokens that we hold and places that we do not have."""
        size = self.theirs.block_size
        first = max(ordinal * size, num_tokens_held)
        last = min((ordinal + 1) * size, len(block_ids) * self.ours.block_size)
        while first < last:
            our_ordinal, our_slot = divmod(first, self.ours.block_size)
            num_tokens = min(last - first, self.ours.block_size - our_slot)
            for source, target, num_bytes in self._spans(first - ordinal * size, our_slot, num_tokens):
                store.write(block_ids[our_ordinal], target, block[source : source + num_bytes])
            first += num_tokens

    @cached_property
    def _runs(self) -> tuple[_Run, ...]:
        return tuple(
            run
            for theirs, ours in zip(_regions(self.theirs), _regions(self.ours), strict=True)
            if (run := _common_heads(theirs, ours, self.theirs, self.ours)) is not None
        )

    def _spans(self, their_slot: int, our_slot: int, num_tokens: int) -> Iterator[tuple[int, int, int]]:
        """What to copy for some tokens: from where in their block, to where in ours, how many bytes."""
        for run in self._runs:
            source = run.theirs.offset + their_slot * run.theirs.token_bytes + run.their_start
            target = run.ours.offset + our_slot * run.ours.token_bytes + run.our_start
            if run.num_bytes == run.theirs.token_bytes == run.ours.token_bytes:
                yield source, target, num_tokens * run.num_bytes
                continue
            for token in range(num_tokens):
                yield (
                    source + token * run.theirs.token_bytes,
                    target + token * run.ours.token_bytes,
                    run.num_bytes,
                )


def require_all_heads(conversions: Sequence[BlockConversion | None]) -> None:
    """Raises FingerprintMismatchError unless what comes by all of these together is every head that we need."""
    if None in conversions:
        return
    given = [conversion for conversion in conversions if conversion is not None]
    covered = {share for each in given for share in _shares(each.theirs.part, _unit(given))}
    needed = _shares(given[0].ours.part, _unit(given))
    if not covered.issuperset(needed):
        theirs = ", ".join(str(each.theirs.part) for each in given)
        raise FingerprintMismatchError("kv_part", str(given[0].ours.part), theirs)


def _unit(conversions: Sequence[BlockConversion]) -> int:
    """A number of equal shares of the heads in which each part is some whole ones."""
    return math.lcm(*(part.count for each in conversions for part in (each.theirs.part, each.ours.part)))


def _shares(part: HeadPart, unit: int) -> range:
    size = unit // part.count
    return range(part.index * size, (part.index + 1) * size)


def _regions(layout: KVLayout) -> Iterator[_Region]:
    """In the order in which they lie in a block."""
    offset, kv_type = 0, layout.kv_type
    for layer in layout.layers:
        if layer.shared_with is not None:
            continue
        vectors = (kv_type.vector_bytes(layer.key_dim), kv_type.vector_bytes(layer.value_dim))
        for head_bytes in (*vectors, kv_type.scale_bytes, kv_type.scale_bytes):
            yield _Region(offset, layer.num_kv_heads, head_bytes)
            offset += layout.block_size * layer.num_kv_heads * head_bytes


def _common_heads(
    theirs: _Region, ours: _Region, their_layout: KVLayout, our_layout: KVLayout
) -> _Run | None:
    """The heads that both have, as a run in the share of one token; None if there are no bytes of them."""
    their_first = their_layout.part.index * theirs.num_heads
    our_first = our_layout.part.index * ours.num_heads
    first = max(their_first, our_first)
    last = min(their_first + theirs.num_heads, our_first + ours.num_heads)
    head_bytes = ours.head_bytes
    if last <= first or not head_bytes:
        return None
    return _Run(
        theirs,
        ours,
        (first - their_first) * head_bytes,
        (first - our_first) * head_bytes,
        (last - first) * head_bytes,
    )
