"""Pools whose blocks are cut in different ways, described token by token."""

import random
from dataclasses import replace

from kvtransfer.block_store import MemoryBlockStore
from paceline.core.kv_layout import ALL_HEADS, BlockId, HeadPart, KVLayout, LayerKV

# What a layer has of each head of each token, in the order in which it lies in a block.
KINDS = ("keys", "values", "key scales", "value scales")
LAYERS = (LayerKV(4, 6, 4), LayerKV(2, 8, 8), LayerKV(2, 8, 8, shared_with=1), LayerKV(4, 2, 2))


def layout_of(block_size: int, dtype: str = "float32", part: HeadPart = ALL_HEADS) -> KVLayout:
    """The layers, or a part of their heads."""
    layers = tuple(replace(layer, num_kv_heads=layer.num_kv_heads // part.count) for layer in LAYERS)
    return KVLayout(layers, block_size, dtype, part)


def place(layout: KVLayout, slot: int, layer: int, kind: str, head: int) -> tuple[int, int]:
    """Where in a block something of one head of one token lies, and how many bytes it is; counted up from the beginning."""
    offset = 0
    for index, each in enumerate(layout.layers):
        if each.shared_with is not None:
            continue
        sizes = (
            layout.kv_type.vector_bytes(each.key_dim),
            layout.kv_type.vector_bytes(each.value_dim),
            layout.kv_type.scale_bytes,
            layout.kv_type.scale_bytes,
        )
        for name, num_bytes in zip(KINDS, sizes, strict=True):
            if (index, name) == (layer, kind):
                return offset + (slot * each.num_kv_heads + head) * num_bytes, num_bytes
            offset += layout.block_size * each.num_kv_heads * num_bytes
    raise AssertionError("there is no such place")


def content(token: int, layer: int, kind: str, head: int, num_bytes: int) -> bytes:
    """Bytes that occur nowhere else; `head` counts over all workers."""
    return random.Random(f"{token} {layer} {kind} {head}").randbytes(num_bytes)


def each_place(layout: KVLayout, slot: int, token: int) -> list[tuple[int, bytes]]:
    """Everything of one token that a worker holds: where in a block, and what."""
    found = []
    for layer, each in enumerate(layout.layers):
        for kind in KINDS if each.shared_with is None else ():
            for head in range(each.num_kv_heads):
                offset, num_bytes = place(layout, slot, layer, kind, head)
                whole_head = layout.part.index * each.num_kv_heads + head
                found.append((offset, content(token, layer, kind, whole_head, num_bytes)))
    return found


def filled(layout: KVLayout, num_tokens: int) -> MemoryBlockStore:
    """A pool whose blocks hold the tokens; what is behind them is rubbish."""
    num_blocks = -(-num_tokens // layout.block_size)
    store = MemoryBlockStore(num_blocks, layout.block_bytes)
    for ordinal in range(num_blocks):
        store.write(BlockId(ordinal), 0, b"\xbb" * layout.block_bytes)
    for token in range(num_tokens):
        ordinal, slot = divmod(token, layout.block_size)
        for offset, data in each_place(layout, slot, token):
            store.write(BlockId(ordinal), offset, data)
    return store


def require_tokens(store: MemoryBlockStore, layout: KVLayout, num_tokens: int) -> None:
    """Every token lies where it belongs."""
    for token in range(num_tokens):
        ordinal, slot = divmod(token, layout.block_size)
        block = store.read(BlockId(ordinal))
        for offset, expected in each_place(layout, slot, token):
            assert bytes(block[offset : offset + len(expected)]) == expected
