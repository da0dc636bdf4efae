"""The main loop's three calls: schedule, execute, update. One thread calls it; it starts none."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.kv_layout import BlockId
from paceline.core.prefix import PrefixChanges
from paceline.core.request import FirstToken, SequenceId, SequenceSpec
from paceline.engine.events import Event
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import SequenceRole
from paceline.engine.step import ExpertTokens, SchedulerOutput, StepOutput
from paceline.engine.swap import BlockSaver


class BlockMemory(BlockSaver, Protocol):
    """Memory of KV blocks: what a hand-over reads from and writes into, and what is swapped out."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        ...

    def read(self, block_id: BlockId) -> memoryview:
        """The block's bytes, valid while the block is held."""
        ...

    def write(self, block_id: BlockId, offset: int, data: bytes) -> None:
        """Overwrites part of a block."""
        ...

    def copy(self, source: BlockId, target: BlockId) -> None:
        """Makes `target` hold what `source` holds."""
        ...

    def checksum(self, block_id: BlockId) -> int:
        """XXH3-64 of the block's bytes."""
        ...


class Runner(Protocol):
    """Computes what the scheduler decided; the torch one and the fake one both do."""

    @property
    def memory(self) -> BlockMemory:
        """Where the blocks are."""
        ...

    def execute(self, output: SchedulerOutput) -> StepOutput:
        """Computes one step; blocks until it is done."""
        ...


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A picture of an engine between two steps."""

    num_blocks: int
    num_free_blocks: int
    num_running: int
    num_waiting: int
    num_pending_tokens: int
    num_preemptions: int
    num_steps: int
    max_steps_to_release: int
    # Of all steps; empty for a model without experts.
    expert_tokens: tuple[ExpertTokens, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought; `idle` when it could not compute anything."""

    events: tuple[Event, ...]
    changes: PrefixChanges
    idle: bool


class Engine:
    """Scheduler and runner together. Its commands take effect between two steps."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._num_steps = 0
        self._max_steps_to_release = 0
        self._expert_tokens: tuple[ExpertTokens, ...] = ()

    def add(self, spec: SequenceSpec, role: SequenceRole) -> None:
        """Queues a sequence."""
        self._scheduler.add(spec, role)

    def commit(self, sequence_id: SequenceId, first_tokens: Sequence[FirstToken]) -> None:
        """The sequence's KV has arrived in its reserved blocks; see Scheduler.commit."""
        self._scheduler.commit(sequence_id, first_tokens)

    def resume(self, sequence_id: SequenceId, candidate: int, num_blocks: int) -> None:
        """What was asked for with Recall is here, as far as it comes; see Scheduler.resume."""
        self._scheduler.resume(sequence_id, candidate, num_blocks)

    def release(self, sequence_id: SequenceId, asked_at_step: int, candidate: int | None = None) -> None:
        """Forgets a sequence, or one candidate of it. Someone asked for it when `asked_at_step` steps had been taken."""
        self._scheduler.release(sequence_id, candidate)
        self._max_steps_to_release = max(self._max_steps_to_release, self._num_steps - asked_at_step)

    def has_work(self) -> bool:
        """Whether a step could do anything."""
        return self._scheduler.has_work()

    def step(self) -> StepResult:
        """One step of every sequence that is scheduled."""
        output = self._scheduler.schedule()
        computed = StepOutput()
        if output.scheduled:
            computed = self._runner.execute(output)
            self._num_steps += 1
            self._count_experts(computed.expert_tokens)
        events = self._scheduler.update(output, computed)
        return StepResult(tuple(events), self._scheduler.pool.take_changes(), idle=not output.scheduled)

    def stats(self) -> EngineStats:
        """A picture of now."""
        queues, pool = self._scheduler.stats(), self._scheduler.pool
        return EngineStats(
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_available,
            num_running=queues.num_running,
            num_waiting=queues.num_waiting,
            num_pending_tokens=queues.num_pending_tokens,
            num_preemptions=queues.num_preemptions,
            num_steps=self._num_steps,
            max_steps_to_release=self._max_steps_to_release,
            expert_tokens=self._expert_tokens,
        )

    def _count_experts(self, step: tuple[ExpertTokens, ...]) -> None:
        so_far = self._expert_tokens
        self._expert_tokens = tuple(map(ExpertTokens.plus, so_far, step)) if so_far else step

    def check_invariants(self) -> None:
        """See Scheduler.check_invariants."""
        self._scheduler.check_invariants()
