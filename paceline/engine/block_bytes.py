"""The bytes of KV blocks, in the host's memory or on a device: how they come out and go in, whatever stands in them.

host      read is a view; others map the pool
device    read and write are copies through pinned memory, on a queue of their own beside the steps'
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.kv_layout import BlockId
from paceline.engine.device import Device
from paceline.runtime.pool_memory import PoolMemory

# Of what a step has filled, so much is fetched before anybody asks.
_MAX_FETCHED_BYTES = 64 << 20


class BlockBytes(Protocol):
    """`blocks` [num_blocks, block_bytes], and what others do with them. See BlockMemory."""

    blocks: Tensor
    pool: PoolMemory | None

    def read(self, block_id: BlockId) -> memoryview:
        """See BlockMemory.read."""
        ...

    def write(self, block_id: BlockId, offset: int, data: bytes | memoryview) -> None:
        """See BlockMemory.write."""
        ...

    def copy(self, source: BlockId, target: BlockId) -> None:
        """See BlockMemory.copy."""
        ...

    def save(self, block_id: BlockId) -> Tensor:
        """See BlockSaver.save."""
        ...

    def restore(self, saved: Tensor, block_id: BlockId) -> None:
        """See BlockSaver.restore."""
        ...

    def fetch(self, block_ids: Sequence[BlockId]) -> None:
        """The step under way fills these blocks, and somebody will read them as soon as it has ended."""
        ...


class HostBlocks:
    """In memory that other processes can map, whoever made it."""

    def __init__(self, pool: PoolMemory, num_blocks: int, block_bytes: int) -> None:
        self.pool: PoolMemory | None = pool
        self.blocks = torch.frombuffer(pool.buffer, dtype=torch.uint8).view(num_blocks, block_bytes)
        self._bytes, self._block_bytes = pool.buffer, block_bytes

    def read(self, block_id: BlockId) -> memoryview:
        """A view, valid while the block is held."""
        start = block_id * self._block_bytes
        return self._bytes[start : start + self._block_bytes].toreadonly()

    def write(self, block_id: BlockId, offset: int, data: bytes | memoryview) -> None:
        """Overwrites part of a block."""
        start = block_id * self._block_bytes + offset
        self._bytes[start : start + len(data)] = data

    def copy(self, source: BlockId, target: BlockId) -> None:
        """Makes `target` hold what `source` holds."""
        self.write(target, 0, self.read(source))

    def save(self, block_id: BlockId) -> Tensor:
        """A copy."""
        return self.blocks[block_id].clone()

    def restore(self, saved: Tensor, block_id: BlockId) -> None:
        """Copies it back."""
        self.blocks[block_id].copy_(saved)

    def fetch(self, block_ids: Sequence[BlockId]) -> None:
        """They are here."""


class DeviceBlocks:
    """In the memory of a device, which no other process maps. On a host the same calls do the same without queues.

    `read` and `write` are for hand-overs, whose thread is not the steps': they go over a queue of their own, so as not to wait for the
    step that is being computed, and have been done when they return. So a block may be read once the step that wrote it has ended, and
    be computed with once it was written. `copy`, `save` and `restore` belong between two steps: they stand in the steps' own queue,
    and only that other queue waits for them, since what they read or wrote may be the next hand-over's.

    Each block that is full is read at once, for its checksum, and often by a hand-over. So a step's are fetched together, over a third
    queue while the step still chooses tokens, and kept until the next step has some, or until somebody writes to them.
    """

    def __init__(self, device: Device, num_blocks: int, block_bytes: int) -> None:
        self.pool: PoolMemory | None = None
        # Zeros, as the host gives them: the plain forms of attention multiply what nobody wrote by nothing, which is no number for some bytes.
        self.blocks = torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=device.place)
        self._device = device
        self._beside, self._fetching = self._queue(), self._queue()
        self._moved: torch.cuda.Event | None = None  # behind the last copy among the steps
        self._fetched: dict[BlockId, Tensor] = {}
        self._are_fetched: torch.cuda.Event | None = None
        # The zeros are written before anything on the other queue is.
        device.finish()

    def read(self, block_id: BlockId) -> memoryview:
        """A copy, in pinned memory."""
        fetched, are_fetched = self._fetched.get(block_id), self._are_fetched
        if fetched is not None:
            if are_fetched is not None:
                are_fetched.synchronize()
            return fetched.numpy().data.toreadonly()
        host = self._host(self.blocks.shape[1])
        with self._aside():
            host.copy_(self.blocks[block_id], non_blocking=self._device.is_gpu)
        self._wait_aside()
        return host.numpy().data.toreadonly()

    def write(self, block_id: BlockId, offset: int, data: bytes | memoryview) -> None:
        """Overwrites part of a block."""
        self._fetched.pop(block_id, None)
        host = self._host(len(data))
        host.numpy().data[:] = data
        with self._aside():
            self.blocks[block_id, offset : offset + len(data)].copy_(host, non_blocking=self._device.is_gpu)
        self._wait_aside()

    def copy(self, source: BlockId, target: BlockId) -> None:
        """On the device."""
        self._fetched.pop(target, None)
        self.blocks[target].copy_(self.blocks[source])
        self._moved = self._event()

    def save(self, block_id: BlockId) -> Tensor:
        """To pinned memory."""
        host = self._host(self.blocks.shape[1])
        host.copy_(self.blocks[block_id], non_blocking=self._device.is_gpu)
        self._moved = self._event()
        return host

    def restore(self, saved: Tensor, block_id: BlockId) -> None:
        """And back."""
        self._fetched.pop(block_id, None)
        self.blocks[block_id].copy_(saved, non_blocking=self._device.is_gpu)
        self._moved = self._event()

    def fetch(self, block_ids: Sequence[BlockId]) -> None:
        """Behind what the steps' queue has got so far, and beside what it gets after that."""
        block_bytes, computed = self.blocks.shape[1], self._event()
        block_ids = block_ids[: _MAX_FETCHED_BYTES // block_bytes]
        self._fetched = {}
        if not block_ids:
            return
        hosts = self._host(len(block_ids) * block_bytes).view(-1, block_bytes)
        with self._within(self._fetching, computed):
            for block_id, host in zip(block_ids, hosts, strict=True):
                host.copy_(self.blocks[block_id], non_blocking=self._device.is_gpu)
            self._are_fetched = self._event()
        self._fetched = dict(zip(block_ids, hosts, strict=True))

    def _host(self, num_bytes: int) -> Tensor:
        """Torch keeps pinned memory that is given back, until whoever still reads it is done."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.is_gpu)

    def _queue(self) -> torch.cuda.Stream | None:
        if not self._device.is_gpu:
            return None
        return torch.cuda.Stream(self._device.place)  # type: ignore[no-untyped-call] # it has no annotations

    def _event(self) -> torch.cuda.Event | None:
        """Behind what the current queue has got so far. A new one each time: another thread may be waiting for the last one."""
        if not self._device.is_gpu:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call] # the same
        event.record(torch.cuda.current_stream(self._device.place))
        return event

    def _aside(self) -> AbstractContextManager[object]:
        return self._within(self._beside, self._moved)

    @staticmethod
    def _within(
        queue: torch.cuda.Stream | None, after: torch.cuda.Event | None
    ) -> AbstractContextManager[object]:
        """What is done inside goes to this queue, behind that event."""
        if queue is None:
            return nullcontext()
        if after is not None:
            queue.wait_event(after)
        return torch.cuda.stream(queue)

    def _wait_aside(self) -> None:
        if self._beside is not None:
            self._beside.synchronize()
