"""Decode steps that are computed as one graph of a GPU's work: one call starts what otherwise takes thousands.

A graph does the same to the same memory each time. So there is one for each of a few shapes, with inputs that stay where they are, and a step
is padded to the next one. Elsewhere, and in tests, the same inputs are computed without a graph.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.kv_layout import BlockId, KVLayout
from paceline.engine.device import Device
from paceline.engine.forward_batch import ForwardBatch
from paceline.engine.kernels.cpu.paged_attention import RaggedTables
from paceline.engine.kernels.triton.attention_arguments import RaggedBatch
from paceline.engine.kernels.triton.paged_attention import StepTables
from paceline.engine.padding import DecodeShape, nobody, padded, shape_for
from paceline.engine.step import BlockTable, ScheduledSequence, SchedulerOutput
from paceline.engine.triton_attention import fixed_tables

# Computes logits; its inputs are always the same tensors.
Pass = Callable[[], Tensor]
# Gives what does the pass again, on what its inputs hold then. Its logits are good until the next one is done.
Capture = Callable[[Pass], Pass]
# (batch, what its layers share) -> logits; see ModelRunner.forward.
Forward = Callable[[ForwardBatch, dict[Any, Any]], Tensor]


def without_graph(compute: Pass) -> Pass:
    """Captures nothing: a pass is computed again call by call."""
    return compute


class CudaCapture:
    """Captures graphs that have their memory in common, of which only one is done at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Pass) -> Pass:
        """Computed once before: what is made at the first call, such as a compiled kernel, is no part of a graph."""
        beside = torch.cuda.Stream(self._device.place)  # type: ignore[no-untyped-call] # it has no annotations
        beside.wait_stream(torch.cuda.current_stream(self._device.place))
        with torch.cuda.stream(beside):
            compute()
        torch.cuda.current_stream(self._device.place).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = compute()

        def replay() -> Tensor:
            """One call."""
            graph.replay()
            return logits

        return replay


class FixedInputs:
    """The inputs of one shape, as one run of whole numbers on the device; `batch` and `tables` are views of it.

        | token ids | positions | slots of each group | sequences of each group, 4 numbers each | block tables of each group |

    A sequence's block table has room for the longest context, and begins at the same place whatever stands in it.
    """

    def __init__(self, shape: DecodeShape, layout: KVLayout, device: Device) -> None:
        rows, groups = shape.num_rows, len(layout.groups)
        self._block_size, self._device = layout.block_size, device
        width = -(-shape.max_context // layout.block_size)
        self._sizes = [rows] * (2 + groups) + [4 * rows] * groups
        # What the host knows to stand in each row, since most of it stays what it is from step to step.
        self._tables = np.zeros((groups, rows, width), np.int64)
        self._rows: list[tuple[BlockTable, ...] | None] = [None] * rows
        size = sum(self._sizes)
        self._numbers = torch.zeros(size + self._tables.size, dtype=torch.int64, device=device.place)
        token_ids, positions, *rest = torch.split(self._numbers[:size], self._sizes)
        self.batch = ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mappings=tuple(rest[:groups]),
            queries=(),
            sample_rows=torch.arange(rows, device=device.place),
            sample_tasks=(),
            sample_positions=(),
            score_rows=torch.empty(0, dtype=torch.long, device=device.place),
            score_tasks=(),
        )
        tables = self._numbers[size:].view(groups, rows * width)
        self.tables = [
            StepTables(RaggedBatch(RaggedTables(each.view(rows, 4), table), 1, shape.max_context), None)
            for each, table in zip(rest[groups:], tables, strict=True)
        ]

    def fill(self, scheduled: Sequence[ScheduledSequence]) -> None:
        """Puts a step of just this many rows there, by one copy that nobody waits for."""
        self._note_tables(scheduled)
        groups, _, width = self._tables.shape
        ends = [item.end for item in scheduled]
        sequences = [number for row, end in enumerate(ends) for number in (row, row + 1, end, row * width)]
        numbers = [item.token_ids[0] for item in scheduled] + [item.start for item in scheduled]
        for group in range(groups):
            numbers += [self._slot(item, group) for item in scheduled]
        numbers += sequences * groups
        # Pinned memory is made anew each time, or rather given out again by torch: the last copy may still be reading.
        host = torch.empty(len(self._numbers), dtype=torch.int64, pin_memory=self._device.is_gpu)
        in_host = host.numpy()
        in_host[: len(numbers)] = numbers
        in_host[len(numbers) :] = self._tables.ravel()
        self._numbers.copy_(host, non_blocking=self._device.is_gpu)

    def _note_tables(self, scheduled: Sequence[ScheduledSequence]) -> None:
        """All of a table, as far as there is room: its sequence comes to its later blocks while it is the same one.

        Behind its end a row keeps what stood there: no program looks at it.
        """
        for row, item in enumerate(scheduled):
            if self._rows[row] is item.block_tables:
                continue
            self._rows[row] = item.block_tables
            for group, table in enumerate(item.block_tables):
                block_ids = [block_id or 0 for block_id in table[: self._tables.shape[2]]]
                self._tables[group, row, : len(block_ids)] = block_ids

    def _slot(self, item: ScheduledSequence, group: int) -> int:
        """Where the token of a row goes; see `build_forward_batch`."""
        block_id = item.block_tables[group][item.start // self._block_size]
        assert block_id is not None, "a token that is computed has a place"
        return block_id * self._block_size + item.start % self._block_size


class DecodeGraphs:
    """One pass for each shape. Used by the thread of its model runner, in inference mode."""

    def __init__(
        self,
        passes: Mapping[DecodeShape, tuple[FixedInputs, Pass]],
        scratch: BlockId,
        device: Device,
    ) -> None:
        self._passes = passes
        self._device = device
        self._shapes = tuple(passes)
        self._scratch = scratch

    @classmethod
    def captured(
        cls,
        shapes: Sequence[DecodeShape],
        layout: KVLayout,
        device: Device,
        forward: Forward,
        capture: Capture,
        scratch: BlockId,
    ) -> "DecodeGraphs":
        """All of them now, so that no request waits for one. What they compute meanwhile goes to the `scratch` block."""
        passes = {}
        alone = SchedulerOutput((nobody(scratch, len(layout.groups)),), ())
        for shape in shapes:
            inputs = FixedInputs(shape, layout, device)
            inputs.fill(padded(alone, shape.num_rows, scratch).scheduled)
            passes[shape] = inputs, capture(_pass_of(inputs, forward))
        return cls(passes, scratch, device)

    def logits(self, output: SchedulerOutput) -> Tensor | None:
        """Of the rows after which tokens are chosen, [num_samples, vocab_size]; None for a step that is of no shape there is."""
        shape = shape_for(output, self._shapes)
        if shape is None:
            return None
        inputs, compute = self._passes[shape]
        inputs.fill(padded(output, shape.num_rows, self._scratch).scheduled)
        logits, num_rows = compute(), len(output.scheduled)
        if all(len(item.samples) == 1 for item in output.scheduled):
            return logits[:num_rows]
        # Several candidates of one sequence, or none.
        rows = [row for row, item in enumerate(output.scheduled) for _ in item.samples]
        return logits[self._device.upload((torch.tensor(rows, dtype=torch.long),))[0]]


def _pass_of(inputs: FixedInputs, forward: Forward) -> Pass:
    return lambda: forward(inputs.batch, fixed_tables(inputs.tables))
