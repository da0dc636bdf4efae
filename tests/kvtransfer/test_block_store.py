"""The bytes of blocks."""

import pytest
import xxhash

from kvtransfer.block_store import MemoryBlockStore
from paceline.core.kv_layout import BlockId


def test_a_block_reads_as_it_was_written() -> None:
    """Pieces written at their offsets make up the block, and its neighbours stay as they were."""
    store = MemoryBlockStore(num_blocks=3, block_bytes=8)
    store.write(BlockId(1), 0, b"abc")
    store.write(BlockId(1), 3, b"defgh")
    assert [bytes(store.read(BlockId(index))) for index in range(3)] == [bytes(8), b"abcdefgh", bytes(8)]


def test_the_checksum_is_of_the_bytes() -> None:
    """A block's checksum is XXH3-64 of what it holds now."""
    store = MemoryBlockStore(num_blocks=1, block_bytes=4)
    store.write(BlockId(0), 0, b"wxyz")
    assert store.checksum(BlockId(0)) == xxhash.xxh3_64_intdigest(b"wxyz")


@pytest.mark.parametrize(("offset", "data"), [(-1, b"a"), (7, b"ab"), (0, b"123456789")])
def test_a_write_never_leaves_its_block(offset: int, data: bytes) -> None:
    """A piece that reaches past either end of its block is our bug, and changes nothing."""
    store = MemoryBlockStore(num_blocks=3, block_bytes=8)
    with pytest.raises(AssertionError, match="leaves its block"):
        store.write(BlockId(1), offset, data)
    assert all(not any(store.read(BlockId(index))) for index in range(3))


def test_what_is_read_cannot_be_written_through() -> None:
    """A reader cannot change the pool."""
    view = MemoryBlockStore(num_blocks=1, block_bytes=4).read(BlockId(0))
    assert view.readonly
