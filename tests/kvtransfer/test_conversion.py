"""Blocks cut in one way become blocks cut in another, byte for byte, against a token-by-token description of both."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.block_store import MemoryBlockStore
from kvtransfer.conversion import BlockConversion
from paceline.core.errors import FingerprintMismatchError
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


PARTS = [ALL_HEADS, HeadPart(0, 2), HeadPart(1, 2)]


@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    num_tokens=st.integers(1, 40),
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "int4"]),
    data=st.data(),
)
def test_every_token_that_is_not_held_lies_where_it_belongs(
    sizes: tuple[int, int], num_tokens: int, dtype: str, data: st.DataObject
) -> None:
    """Whatever the two block sizes, the type, and the parts of the heads: and nothing else is touched."""
    theirs, ours = (layout_of(size, dtype, data.draw(st.sampled_from(PARTS))) for size in sizes)
    num_held = data.draw(st.integers(0, num_tokens // ours.block_size)) * ours.block_size
    source = filled(theirs, num_tokens)
    num_blocks = -(-num_tokens // ours.block_size)
    target, block_ids = (
        MemoryBlockStore(num_blocks + 1, ours.block_bytes),
        [BlockId(i + 1) for i in range(num_blocks)],
    )
    conversion = BlockConversion(theirs, ours)
    for ordinal in range(conversion.num_their_blocks_held(num_held), -(-num_tokens // theirs.block_size)):
        conversion.write(ordinal, source.read(BlockId(ordinal)), target, block_ids, num_held)
    assert bytes(target.read(BlockId(0))) == bytes(ours.block_bytes)
    for token in range(num_tokens):
        ordinal, slot = divmod(token, ours.block_size)
        block = target.read(block_ids[ordinal])
        theirs_has = {data for _, data in each_place(theirs, 0, token)}
        for offset, expected in each_place(ours, slot, token):
            comes = token >= num_held and expected in theirs_has
            assert bytes(block[offset : offset + len(expected)]) == (
                expected if comes else bytes(len(expected))
            )


@pytest.mark.parametrize("block_sizes", [(8, 16), (16, 8), (16, 16)])
def test_two_halves_of_the_heads_make_a_whole(block_sizes: tuple[int, int]) -> None:
    """Two workers that hold half of the heads each fill the blocks of one that holds all; and one fills those of two."""
    whole = layout_of(block_sizes[0])
    halves = [layout_of(block_sizes[1], part=HeadPart(index, 2)) for index in range(2)]
    num_tokens = 37
    joined = MemoryBlockStore(-(-num_tokens // whole.block_size), whole.block_bytes)
    ids = [BlockId(i) for i in range(-(-num_tokens // whole.block_size))]
    for half in halves:
        source = filled(half, num_tokens)
        for ordinal in range(-(-num_tokens // half.block_size)):
            BlockConversion(half, whole).write(ordinal, source.read(BlockId(ordinal)), joined, ids, 0)
    _require_tokens(joined, whole, num_tokens)
    for half in halves:
        part = MemoryBlockStore(-(-num_tokens // half.block_size), half.block_bytes)
        part_ids = [BlockId(i) for i in range(-(-num_tokens // half.block_size))]
        for ordinal in ids:
            BlockConversion(whole, half).write(ordinal, joined.read(ordinal), part, part_ids, 0)
        _require_tokens(part, half, num_tokens)


def _require_tokens(store: MemoryBlockStore, layout: KVLayout, num_tokens: int) -> None:
    for token in range(num_tokens):
        ordinal, slot = divmod(token, layout.block_size)
        block = store.read(BlockId(ordinal))
        for offset, expected in each_place(layout, slot, token):
            assert bytes(block[offset : offset + len(expected)]) == expected


@pytest.mark.parametrize(
    ("theirs", "name"),
    [
        (layout_of(8, "bfloat16"), "kv_dtype"),
        (KVLayout(LAYERS[:2], 8, "float32"), "kv_layout"),
    ],
)
def test_what_is_other_content_is_refused(theirs: KVLayout, name: str) -> None:
    """Another type, or other layers: the field is named."""
    with pytest.raises(FingerprintMismatchError, match=name):
        BlockConversion(theirs, layout_of(16))


def test_blocks_with_windows_are_not_converted() -> None:
    """Which blocks of a window somebody needs depends on where they begin: the block size is named."""
    layers = (LayerKV(2, 8, 8, window=6), LayerKV(2, 8, 8))
    with pytest.raises(FingerprintMismatchError, match="block_size"):
        BlockConversion(KVLayout(layers, 8, "float32"), KVLayout(layers, 16, "float32"))
