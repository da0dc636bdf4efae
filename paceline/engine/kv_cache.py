"""The memory of the KV blocks: one tensor, block after block, and each layer's view into its group's blocks."""

import torch
import xxhash
from torch import Tensor

from paceline.core.kv_layout import BlockId, KVLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KVCache:
    """`num_blocks` blocks of `layout`. Block-major, so that a block is one run of bytes over the layers of its group.

        block 0: | layer 0 keys | layer 0 values | layer 1 keys | ... |   block 1: | layer 0 keys | ...

    Which group a block belongs to is for the block tables to know. `group_of[layer]` is the layer's, `keys[layer]` a view `[num_blocks, block_size, num_kv_heads, key_dim]`; `values[layer]` likewise. A layer that
    shares the keys and values of another one has the other one's views.
    """

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.block_bytes = layout.block_bytes
        # Not zeroed: pages are touched when they are first written, and nothing unwritten is ever read.
        pool = torch.empty(num_blocks, layout.block_items, dtype=TORCH_DTYPES[layout.dtype])
        self._bytes = memoryview(pool.view(torch.uint8).view(-1).numpy())  # type: ignore[arg-type] # numpy arrays are buffers
        self.group_of = {layer: index for index, group in enumerate(layout.groups) for layer in group.layers}
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._make_views(pool)

    def write_tokens(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores new tokens: `slots` [num_tokens], keys and values [num_tokens, num_kv_heads, dim].

        For a layer that shares another one's there is nothing to do: they are there already.
        """
        if self.layout.layers[layer].shared_with is not None:
            return
        blocks, offsets = slots // self.layout.block_size, slots % self.layout.block_size
        self.keys[layer][blocks, offsets] = keys
        self.values[layer][blocks, offsets] = values

    def gather(self, layer: int, block_table: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        """A sequence's keys and values at positions [first, last), each [last - first, num_kv_heads, dim]."""
        size = self.layout.block_size
        blocks = block_table[first // size : -(-last // size)]
        start = first - first // size * size
        keys = self.keys[layer][blocks].flatten(0, 1)
        values = self.values[layer][blocks].flatten(0, 1)
        return keys[start : start + last - first], values[start : start + last - first]

    def read(self, block_id: BlockId) -> memoryview:
        """The block's bytes, valid while the block is held."""
        start = block_id * self.block_bytes
        return self._bytes[start : start + self.block_bytes].toreadonly()

    def write(self, block_id: BlockId, offset: int, data: bytes) -> None:
        """Overwrites part of a block."""
        assert offset + len(data) <= self.block_bytes, "a write must stay inside its block"
        start = block_id * self.block_bytes + offset
        self._bytes[start : start + len(data)] = data

    def copy(self, source: BlockId, target: BlockId) -> None:
        """Makes `target` hold what `source` holds."""
        self.write(target, 0, bytes(self.read(source)))

    def checksum(self, block_id: BlockId) -> int:
        """XXH3-64 of the block's bytes."""
        return xxhash.xxh3_64_intdigest(self.read(block_id))

    def _make_views(self, pool: Tensor) -> None:
        starts = [0] * len(self.layout.groups)
        for index, layer in enumerate(self.layout.layers):
            group = self.group_of[index]
            for views, dim in ((self.keys, layer.key_dim), (self.values, layer.value_dim)):
                if layer.shared_with is not None:
                    views.append(views[layer.shared_with])
                    continue
                num_items = self.layout.block_size * layer.num_kv_heads * dim
                run = pool[:, starts[group] : starts[group] + num_items]
                views.append(run.view(-1, self.layout.block_size, layer.num_kv_heads, dim))
                starts[group] += num_items
