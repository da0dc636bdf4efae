"""The memory of the blocks."""

import pytest
import torch
import xxhash

from paceline.core.kv_layout import BlockId, HeadPart, KVLayout, LayerKV
from paceline.engine.kv_cache import KVCache
from paceline.engine.kv_quant import dequantise, quantise
from tests.factories import make_layout

LAYOUT = KVLayout((LayerKV(2, 8, 4), LayerKV(1, 6, 6)), block_size=4, dtype="float32")


def _filled(layout: KVLayout = LAYOUT, num_blocks: int = 3) -> KVCache:
    """A cache in which every element is another number."""
    cache = KVCache(layout, num_blocks)
    start = 0
    for view in (*cache.keys, *cache.values):
        view.copy_(torch.arange(start, start + view.numel()).view(view.shape))
        start += view.numel()
    return cache


def test_views_have_the_shape_of_their_layer() -> None:
    """Blocks, tokens of a block, heads, and the layer's own key and value sizes."""
    cache = KVCache(LAYOUT, 3)
    assert [tuple(view.shape) for view in cache.keys] == [(3, 4, 2, 8), (3, 4, 1, 6)]
    assert [tuple(view.shape) for view in cache.values] == [(3, 4, 2, 4), (3, 4, 1, 6)]


def test_a_block_is_one_run_of_bytes_over_all_layers() -> None:
    """Its bytes are its keys and values, layer by layer, and nothing of its neighbours."""
    cache = _filled()
    for block_id in range(3):
        parts = [
            view[block_id].contiguous().numpy().tobytes()
            for layer in range(2)
            for view in (cache.keys[layer], cache.values[layer])
        ]
        assert bytes(cache.read(BlockId(block_id))) == b"".join(parts)
        assert sum(map(len, parts)) == cache.block_bytes == LAYOUT.block_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_written_from_bytes_equals_the_one_read(dtype: str) -> None:
    """Read out of one cache and written into another in pieces, all layers hold the same; other blocks are untouched."""
    layout = make_layout(dtype=dtype)
    source, target = _filled(layout), _filled(layout)
    before = bytes(target.read(BlockId(1)))
    data = bytes(source.read(BlockId(2)))
    for offset in range(0, len(data), 100):
        target.write(BlockId(0), offset, data[offset : offset + 100])
    for mine, theirs in zip((*source.keys, *source.values), (*target.keys, *target.values), strict=True):
        assert torch.equal(mine[2], theirs[0])
    assert bytes(target.read(BlockId(1))) == before


def test_a_write_stays_inside_its_block() -> None:
    """A piece that would reach into the next block is refused; one that fits exactly is not."""
    cache = KVCache(LAYOUT, 2)
    with pytest.raises(AssertionError):
        cache.write(BlockId(0), cache.block_bytes - 3, b"1234")
    cache.write(BlockId(0), cache.block_bytes - 4, b"1234")
    assert bytes(cache.read(BlockId(0))[-4:]) == b"1234"


def test_what_is_read_cannot_be_written_through() -> None:
    """A reader of a lease sees the block and cannot change it."""
    with pytest.raises(TypeError):
        _filled().read(BlockId(0))[0] = 1


def test_a_checksum_is_that_of_the_bytes() -> None:
    """XXH3-64 of the whole block: one changed byte changes it, and changing it back restores it."""
    cache = _filled()
    first, byte = cache.checksum(BlockId(1)), bytes(cache.read(BlockId(1))[7:8])
    assert first == xxhash.xxh3_64_intdigest(bytes(cache.read(BlockId(1))))
    cache.write(BlockId(1), 7, bytes([byte[0] ^ 1]))
    assert cache.checksum(BlockId(1)) != first
    cache.write(BlockId(1), 7, byte)
    assert cache.checksum(BlockId(1)) == first


