"""The geometry of a block in plain numbers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.kv_layout import HeadPart, KVGroup, KVLayout, LayerKV, View
from tests.factories import make_layout


def test_a_block_holds_keys_and_values_of_every_layer() -> None:
    """Bytes of a block: tokens, times heads, times key and value size, over all layers, times the element size."""
    layout = KVLayout((LayerKV(2, 8, 4), LayerKV(1, 16, 16)), block_size=4, dtype="float32")
    num_items = 4 * (2 * (8 + 4) + 1 * (16 + 16))
    assert layout.block_bytes == 4 * num_items
    assert replace(layout, dtype="bfloat16").block_bytes == 2 * num_items
    assert sum(map(layout.layer_bytes, layout.layers)) == layout.block_bytes


@pytest.mark.parametrize(("dtype", "key", "value"), [("fp8", 8, 6), ("int8", 8, 6), ("int4", 4, 4)])
def test_quantised_vectors_take_their_bytes_and_a_scale(dtype: str, key: int, value: int) -> None:
    """One byte or half a one for an element, an even number for a vector, two for the scale of each token and head."""
    layout = KVLayout((LayerKV(2, key_dim=7, value_dim=5),), block_size=3, dtype=dtype)
    assert layout.block_bytes == 3 * 2 * (key + 2 + value + 2)


def test_eight_bits_take_about_half_of_sixteen() -> None:
    """With heads of 64, as the default model has them: 66 bytes for each 128."""
    layout = KVLayout((LayerKV(3, 64, 64),) * 30, block_size=16, dtype="bfloat16")
    assert replace(layout, dtype="int8").block_bytes / layout.block_bytes == 66 / 128


def test_a_layer_that_shares_keys_and_values_takes_no_room() -> None:
    """A block is as large as without it."""
    layers = make_layout().layers
    shared = replace(layers[0], shared_with=0)
    assert KVLayout((*layers, shared), 4, "float32").block_bytes == make_layout().block_bytes


@given(num_tokens=st.integers(0, 1000), block_size=st.integers(1, 64))
def test_just_enough_blocks_for_tokens(num_tokens: int, block_size: int) -> None:
    """The blocks hold all tokens, and one block less would not."""
    num_blocks = make_layout(block_size=block_size).num_blocks_for(num_tokens)
    assert num_blocks * block_size >= num_tokens > (num_blocks - 1) * block_size


def _windows(*windows: int | None) -> KVLayout:
    return KVLayout(tuple(LayerKV(2, 8, 8, window) for window in windows), 4, "float32")


def _group_shapes(layout: KVLayout) -> list[tuple[int | None, int]]:
    return [(group.view.window, len(group.layers)) for group in layout.groups]


def test_layers_with_one_view_are_one_group() -> None:
    """Whether all see everything or all have the same window."""
    assert _group_shapes(_windows(None, None, None)) == [(None, 3)]
    assert _group_shapes(_windows(8, 8)) == [(8, 2)]


def test_layers_with_two_views_are_groups_of_one_size() -> None:
    """The widest view comes first, each layer is in one group, and nothing of a block is wasted if numbers allow it."""
    layout = _windows(*[*[8] * 3, None] * 4)
    assert _group_shapes(layout) == [(None, 4), *[(8, 4)] * 3]
    assert sorted(index for group in layout.groups for index in group.layers) == list(range(16))
    assert layout.block_bytes == 4 * 4 * 4 * 2 * (8 + 8)
    assert {layout.used_bytes(group) for group in range(4)} == {layout.block_bytes}


def test_a_group_that_is_smaller_leaves_little_unused() -> None:
    """Twenty-two layers with a window and four without: a last group of two, and at most a tenth of all blocks empty."""
    layout = _windows(*[8] * 22, *[None] * 4)
    assert _group_shapes(layout) == [(None, 4), *[(8, 4)] * 5, (8, 2)]
    assert layout.used_bytes(6) == layout.block_bytes // 2


def test_layers_of_different_sizes_share_blocks_of_one_size() -> None:
    """Blocks are as large as the largest group; the groups are cut so that the others fill most of theirs."""
    layers = (*[LayerKV(4, 8, 8, window=8)] * 4, LayerKV(2, 32, 32))
    layout = KVLayout(layers, 4, "float32")
    assert _group_shapes(layout) == [(None, 1), (8, 2), (8, 2)]
    assert {layout.used_bytes(group) for group in range(3)} == {layout.block_bytes}


def test_layers_that_share_belong_together() -> None:
    """A layer that reads another one's keys is in its group, which sees as much as either of them."""
    layers = (LayerKV(1, 8, 8), LayerKV(1, 8, 8, window=4), LayerKV(1, 8, 8, window=6, shared_with=1))
    groups = KVLayout(layers, 4, "float32").groups
    assert [(group.view.window, group.layers) for group in groups] == [(None, (0,)), (6, (1, 2))]


@given(
    window=st.integers(1, 30), step=st.integers(1, 30), start=st.integers(0, 60), block_size=st.integers(1, 8)
)
def test_a_window_touches_no_more_blocks_than_it_is_given(
    window: int, step: int, start: int, block_size: int
) -> None:
    """Wherever a step begins, what its tokens see and write lies in at most `max_live_blocks`, sinks included."""
    for num_sink_tokens in (0, 1, 9):
        group = KVGroup(View(window, num_sink_tokens))
        num_blocks = -(-(start + step) // block_size)
        seen = group.blocks_seen(start, num_blocks, block_size)
        assert len(seen) <= group.max_live_blocks(step, block_size)
        assert set(seen) >= {position // block_size for position in range(min(start, num_sink_tokens))}


def test_a_window_costs_only_its_window() -> None:
    """Beyond window and step a longer sequence takes no more blocks in a group with a window."""
    layout = _windows(8, None)
    assert layout.num_blocks_for(4, 4) == 2
    assert layout.num_blocks_for(100, 4) == 25 + 4
    assert layout.num_blocks_for(200, 4) == 50 + 4
    assert layout.num_blocks_for(200) == 100


def test_equal_layers_have_equal_digests() -> None:
    """Made twice, in other blocks, of another type, or as a part of the heads: it is the same KV."""
    halves = tuple(replace(layer, num_kv_heads=1) for layer in make_layout().layers)
    same = [
        make_layout(),
        make_layout(block_size=8),
        make_layout(dtype="int8"),
        KVLayout(halves, 4, "float32", HeadPart(1, 2)),
    ]
    assert {layout.digest() for layout in same} == {make_layout().digest()}


@pytest.mark.parametrize(
    "other",
    [
        make_layout(3),
        replace(make_layout(), layers=(LayerKV(2, 8, 4), LayerKV(2, 4, 8))),
        replace(make_layout(), layers=(LayerKV(4, 4, 2), LayerKV(4, 4, 2))),
        replace(make_layout(), layers=(LayerKV(2, 8, 4), LayerKV(2, 8, 4, window=8))),
        replace(make_layout(), layers=(LayerKV(2, 8, 4), LayerKV(2, 8, 4), LayerKV(2, 8, 4, shared_with=0))),
    ],
    ids=["layers", "one-layer", "same-bytes", "window", "shared"],
)
def test_different_layers_have_different_digests(other: KVLayout) -> None:
    """Whatever changes the meaning of a token's bytes changes the name, also where the size stays."""
    assert other.digest() != make_layout().digest()
