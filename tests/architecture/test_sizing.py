"""What docs/sizing.md says a token takes is what our blocks take."""

import pytest

from paceline.core.kv_layout import KVLayout, LayerKV
from tests.architecture.documents import code_in, read

_ROWS = list(read("docs/sizing.md").section("What a token takes").rows())
_GIB = 1 << 30


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: f"{row[0]}-{row[4]}")
def test_what_a_token_takes(row: list[str]) -> None:
    """Bytes of a token and of a block, and what a GiB holds, follow from the layers that the row has."""
    layers, heads, size = (int(cell) for cell in row[1:4])
    (dtype,) = code_in(row[4])
    layout = KVLayout((LayerKV(heads, size, size),) * layers, 16, dtype)
    blocks = _GIB // layout.block_bytes
    shown = [int(cell.replace(",", "")) for cell in row[5:]]
    assert shown == [layout.block_bytes // 16, layout.block_bytes, blocks, blocks * 16]


def test_the_worked_example() -> None:
    """Its blocks and bytes are those of the default model, and the memory that it ends with is enough."""
    text = read("docs/sizing.md").section("What a worker needs").text
    layout = KVLayout((LayerKV(3, 64, 64),) * 30, 16, "bfloat16")
    of_one = layout.num_blocks_for(3000)
    needed = of_one * 32 * 10 // 8
    has = (2700 << 20) // layout.block_bytes
    for said in (
        f"takes {of_one} blocks",
        f"take {of_one * 32:,}",
        f"are {needed:,} blocks",
        f"({has:,} blocks)",
    ):
        assert said in text
    assert f"are {needed * layout.block_bytes / _GIB:.1f} GiB" in text
    assert needed <= has
