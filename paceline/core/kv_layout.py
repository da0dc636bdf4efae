"""What one KV block looks like in memory, and which layers share it: plain numbers, no tensors.

Layers that see the same tokens form a KV group. A block belongs to one group and is one contiguous run: for each layer
of the group its keys `[block_size, num_kv_heads, key_dim]`, then its values `[block_size, num_kv_heads, value_dim]`, then,
for a quantised type, the scales of its keys and those of its values, each `[block_size, num_kv_heads]`; nothing for a layer
that reads another one's. So a block moves between workers without packing. Blocks of all groups have the same number
of bytes, and any block can serve any group.
"""

import hashlib
from collections import defaultdict
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from typing import NamedTuple, NewType

BlockId = NewType("BlockId", int)


@dataclass(frozen=True, slots=True)
class KVType:
    """How keys and values are stored. A quantised vector, one for each token and head, has a scale of its own."""

    item_bits: int
    scale_bytes: int = 0  # 0: not quantised

    def vector_bytes(self, dim: int) -> int:
        """Bytes of a vector of `dim` elements without its scale, filled up so that no scale lies askew in memory."""
        num_bytes, unit = -(-dim * self.item_bits // 8), max(1, self.scale_bytes)
        return -(-num_bytes // unit) * unit


KV_TYPES = {
    "float32": KVType(32),
    "bfloat16": KVType(16),
    "fp8": KVType(8, scale_bytes=2),
    "int8": KVType(8, scale_bytes=2),
    "int4": KVType(4, scale_bytes=2),
}


class View(NamedTuple):
    """Which earlier tokens a token sees: itself and the window - 1 before it, and always the first, the sinks.

    Without a window it sees all of them. Sinks are for models that were trained so (https://arxiv.org/abs/2309.17453).
    """

    window: int | None = None
    num_sink_tokens: int = 0

    def first_visible(self, position: int) -> int:
        """The first position, apart from the sinks, that the token at `position` sees, and so any later one."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def num_kept(self, first: int) -> int:
        """How many sinks lie before `first`."""
        return min(first, self.num_sink_tokens)


WHOLE_VIEW = View()


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
    num_sink_tokens: int = 0  # see View; without a window there are none

    @property
    def view(self) -> View:
        """What its tokens see."""
        return View(self.window, self.num_sink_tokens)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that see the same tokens. A sequence has one block table for each group."""

    view: View = WHOLE_VIEW
    layers: tuple[int, ...] = ()

    @property
    def is_windowed(self) -> bool:
        """Whether a token falls out of sight as the sequence grows."""
        return self.view.window is not None

    def blocks_seen(self, position: int, num_blocks: int, block_size: int) -> list[int]:
        """Which of a sequence's first `num_blocks` blocks hold what the token at `position`, or any later one, sees."""
        first = self.view.first_visible(position) // block_size
        num_kept = min(first, self.num_sink_blocks(block_size), num_blocks)
        return [*range(num_kept), *range(first, num_blocks)]

    def num_sink_blocks(self, block_size: int) -> int:
        """Blocks at the beginning that are always seen."""
        return -(-self.view.num_sink_tokens // block_size)

    def max_live_blocks(self, num_tokens: int, block_size: int) -> int:
        """Blocks that a step of `num_tokens` tokens and all they see through a window may touch, wherever it begins."""
        assert self.view.window is not None, "without a window there is no bound"
        num_seen = self.view.window + num_tokens - 1
        return -(-(num_seen - 1) // block_size) + 1 + self.num_sink_blocks(block_size)


@dataclass(frozen=True, slots=True)
class HeadPart:
    """One of `count` equal parts of every layer's heads, in order."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> "HeadPart":
        """What str() gives; raises ValueError for anything else."""
        index, _, count = text.partition("/")
        part = cls(int(index), int(count))
        if not 0 <= part.index < part.count:
            raise ValueError(text)
        return part


ALL_HEADS = HeadPart()


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of a block: all layers, tokens a block, and which of KV_TYPES its elements are.

    Where a worker holds only a part of the heads, the layers' heads are those that it holds.
    """

    layers: tuple[LayerKV, ...]
    block_size: int
    dtype: str
    part: HeadPart = ALL_HEADS

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        """The KV groups; one, unless the layers have different windows."""
        return _make_groups(self.layers, tuple(self.layer_bytes(layer) for layer in self.layers))

    @property
    def has_latents(self) -> bool:
        """Whether a layer stores what its keys and values are expanded from."""
        return any(layer.is_latent for layer in self.layers)

    @property
    def kv_type(self) -> KVType:
        """How its keys and values are stored."""
        return KV_TYPES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: those of the largest group. The rest of a smaller one's blocks is unused."""
        return max(self.used_bytes(group) for group in range(len(self.groups)))

    def layer_bytes(self, layer: LayerKV) -> int:
        """Bytes that the layer takes in a block."""
        if layer.shared_with is not None:
            return 0
        vectors = self.kv_type.vector_bytes(layer.key_dim) + self.kv_type.vector_bytes(layer.value_dim)
        return self.block_size * layer.num_kv_heads * (vectors + 2 * self.kv_type.scale_bytes)

    def used_bytes(self, group: int) -> int:
        """Bytes of a block that a group uses; what comes after them means nothing."""
        return sum(self.layer_bytes(self.layers[index]) for index in self.groups[group].layers)

    def num_blocks_for(self, num_tokens: int, max_step_tokens: int | None = None) -> int:
        """Blocks, of all groups, that a sequence of `num_tokens` tokens holds at most.

        A group with a window holds what its window and a step of `max_step_tokens` tokens reach, if that is less.
        """
        whole = -(-num_tokens // self.block_size)
        return sum(
            whole
            if not group.is_windowed or max_step_tokens is None
            else min(whole, group.max_live_blocks(max_step_tokens, self.block_size))
            for group in self.groups
        )

    def recut(self, block_size: int, part: HeadPart) -> "KVLayout":
        """The same KV in blocks of another size, or another part of it; raises ValueError where the heads do not divide so."""
        if any(layer.num_kv_heads * self.part.count % part.count for layer in self.layers):
            raise ValueError(f"the heads of a layer do not divide into {part.count} parts")
        layers = tuple(
            replace(layer, num_kv_heads=layer.num_kv_heads * self.part.count // part.count)
            for layer in self.layers
        )
        return KVLayout(layers, block_size, self.dtype, part)

    def digest(self) -> str:
        """Names what the KV of a token is, whatever its type: equal layers have equal digests, however they are cut into blocks."""
        whole = [replace(layer, num_kv_heads=layer.num_kv_heads * self.part.count) for layer in self.layers]
        return hashlib.blake2b(repr(list(map(astuple, whole))).encode(), digest_size=16).hexdigest()


def min_blocks(layout: KVLayout) -> int:
    """The least that a worker can start with: its checks compute two sequences, each a little longer than a block."""
    return 2 * layout.num_blocks_for(layout.block_size + 3)


@lru_cache(maxsize=64)
def _make_groups(layers: tuple[LayerKV, ...], sizes: tuple[int, ...]) -> tuple[KVGroup, ...]:
    """The fewest groups that leave at most a tenth of their blocks unused; those with the widest view first.

    `sizes` are the bytes of each layer. Blocks of all groups are equally large, so layers of one window may have to be several
    groups: fifteen layers with a window and three without it become three groups of five, and one of three.
    """
    by_view = _by_view(layers)
    if len(by_view) == 1:
        return (KVGroup(next(iter(by_view)), tuple(range(len(layers)))),)
    most = range(max(len(kin) for kin in by_view.values()), 0, -1)
    candidates = [_cut(by_view, num_layers) for num_layers in most]
    good = [groups for groups in candidates if _unused_share(sizes, groups) <= 0.1]
    return min(good, key=len) if good else min(candidates, key=lambda groups: _unused_share(sizes, groups))


def _by_view(layers: tuple[LayerKV, ...]) -> dict[View, list[list[int]]]:
    """Layers that store, each with those that read from it; by what any of such a family sees."""
    families = {index: [index] for index, layer in enumerate(layers) if layer.shared_with is None}
    for index, layer in enumerate(layers):
        if layer.shared_with is not None:
            families[layer.shared_with].append(index)
    by_view: defaultdict[View, list[list[int]]] = defaultdict(list)
    for family in families.values():
        windows = [layers[index].window for index in family]
        widest = None if None in windows else max(window for window in windows if window is not None)
        num_sink_tokens = max(layers[index].num_sink_tokens for index in family)
        by_view[View(widest, 0 if widest is None else num_sink_tokens)].append(family)
    return dict(by_view)


def _cut(by_view: dict[View, list[list[int]]], num_layers: int) -> tuple[KVGroup, ...]:
    """Groups of at most so many layers that store."""
    groups = [
        KVGroup(
            view, tuple(sorted(index for family in families[first : first + num_layers] for index in family))
        )
        for view, families in by_view.items()
        for first in range(0, len(families), num_layers)
    ]
    return tuple(sorted(groups, key=lambda group: (group.is_windowed, -(group.view.window or 0))))


def _unused_share(sizes: tuple[int, ...], groups: tuple[KVGroup, ...]) -> float:
    used = [sum(sizes[index] for index in group.layers) for group in groups]
    return 1 - sum(used) / (len(used) * max(used))
