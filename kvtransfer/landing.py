"""Where the pieces of a hand-over come down: each next byte has one place, and a piece for any other is refused."""

from collections.abc import Sequence

from kvtransfer.block_store import BlockStore
from kvtransfer.chunks import KvChunk, KvWritten
from paceline.core.errors import KvChecksumError, KvLostError
from paceline.core.kv_layout import BlockId


class Landing:
    """Writes into reserved blocks, in order, and into nothing else. The first `num_held` are here already."""

    def __init__(self, store: BlockStore, block_ids: Sequence[BlockId], num_held: int) -> None:
        self.num_bytes = 0
        self._store = store
        self._block_ids = block_ids
        # The next byte goes here.
        self._ordinal = num_held
        self._offset = 0

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
