"""The memory of the KV blocks: one tensor, block after block, and each layer's view into its group's blocks."""

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from paceline.core.kv_layout import ALL_HEADS, BlockId, HeadPart, KVLayout, LayerKV
from paceline.engine.block_bytes import BlockBytes, DeviceBlocks, HostBlocks
from paceline.engine.device import HOST, Device
from paceline.engine.kv_quant import SCALE_DTYPE, dequantise, quantise
from paceline.runtime.pool_memory import PoolMemory

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KVCache:
    """`num_blocks` blocks of `layout`. Block-major, so that a block is one run of bytes over the layers of its group.

        block 0: | layer 0 keys | layer 0 values | its scales | layer 1 keys | ... |   block 1: | layer 0 keys | ...

    Which group a block belongs to is for the block tables to know; `group_of[layer]` is the layer's. `keys[layer]` is a view
    `[num_blocks, block_size, num_kv_heads, key_dim]`; `values[layer]` likewise. Of a quantised type they are bytes, and
    `key_scales[layer]` and `value_scales[layer]`, `[num_blocks, block_size, num_kv_heads, 1]`, give them their size. A layer
    that shares the keys and values of another one has the other one's views.

    A process that computes a part of the heads has views of those alone, `[num_blocks, block_size, its heads, key_dim]`. Its blocks are
    the whole ones, which it has in common with the processes of the other parts: they lie in a `pool` that all of them have mapped.
    On a device other than the host's there is no such pool.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        *,
        heads: HeadPart = ALL_HEADS,
        pool: PoolMemory | None = None,
        device: Device = HOST,
    ) -> None:
        self.layout = layout
        self.heads = heads
        self.block_bytes = layout.block_bytes
        self._store = _open_store(num_blocks, layout.block_bytes, pool, device)
        self.pool = self._store.pool
        self._is_quantised = layout.kv_type.scale_bytes > 0
        self.group_of = {layer: index for index, group in enumerate(layout.groups) for layer in group.layers}
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.key_scales: list[Tensor] = []
        self.value_scales: list[Tensor] = []
        self._make_views(self._store.blocks)

    @property
    def blocks(self) -> Tensor:
        """[num_blocks, block_bytes], as bytes, where they are."""
        return self._store.blocks

    def write_tokens(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores new tokens: `slots` [num_tokens], keys and values [num_tokens, num_kv_heads, dim].

        For a layer that shares another one's there is nothing to do: they are there already.
        """
        if self.layout.layers[layer].shared_with is not None:
            return
        at = slots // self.layout.block_size, slots % self.layout.block_size
        if self._is_quantised:
            self.keys[layer][at], self.key_scales[layer][at] = quantise(keys, self.layout.dtype)
            self.values[layer][at], self.value_scales[layer][at] = quantise(values, self.layout.dtype)
        else:
            self.keys[layer][at] = keys.to(self.keys[layer].dtype)
            self.values[layer][at] = values.to(self.values[layer].dtype)

    def gather(
        self, layer: int, block_table: Tensor, first: int, last: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """A sequence's keys and values at positions [first, last), each [last - first, num_kv_heads, dim], as `dtype`."""
        size = self.layout.block_size
        start = first - first // size * size
        blocks = self.gather_blocks(layer, block_table[first // size : -(-last // size)], dtype)
        keys, values = (found.flatten(0, 1)[start : start + last - first].to(dtype) for found in blocks)
        return keys, values

    def gather_blocks(self, layer: int, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of whole blocks, each [*blocks.shape, block_size, num_kv_heads, dim].

        As they are stored, or, of a quantised type, as `dtype`.
        """
        keys, values = self.keys[layer][blocks], self.values[layer][blocks]
        if not self._is_quantised:
            return keys, values
        sizes, kv_dtype = self.layout.layers[layer], self.layout.dtype
        key_scales, value_scales = self.key_scales[layer][blocks], self.value_scales[layer][blocks]
        return (
            dequantise(keys, key_scales, sizes.key_dim, kv_dtype, dtype),
            dequantise(values, value_scales, sizes.value_dim, kv_dtype, dtype),
        )

    def read(self, block_id: BlockId) -> memoryview:
        """The block's bytes, valid while the block is held."""
        return self._store.read(block_id)

    def write(self, block_id: BlockId, offset: int, data: bytes | memoryview) -> None:
        """Overwrites part of a block."""
        assert offset + len(data) <= self.block_bytes, "a write must stay inside its block"
        self._store.write(block_id, offset, data)

    def copy(self, source: BlockId, target: BlockId) -> None:
        """Makes `target` hold what `source` holds."""
        self._store.copy(source, target)

    def save(self, block_id: BlockId) -> Tensor:
        """See BlockSaver.save."""
        return self._store.save(block_id)

    def restore(self, saved: Tensor, block_id: BlockId) -> None:
        """See BlockSaver.restore."""
        self._store.restore(saved, block_id)

    def fetch(self, block_ids: Sequence[BlockId]) -> None:
        """See BlockBytes.fetch."""
        self._store.fetch(block_ids)

    def checksum(self, block_id: BlockId) -> int:
        """XXH3-64 of the block's bytes."""
        return xxhash.xxh3_64_intdigest(self.read(block_id))

    def _make_views(self, pool: Tensor) -> None:
        starts = [0] * len(self.layout.groups)
        for index, layer in enumerate(self.layout.layers):
            group = self.group_of[index]
            for views, vector_bytes, dtype in self._runs_of(layer):
                if layer.shared_with is not None:
                    views.append(views[layer.shared_with])
                    continue
                shape = (len(pool), self.layout.block_size, layer.num_kv_heads, vector_bytes)
                end = starts[group] + self.layout.block_size * layer.num_kv_heads * vector_bytes
                whole = pool[:, starts[group] : end].view(shape).view(dtype)
                views.append(whole.chunk(self.heads.count, dim=2)[self.heads.index])
                starts[group] = end

    def _runs_of(self, layer: LayerKV) -> list[tuple[list[Tensor], int, torch.dtype]]:
        """What a block holds of a layer, in order: whose views, bytes a vector, and type."""
        kv_type = self.layout.kv_type
        element = TORCH_DTYPES.get(self.layout.dtype, torch.uint8)
        runs = [
            (self.keys, kv_type.vector_bytes(layer.key_dim), element),
            (self.values, kv_type.vector_bytes(layer.value_dim), element),
        ]
        if self._is_quantised:
            runs += [
                (scales, kv_type.scale_bytes, SCALE_DTYPE) for scales in (self.key_scales, self.value_scales)
            ]
        return runs


def _open_store(num_blocks: int, block_bytes: int, pool: PoolMemory | None, device: Device) -> BlockBytes:
    if device.is_host:
        return HostBlocks(pool or PoolMemory(num_blocks * block_bytes), num_blocks, block_bytes)
    assert pool is None, "memory of a device is nobody else's"
    return DeviceBlocks(device, num_blocks, block_bytes)