def test_tokens_are_stored_in_their_slots_and_gathered_in_order() -> None:
    """Slots name block and offset; a block table brings the tokens back in the order of the sequence."""
    cache = _filled()
    keys, values = torch.randn(6, 2, 8), torch.randn(6, 2, 4)
    table = [2, 0]
    slots = torch.tensor([table[position // 4] * 4 + position % 4 for position in range(6)])
    untouched = cache.keys[0][1].clone()
    cache.write_tokens(0, slots, keys, values)
    for first in (0, 3, 4, 5):
        found_keys, found_values = cache.gather(0, torch.tensor(table), first, 6, torch.float32)
        assert torch.equal(found_keys, keys[first:])
        assert torch.equal(found_values, values[first:])
    assert torch.equal(cache.keys[0][1], untouched)


def test_a_layer_that_shares_reads_what_the_other_has_written() -> None:
    """It has the other layer's views, and writing through it changes nothing."""
    layout = KVLayout((LayerKV(2, 8, 4), LayerKV(1, 6, 6), LayerKV(2, 8, 4, shared_with=0)), 4, "float32")
    cache, slots = KVCache(layout, 2), torch.tensor([5, 6])
    keys, values = torch.randn(2, 2, 8), torch.randn(2, 2, 4)
    cache.write_tokens(0, slots, keys, values)
    cache.write_tokens(2, slots, keys + 1, values + 1)
    assert torch.equal(cache.keys[2][1, 1:3], keys)
    assert torch.equal(cache.values[2][1, 1:3], values)
    assert cache.block_bytes == KVCache(LAYOUT, 1).block_bytes


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8", "int4"])
def test_a_quantised_block_holds_elements_and_scales_layer_by_layer(kv_dtype: str) -> None:
    """Keys, values, the keys' scales, the values' scales: one run of bytes, whatever the sizes of the heads."""
    layout = KVLayout((LayerKV(2, 7, 4), LayerKV(1, 6, 5)), block_size=3, dtype=kv_dtype)
    cache = KVCache(layout, 3)
    runs = [
        views[layer]
        for layer in range(2)
        for views in (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    ]
    for number, run in enumerate(runs):
        run.fill_(number + 1)
    parts = [run[1].contiguous().view(torch.uint8).numpy().tobytes() for run in runs]
    assert bytes(cache.read(BlockId(1))) == b"".join(parts)
    assert len(b"".join(parts)) == cache.block_bytes == layout.block_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", ["fp8", "int8", "int4"])
def test_a_quantised_token_comes_back_as_its_vectors_do(kv_dtype: str, dtype: torch.dtype) -> None:
    """What is gathered is what quantising and back makes of each vector, also after the bytes have moved."""
    layout = KVLayout((LayerKV(2, 8, 4), LayerKV(2, 8, 4, shared_with=0)), 4, kv_dtype)
    source, target = KVCache(layout, 3), KVCache(layout, 2)
    keys, values = torch.randn(6, 2, 8).to(dtype), torch.randn(6, 2, 4).to(dtype)
    slots = torch.tensor([8, 9, 10, 11, 0, 1])  # block 2, then block 0
    source.write_tokens(0, slots, keys, values)
    for theirs, ours in ((2, 0), (0, 1)):
        target.write(BlockId(ours), 0, bytes(source.read(BlockId(theirs))))
    expected = [
        dequantise(*quantise(each, kv_dtype), each.shape[-1], kv_dtype, dtype) for each in (keys, values)
    ]
    for cache, table in ((source, [2, 0]), (target, [0, 1])):
        for layer in (0, 1):
            found = cache.gather(layer, torch.tensor(table), 0, 6, dtype)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_plain_cache_may_have_another_type_than_the_computation() -> None:
    """It stores what is rounded to its own type, and gives what is asked for."""
    cache = KVCache(make_layout(dtype="bfloat16"), 1)
    keys, values = torch.randn(2, 2, 8), torch.randn(2, 2, 4)
    cache.write_tokens(0, torch.tensor([0, 1]), keys, values)
    found_keys, found_values = cache.gather(0, torch.tensor([0]), 0, 2, torch.float32)
    assert torch.equal(found_keys, keys.bfloat16().float())
    assert torch.equal(found_values, values.bfloat16().float())


def test_a_copied_block_holds_the_same_in_every_layer() -> None:
    """All bytes go over, and a later write to one of the two leaves the other alone."""
    cache = _filled()
    cache.copy(BlockId(0), BlockId(2))
    before = bytes(cache.read(BlockId(0)))
    assert cache.read(BlockId(2)) == before
    cache.write(BlockId(2), 0, bytes(8))
    assert cache.read(BlockId(0)) == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8", "int4"])
def test_parts_of_the_heads_make_up_whole_blocks(dtype: str) -> None:
    """Two caches over one pool, each with half of the heads: the bytes are those of one cache with all, and each finds its own."""
    layout = KVLayout((LayerKV(4, 8, 4), LayerKV(2, 6, 6)), block_size=4, dtype=dtype)
    whole = KVCache(layout, 3)
    first = KVCache(layout, 3, heads=HeadPart(0, 2))
    second = KVCache(layout, 3, heads=HeadPart(1, 2), pool=first.pool)
    slots = torch.tensor([3, 4, 9])
    for index, layer in enumerate(layout.layers):
        keys, values = (torch.randn(3, layer.num_kv_heads, dim) for dim in (layer.key_dim, layer.value_dim))
        whole.write_tokens(index, slots, keys, values)
        half = layer.num_kv_heads // 2
        first.write_tokens(index, slots, keys[:, :half], values[:, :half])
        second.write_tokens(index, slots, keys[:, half:], values[:, half:])
    for block_id in map(BlockId, range(3)):
        assert bytes(first.read(block_id)) == bytes(whole.read(block_id))
    for index, layer in enumerate(layout.layers):
        expected = whole.gather(index, torch.tensor([0, 1, 2]), 0, 12, torch.float32)
        half = layer.num_kv_heads // 2
        for cache, heads in ((first, slice(half)), (second, slice(half, None))):
            found = cache.gather(index, torch.tensor([0, 1, 2]), 0, 12, torch.float32)
            assert all(
                torch.equal(ours, theirs[:, heads]) for ours, theirs in zip(found, expected, strict=True)
            )
