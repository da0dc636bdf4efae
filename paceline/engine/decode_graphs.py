"""Decode steps that are computed as one graph of a GPU's work: one call starts what otherwise takes thousands.

A graph does the same to the same memory each time. So there is one for each of a few shapes, with inputs that stay where they are, and a step
is padded to the next one. Elsewhere, and in tests, the same inputs are computed without a graph.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.core.kv_layout import BlockId, KVLayout
from paceline.engine.device import Device
from paceline.engine.forward_batch import ForwardBatch, build_forward_batch
from paceline.engine.kernels.cpu.paged_attention import RaggedTables
from paceline.engine.kernels.triton.attention_arguments import RaggedBatch
from paceline.engine.kernels.triton.paged_attention import StepTables
from paceline.engine.padding import DecodeShape, nobody, padded, shape_for
from paceline.engine.step import SchedulerOutput
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
        self._width = -(-shape.max_context // layout.block_size)
        self._sizes = [rows] * (2 + groups) + [4 * rows] * groups + [rows * self._width] * groups
        self._device = device
        self._numbers = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device.place)
        token_ids, positions, *rest = torch.split(self._numbers, self._sizes)
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
        self.tables = [
            StepTables(RaggedBatch(RaggedTables(sequences.view(rows, 4), tables), 1, shape.max_context), None)
            for sequences, tables in zip(rest[groups : 2 * groups], rest[2 * groups :], strict=True)
        ]

    def fill(self, batch: ForwardBatch) -> None:
        """Puts a step of just this many rows there, by one copy that nobody waits for."""
        groups = len(batch.slot_mappings)
        # Pinned memory is made anew each time, or rather given out again by torch: the last copy may still be reading.
        host = torch.zeros(len(self._numbers), dtype=torch.int64, pin_memory=self._device.is_gpu)
        token_ids, positions, *rest = torch.split(host, self._sizes)
        token_ids.copy_(batch.token_ids)
        positions.copy_(batch.positions)
        for group in range(groups):
            rest[group].copy_(batch.slot_mappings[group])
            tables = rest[2 * groups + group].view(-1, self._width)
            for row, part in zip(tables, batch.queries, strict=True):
                row[: len(part.block_tables[group])] = part.block_tables[group]
            rest[groups + group].copy_(self._sequences(batch))
        self._numbers.copy_(host, non_blocking=self._device.is_gpu)

    def _sequences(self, batch: ForwardBatch) -> Tensor:
        """See RaggedTables."""
        return torch.tensor(
            [
                number
                for row, part in enumerate(batch.queries)
                for number in (row, row + 1, part.context, row * self._width)
            ]
        )


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
            inputs.fill(build_forward_batch(padded(alone, shape.num_rows, scratch), layout.block_size))
            passes[shape] = inputs, capture(_pass_of(inputs, forward))
        return cls(passes, scratch, device)

    def padded(self, output: SchedulerOutput) -> tuple[SchedulerOutput, DecodeShape] | None:
        """The step as one of the shapes; None if it is none of theirs."""
        shape = shape_for(output, self._shapes)
        return None if shape is None else (padded(output, shape.num_rows, self._scratch), shape)

    def logits(self, batch: ForwardBatch, shape: DecodeShape) -> Tensor:
        """Of the rows after which tokens are chosen, [num_samples, vocab_size], of a padded step."""
        inputs, compute = self._passes[shape]
        inputs.fill(batch)
        logits, rows = compute(), batch.sample_rows
        if rows.tolist() == list(range(len(rows))):
            return logits[: len(rows)]
        # Several candidates of one sequence.
        return logits[self._device.upload((rows,))[0]]


def _pass_of(inputs: FixedInputs, forward: Forward) -> Pass:
    return lambda: forward(inputs.batch, fixed_tables(inputs.tables))
