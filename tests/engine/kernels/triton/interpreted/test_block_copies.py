"""Blocks go out of a pool and into another one unchanged."""

import pytest
import torch

from paceline.engine.kernels.triton.block_copies import gather_blocks, scatter_blocks


@pytest.mark.parametrize("block_bytes", [1, 6, 12, 64, 1023, 9000])
def test_blocks_are_the_same_bytes_in_another_pool(block_bytes: int) -> None:
    """Those that were asked for, in the order asked for, and no other one is touched."""
    torch.manual_seed(block_bytes)
    source, target = (torch.randint(0, 256, (9, block_bytes), dtype=torch.uint8) for _ in range(2))
    ids, elsewhere = torch.tensor([7, 0, 3]), torch.tensor([1, 8, 2])
    expected = target.clone()
    expected[elsewhere] = source[ids]
    packed = gather_blocks(source, ids)
    assert torch.equal(packed, source[ids])
    scatter_blocks(target, elsewhere, packed)
    assert torch.equal(target, expected)


def test_no_blocks_are_no_bytes() -> None:
    """Nothing is launched, and nothing fails."""
    pool = torch.zeros(2, 64, dtype=torch.uint8)
    nothing = gather_blocks(pool, torch.zeros(0, dtype=torch.int64))
    assert nothing.shape == (0, 64)
    scatter_blocks(pool, torch.zeros(0, dtype=torch.int64), nothing)
