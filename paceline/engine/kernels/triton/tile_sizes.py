"""How much one program of attention takes on, by the geometry of the layer alone.

These numbers decide in which order sums are taken, so they decide the last bits of what comes out. They are therefore looked up here and
not tuned while a worker runs: two workers, or two starts of one, would round differently. docs/gpu-kernels.md has the reasons for each,
and what to try on a machine that has a GPU.
"""

from dataclasses import dataclass

from paceline.engine.kernels.triton.attention_arguments import KeyCut

# Tokens of a context that one program of a decode goes through. Counted from the beginning, so that neighbours change nothing.
SPLIT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class TileSize:
    """`rows` (a query token and a head each) meet `tile_tokens` tokens at a time."""

    rows: int
    tile_tokens: int
    num_warps: int
    num_stages: int


def decode_tile(cut: KeyCut, element_bytes: int) -> TileSize:
    """For one token a sequence: as few rows as the matrix unit takes, since there are hardly more."""
    if cut.width <= 128:
        size = TileSize(rows=16, tile_tokens=64, num_warps=4, num_stages=3)
    elif cut.width <= 256:
        size = TileSize(rows=16, tile_tokens=32, num_warps=4, num_stages=3)
    else:
        size = TileSize(rows=16, tile_tokens=16, num_warps=4, num_stages=2)
    return _narrower(size) if element_bytes > 2 else size


def prefill_tile(cut: KeyCut, element_bytes: int) -> TileSize:
    """For chunks: as many rows as fit, since each key is then read less often."""
    if cut.width <= 128:
        size = TileSize(rows=128, tile_tokens=64, num_warps=8, num_stages=2)
    elif cut.width <= 256:
        size = TileSize(rows=64, tile_tokens=32, num_warps=8, num_stages=2)
    else:
        size = TileSize(rows=16, tile_tokens=16, num_warps=4, num_stages=2)
    return _narrower(size) if element_bytes > 2 else size


def _narrower(size: TileSize) -> TileSize:
    """For elements of four bytes, which take twice the room."""
    return TileSize(max(16, size.rows // 2), max(16, size.tile_tokens // 2), size.num_warps, 1)
