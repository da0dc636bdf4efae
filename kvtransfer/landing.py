"""Where the pieces of a hand-over come down: each next byte has one place, and a piece for any other is refused."""

from collections.abc import Sequence
from typing import Protocol

import xxhash

from kvtransfer.block_store import BlockStore
from kvtransfer.chunks import KvChunk, KvWritten
from kvtransfer.conversion import BlockConversion
from paceline.core.errors import KvChecksumError, KvLostError
from paceline.core.kv_layout import BlockId


class Landing(Protocol):
    """What a receiver needs of such a place."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the owner's that have come."""

    @property
    def num_bytes(self) -> int:
        """Bytes that have come."""

    def take(self, message: KvChunk | KvWritten) -> None:
        """The next piece, or a whole block that is here already; raises KvError for any other."""

    def require_all(self) -> None:
        """Raises KvLostError unless every block is here."""


class DirectLanding:
    """Writes into reserved blocks, in order, and into nothing else. The first `num_held` are here already."""

    def __init__(self, store: BlockStore, block_ids: Sequence[BlockId], num_held: int) -> None:
        self.num_bytes = 0
        self._num_held = num_held
        self._store = store
        self._block_ids = block_ids
        # The next byte goes here.
        self._ordinal = num_held
        self._offset = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that have come."""
        return self._ordinal - self._num_held

    def take(self, message: KvChunk | KvWritten) -> None:
        """The next piece, or a whole block that is here already; a block that is whole is checked as it now lies in the store."""
        if isinstance(message, KvWritten):
            self._note_written(message)
        else:
            self._write(message)

    def _write(self, chunk: KvChunk) -> None:
        self._require_next(chunk.ordinal, chunk.offset, len(chunk.data))
        self._store.write(self._block_ids[self._ordinal], self._offset, chunk.data)
        self.num_bytes += len(chunk.data)
        self._offset += len(chunk.data)
        if self._offset == self._store.block_bytes:
            self._finish_block(chunk.checksum)

    def require_all(self) -> None:
        """Raises KvLostError unless every block is here."""
        if self._ordinal != len(self._block_ids):
            raise KvLostError(f"the hand-over ended at block {self._ordinal} of {len(self._block_ids)}")

    def _note_written(self, block: KvWritten) -> None:
        """It may lie where it belongs or anywhere else: the checksum is over its own place."""
        self._require_next(block.ordinal, 0, block.num_bytes)
        if block.num_bytes != self._store.block_bytes:
            raise KvLostError(f"{block.num_bytes} bytes are not the whole block {self._ordinal}")
        self.num_bytes += block.num_bytes
        self._finish_block(block.checksum)

    def _require_next(self, ordinal: int, offset: int, num_bytes: int) -> None:
        if self._ordinal == len(self._block_ids):
            raise KvLostError("a piece came after the last block")
        if (ordinal, offset) != (self._ordinal, self._offset):
            raise KvLostError(
                f"expected block {self._ordinal} from byte {self._offset}, got block {ordinal} from byte {offset}"
            )
        if not 0 < num_bytes <= self._store.block_bytes - self._offset:
            raise KvLostError(f"a piece of {num_bytes} bytes does not fit into block {self._ordinal}")

    def _finish_block(self, checksum: int) -> None:
        if self._store.checksum(self._block_ids[self._ordinal]) != checksum:
            raise KvChecksumError(self._ordinal)
        self._ordinal += 1
        self._offset = 0


class ConvertingLanding:
    """For blocks that are cut in another way than ours: each comes down beside the store, is checked, and then written where it belongs."""

    def __init__(
        self,
        conversion: BlockConversion,
        store: BlockStore,
        block_ids: Sequence[BlockId],
        *,
        num_held: int,
        num_their_blocks: int,
    ) -> None:
        self._conversion = conversion
        self._store = store
        self._block_ids = block_ids
        self._num_tokens_held = num_held * conversion.ours.block_size
        self._num_their_held = conversion.num_their_blocks_held(self._num_tokens_held)
        self._beside = _OneBlock(conversion.theirs.block_bytes)
        self._landing = DirectLanding(self._beside, [BlockId(0)] * num_their_blocks, self._num_their_held)

    @property
    def num_blocks(self) -> int:
        """Blocks of theirs that have come."""
        return self._landing.num_blocks

    @property
    def num_bytes(self) -> int:
        """Bytes that have come."""
        return self._landing.num_bytes

    def take(self, message: KvChunk | KvWritten) -> None:
        """The next piece; what an engine has written among our blocks itself lies in the wrong places."""
        if isinstance(message, KvWritten):
            raise KvLostError("a block that is cut in another way was written in place")
        num_before = self._landing.num_blocks
        self._landing.take(message)
        if self._landing.num_blocks > num_before:
            self._conversion.write(
                self._num_their_held + num_before,
                self._beside.read(BlockId(0)),
                self._store,
                self._block_ids,
                self._num_tokens_held,
            )

    def require_all(self) -> None:
        """Raises KvLostError unless every block is here."""
        self._landing.require_all()


class _OneBlock:
    """A store of one block, for whatever is looked at before it may go further."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._bytes = memoryview(bytearray(block_bytes))

    def read(self, block_id: BlockId) -> memoryview:  # noqa: ARG002 - there is only one
        """The block's bytes."""
        return self._bytes.toreadonly()

    def write(self, block_id: BlockId, offset: int, data: bytes | memoryview) -> None:  # noqa: ARG002
        """Puts `data` at `offset`."""
        self._bytes[offset : offset + len(data)] = data

    def checksum(self, block_id: BlockId) -> int:  # noqa: ARG002
        """XXH3-64 of the block's bytes."""
        return xxhash.xxh3_64_intdigest(self._bytes)
