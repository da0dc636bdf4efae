"""What one KV block looks like in memory, and which layers share it: plain numbers, no tensors.

Layers that see the same tokens form a KV group. A block belongs to one group and is one contiguous run: for each layer
of the group its keys `[block_size, num_kv_heads, key_dim]`, then its values `[block_size, num_kv_heads, value_dim]`;
nothing for a layer that reads another one's. So a block moves between workers without packing. Blocks of all groups
have the same number of bytes, and any block can serve any group.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import NewType

BlockId = NewType("BlockId", int)

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Geometry of one layer's keys and values, as the layer itself shows it when the model is loaded."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None  # a token sees itself and the window - 1 tokens before it; None: all of them
    shared_with: int | None = None  # the earlier layer whose keys and values this one reads; it stores none
    # It stores what keys and values are expanded from: as the key the compressed pair, as the value the rotary part.
    is_latent: bool = False

    @property
    def key_items(self) -> int:
        """Elements of the keys that the layer stores for one token."""
        return 0 if self.shared_with is not None else self.num_kv_heads * self.key_dim

    @property
    def value_items(self) -> int:
        """Elements of the values that the layer stores for one token."""
        return 0 if self.shared_with is not None else self.num_kv_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that see the same tokens: all before, or a window of them. A sequence has one block table for each group."""

    window: int | None = None  # see LayerKV.window
    layers: tuple[int, ...] = ()

    def first_visible(self, position: int) -> int:
        """The first position that the token at `position` sees, and so the first that any later one will see."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of a block: all layers, tokens a block, element type."""

    layers: tuple[LayerKV, ...]
    block_size: int
    dtype: str

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        """The KV groups; one, unless the layers have different windows."""
        return _make_groups(self.layers)

    @property
    def block_items(self) -> int:
        """Elements of a block: those of the largest group. The rest of a smaller one's blocks is unused."""
        return self.block_size * max(_items_of(self.layers, group.layers) for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.block_items * ITEM_BYTES[self.dtype]

    def used_bytes(self, group: int) -> int:
        """Bytes of a block that a group uses; what comes after them means nothing."""
        return self.block_size * _items_of(self.layers, self.groups[group].layers) * ITEM_BYTES[self.dtype]

    def num_blocks_for(self, num_tokens: int, max_step_tokens: int | None = None) -> int:
        """Blocks, of all groups, that a sequence of `num_tokens` tokens holds at most.

        A group with a window holds what its window and a step of `max_step_tokens` tokens reach, if that is less.
        """
        whole = -(-num_tokens // self.block_size)
        return sum(
            whole
            if group.window is None or max_step_tokens is None
            else min(whole, max_live_blocks(group.window, max_step_tokens, self.block_size))
            for group in self.groups
        )

    def digest(self) -> str:
        """Names the layout; equal layouts have equal digests."""
        return hashlib.blake2b(repr(astuple(self)).encode(), digest_size=16).hexdigest()


def min_blocks(layout: KVLayout) -> int:
    """The least that a worker can start with: its checks compute two sequences, each a little longer than a block."""
    return 2 * layout.num_blocks_for(layout.block_size + 3)


def max_live_blocks(window: int, num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens in a row and all they see through a window may touch, wherever they begin."""
    return -(-(window + num_tokens - 2) // block_size) + 1


@lru_cache(maxsize=64)
def _make_groups(layers: tuple[LayerKV, ...]) -> tuple[KVGroup, ...]:
    """The fewest groups that leave at most a tenth of their blocks unused; those with the widest view first.

    Blocks of all groups are equally large, so layers of one window may have to be several groups: fifteen layers with a
    window and three without it become three groups of five, and one of three.
    """
    by_window = _by_window(layers)
    if len(by_window) == 1:
        return (KVGroup(next(iter(by_window)), tuple(range(len(layers)))),)
    sizes = range(max(len(kin) for kin in by_window.values()), 0, -1)
    candidates = [_cut(by_window, size) for size in sizes]
    good = [groups for groups in candidates if _unused_share(layers, groups) <= 0.1]
    return min(good, key=len) if good else min(candidates, key=lambda groups: _unused_share(layers, groups))


def _by_window(layers: tuple[LayerKV, ...]) -> dict[int | None, list[list[int]]]:
    """Layers that store, each with those that read from it; by the widest window of such a family."""
    families = {index: [index] for index, layer in enumerate(layers) if layer.shared_with is None}
    for index, layer in enumerate(layers):
        if layer.shared_with is not None:
            families[layer.shared_with].append(index)
    by_window: defaultdict[int | None, list[list[int]]] = defaultdict(list)
    for family in families.values():
        windows = [layers[index].window for index in family]
        widest = None if None in windows else max(window for window in windows if window is not None)
        by_window[widest].append(family)
    return dict(by_window)


def _cut(by_window: dict[int | None, list[list[int]]], size: int) -> tuple[KVGroup, ...]:
    """Groups of at most `size` layers that store."""
    groups = [
        KVGroup(window, tuple(sorted(index for family in families[first : first + size] for index in family)))
        for window, families in by_window.items()
        for first in range(0, len(families), size)
    ]
    return tuple(sorted(groups, key=lambda group: (group.window is not None, -(group.window or 0))))


def _items_of(layers: tuple[LayerKV, ...], indexes: Sequence[int]) -> int:
    return sum(layers[index].key_items + layers[index].value_items for index in indexes)


def _unused_share(layers: tuple[LayerKV, ...], groups: tuple[KVGroup, ...]) -> float:
    sizes = [_items_of(layers, group.layers) for group in groups]
    return 1 - sum(sizes) / (len(sizes) * max(sizes))
