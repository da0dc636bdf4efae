"""The geometry of a block in plain numbers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.kv_layout import KVLayout, LayerKV
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


def test_the_name_of_a_layout_says_its_type() -> None:
    """Whoever reads of two layouts that differ sees at once when it is for that."""
    assert make_layout(dtype="int8").digest().startswith("int8:")


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


def test_equal_layouts_have_equal_digests() -> None:
    """A digest is a name: made twice it is the same."""
    assert make_layout().digest() == make_layout().digest()


@pytest.mark.parametrize(
    "other",
    [
        make_layout(3),
        make_layout(block_size=8),
        make_layout(dtype="bfloat16"),
        *(make_layout(dtype=dtype) for dtype in ("int8", "fp8", "int4")),
        replace(make_layout(), layers=(LayerKV(2, 8, 4), LayerKV(2, 4, 8))),
        replace(make_layout(), layers=(LayerKV(4, 4, 2), LayerKV(4, 4, 2))),
        replace(make_layout(), layers=(LayerKV(2, 8, 4), LayerKV(2, 8, 4, window=8))),
        replace(make_layout(), layers=(LayerKV(2, 8, 4), LayerKV(2, 8, 4), LayerKV(2, 8, 4, shared_with=0))),
    ],
    ids=[
        "layers",
        "block-size",
        "dtype",
        "int8",
        "fp8",
        "int4",
        "one-layer",
        "same-bytes",
        "window",
        "shared",
    ],
)
def test_different_layouts_have_different_digests(other: KVLayout) -> None:
    """Whatever changes the meaning of a block's bytes changes the name, also where the size stays."""
    assert other.digest() != make_layout().digest()
