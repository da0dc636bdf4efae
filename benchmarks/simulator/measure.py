"""Measures real steps: a real engine on a real model, with batches of every kind that a cost model has a number for.

Decoding sequences arrive as they do in a hand-over, with room for a prompt that nobody computes: what lies in the blocks does
not change how long attention takes.
"""

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.simulator.cost import TEXTBOOK, StepWork
from benchmarks.simulator.runner import CostedRunner, VirtualClock
from benchmarks.simulator.spec import scheduler_config
from benchmarks.simulator.trace import TraceRequest, spec_of
from paceline.core.kv_layout import BlockId, KVLayout
from paceline.core.request import FirstToken, SequenceSpec
from paceline.engine.block_pool import BlockPool
from paceline.engine.engine import Engine, Runner
from paceline.engine.model_loader import LoadedModel, load_model
from paceline.engine.model_runner import ModelRunner
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import SequenceRole

# A bfloat16 or float32 of about 0.01 whichever way it is cut: memory that was never written is not read as memory is.
_FILLING = b"\x3c"


@dataclass(frozen=True, slots=True)
class StepSample:
    """One real step."""

    work: StepWork
    duration_s: float


@dataclass(frozen=True, slots=True)
class Cell:
    """So many sequences decode at one context while prompts are computed, in chunks of what the budget leaves."""

    num_decodes: int = 0
    context: int = 0
    num_prompts: int = 0
    num_prompt_tokens: int = 0
    budget: int = 512
    num_steps: int = 2


@dataclass(frozen=True, slots=True)
class Lab:
    """A model, and room for its KV."""

    runner: Runner
    layout: KVLayout
    num_blocks: int
    vocab_size: int

    def engine(self, runner: Runner, **settings: int) -> Engine:
        """A new engine with an empty cache, on the same memory."""
        pool = BlockPool(self.num_blocks, self.layout.block_size, self.layout.groups)
        return Engine(Scheduler(scheduler_config(**settings), pool, runner.memory), runner)


def open_lab(directory: Path, dtype: str, block_size: int, num_kv_tokens: int) -> Lab:
    """The model in `directory`; see `lab_of`."""
    return lab_of(load_model(directory, dtype, block_size), num_kv_tokens)


def lab_of(loaded: LoadedModel, num_kv_tokens: int) -> Lab:
    """A model with room for so many tokens, its KV memory written to once."""
    num_blocks = num_kv_tokens // loaded.layout.block_size
    runner = ModelRunner(loaded.model, loaded.layout, num_blocks)
    filling = _FILLING * loaded.layout.block_bytes
    for block_id in range(num_blocks):
        runner.memory.write(BlockId(block_id), 0, filling)
    return Lab(runner, loaded.layout, num_blocks, loaded.vocab_size)


def grid(max_num_seqs: int, max_num_batched_tokens: int, max_context: int, factor: int = 2) -> list[Cell]:
    """Cells up to these limits, sizes `factor` apart: decodes alone, prompts alone, and both together."""
    batches = _powers(1, max_num_seqs, factor)
    contexts = _powers(64, max_context, 2 * factor)
    chunks = _powers(16, max_num_batched_tokens, factor)
    return [
        *(Cell(batch, context) for batch, context in itertools.product(batches, contexts)),
        *(Cell(num_prompts=1, num_prompt_tokens=chunk, budget=chunk) for chunk in chunks),
        *(Cell(num_prompts=1, num_prompt_tokens=max_context, budget=chunk) for chunk in chunks[-1:]),
        *(
            Cell(num_prompts=4, num_prompt_tokens=chunk, budget=4 * chunk)
            for chunk in chunks
            if 4 * chunk <= max_num_batched_tokens
        ),
        *(
            Cell(batch, context, 1, chunk, budget=batch + chunk)
            for batch, context, chunk in itertools.product(batches[::-2], contexts[-1:], chunks[::-2])
        ),
    ]


def measure_round(lab: Lab, cells: Sequence[Cell]) -> list[StepSample]:
    """Every step of every cell once; two rounds of the same cells have the same steps."""
    numbers = itertools.count()
    return [sample for cell in cells for sample in _steps(lab, cell, numbers)]


def medians(rounds: Sequence[list[StepSample]]) -> list[StepSample]:
    """Each step over all rounds: the speed of a machine changes while it is measured."""
    return [
        StepSample(each[0].work, statistics.median(sample.duration_s for sample in each))
        for each in zip(*rounds, strict=True)
    ]


def _steps(lab: Lab, cell: Cell, numbers: Iterator[int]) -> Iterator[StepSample]:
    # The clock that it moves is nobody's: what is wanted is that it tells the work of each step.
    runner = CostedRunner(lab.runner, TEXTBOOK, VirtualClock())
    seats = cell.num_decodes + cell.num_prompts
    engine = lab.engine(runner, max_num_batched_tokens=cell.budget, max_num_seqs=max(1, seats))
    _begin_decodes(engine, [_spec(lab, cell.context, 1000, numbers) for _ in range(cell.num_decodes)])
    prompts = [_spec(lab, cell.num_prompt_tokens, 1, numbers) for _ in range(cell.num_prompts)]
    for spec in prompts:
        engine.add(spec, SequenceRole.GENERATE)
    num_left = cell.num_steps if not prompts else 1_000_000
    while engine.has_work() and num_left:
        start_s = time.perf_counter()
        engine.step()
        yield StepSample(runner.work, time.perf_counter() - start_s)
        num_left -= 1
        if prompts and not runner.work.num_chunks:
            return


def _begin_decodes(engine: Engine, specs: Sequence[SequenceSpec]) -> None:
    for spec in specs:
        engine.add(spec, SequenceRole.AWAIT_KV)
    if specs:
        assert engine.step().idle, "a hand-over computes nothing"
    for spec in specs:
        engine.commit(spec.sequence_id, [FirstToken(spec.prompt_ids[0])])


def _spec(lab: Lab, num_tokens: int, num_output_tokens: int, numbers: Iterator[int]) -> SequenceSpec:
    """A prompt that no other one shares anything with."""
    return spec_of(TraceRequest(0.0, num_tokens, num_output_tokens), next(numbers), lab.vocab_size)


def _powers(first: int, last: int, factor: int) -> list[int]:
    """`first`, and so many times it that it comes no further than `last`; at least one."""
    found = [first]
    while found[-1] * factor <= last:
        found.append(found[-1] * factor)
    return found
