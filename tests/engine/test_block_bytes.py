"""Blocks in the host's memory and on a device: the same bytes by the same calls."""

import pytest

from paceline.core.kv_layout import BlockId
from paceline.engine.block_bytes import BlockBytes, DeviceBlocks, HostBlocks
from paceline.engine.device import HOST
from paceline.runtime.pool_memory import PoolMemory

NUM_BLOCKS, BLOCK_BYTES = 3, 40


@pytest.fixture(params=["host", "device"])
def blocks(request: pytest.FixtureRequest) -> BlockBytes:
    """Those of a device are on the host here: their calls are the same, and wait for nothing."""
    if request.param == "host":
        return HostBlocks(PoolMemory(NUM_BLOCKS * BLOCK_BYTES), NUM_BLOCKS, BLOCK_BYTES)
    return DeviceBlocks(HOST, NUM_BLOCKS, BLOCK_BYTES)


def test_what_is_written_is_read(blocks: BlockBytes) -> None:
    """At its place in its block, and nowhere else."""
    blocks.write(BlockId(1), 8, b"12345")
    blocks.write(BlockId(1), 13, memoryview(b"67"))
    assert bytes(blocks.read(BlockId(1))) == bytes(8) + b"1234567" + bytes(BLOCK_BYTES - 15)
    assert bytes(blocks.read(BlockId(0))) == bytes(blocks.read(BlockId(2))) == bytes(BLOCK_BYTES)


def test_nobody_writes_through_what_was_read(blocks: BlockBytes) -> None:
    """It is a view that is for reading, or a copy that pretends to be one."""
    with pytest.raises(TypeError, match="read-only"):
        blocks.read(BlockId(0))[0] = 1


def test_a_copied_block_is_another_one(blocks: BlockBytes) -> None:
    """What happens to the first does not happen to the second."""
    blocks.write(BlockId(0), 0, b"a" * BLOCK_BYTES)
    blocks.copy(BlockId(0), BlockId(2))
    blocks.write(BlockId(0), 0, b"b" * BLOCK_BYTES)
    assert bytes(blocks.read(BlockId(2))) == b"a" * BLOCK_BYTES


def test_a_saved_block_comes_back_elsewhere(blocks: BlockBytes) -> None:
    """However its old place is used meanwhile."""
    blocks.write(BlockId(0), 0, b"a" * BLOCK_BYTES)
    saved = blocks.save(BlockId(0))
    blocks.write(BlockId(0), 0, b"b" * BLOCK_BYTES)
    blocks.restore(saved, BlockId(1))
    assert bytes(blocks.read(BlockId(1))) == b"a" * BLOCK_BYTES


def test_what_was_fetched_is_what_is_there(blocks: BlockBytes) -> None:
    """However it was written to since, and whatever was fetched before."""
    ids = [BlockId(index) for index in range(NUM_BLOCKS)]
    for block_id in ids:
        blocks.write(block_id, 0, bytes([65 + block_id]) * BLOCK_BYTES)
    saved = blocks.save(BlockId(0))
    blocks.fetch(ids)
    blocks.write(BlockId(0), 0, b"z")
    blocks.copy(BlockId(2), BlockId(1))
    assert [bytes(blocks.read(block_id))[:2] for block_id in ids] == [b"zA", b"CC", b"CC"]
    blocks.fetch(ids[:2])
    blocks.restore(saved, BlockId(1))
    blocks.write(BlockId(2), 0, b"y")
    assert [bytes(blocks.read(block_id))[:2] for block_id in ids] == [b"zA", b"AA", b"yC"]
    blocks.fetch([])
    assert bytes(blocks.read(BlockId(0)))[:2] == b"zA"


def test_a_fetched_block_stays_what_it_was_for_whoever_has_it(blocks: BlockBytes) -> None:
    """As long as it is held, which is as long as nobody writes to it."""
    blocks.write(BlockId(1), 0, b"a" * BLOCK_BYTES)
    blocks.fetch([BlockId(1)])
    found = blocks.read(BlockId(1))
    blocks.fetch([BlockId(0)])
    assert bytes(found) == b"a" * BLOCK_BYTES


def test_a_device_has_no_pool_to_map() -> None:
    """Other processes are offered the host's memory only."""
    assert DeviceBlocks(HOST, NUM_BLOCKS, BLOCK_BYTES).pool is None
