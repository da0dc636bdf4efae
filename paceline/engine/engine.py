"""The main loop's three calls: schedule, execute, update. One thread calls it; it starts none."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.clock import Clock, monotonic
from paceline.core.kv_layout import BlockId
from paceline.core.pace import ByClass, Pace, PendingTokens
from paceline.core.prefix import PrefixChanges
from paceline.core.request import FirstToken, SequenceId, SequenceSpec
from paceline.engine.block_pool import BlockPoolStats
from paceline.engine.events import Event
from paceline.engine.pace import PaceMeter
from paceline.engine.scheduler import Scheduler
from paceline.engine.scheduler_stats import SchedulerStats, TokensByLane
from paceline.engine.sequence import SequenceRole
from paceline.engine.step import ExpertTokens, SchedulerOutput, StepOutput
from paceline.engine.step_report import Admission, AdmissionLog, StepReport, num_empty_slots
from paceline.engine.swap import BlockSaver
from paceline.runtime.pool_memory import PoolMemory

# Counting empty slots takes a look at each sequence's tables; between two looks they change little.
_LOOK_EVERY_STEPS = 16


class BlockMemory(BlockSaver, Protocol):
    """Memory of KV blocks: what a hand-over reads from and writes into, and what is swapped out."""

    @property
    def pool(self) -> PoolMemory | None:
        """Where the blocks lie, one after the other, for whoever reads and writes them directly; None on a device."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        ...

    def read(self, block_id: BlockId) -> memoryview:
        """The block's bytes, valid while the block is held."""
        ...

    def write(self, block_id: BlockId, offset: int, data: bytes | memoryview) -> None:
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
    pool: BlockPoolStats
    queues: SchedulerStats
    # None until it is known. `pending` counts of those that wait what is not likely to be cached.
    pace: Pace | None
    pending: PendingTokens
    # Urgent ones wait for a seat or for blocks.
    is_blocked: bool
    # Sequences wait, nobody holds a block, and the last step computed nothing.
    is_stuck: bool
    # The share of the held block slots that no token is in, as of a recent step.
    fragmentation: float
    # Of all steps; empty for a model without experts.
    expert_tokens: tuple[ExpertTokens, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought; `idle` when it could not compute anything."""

    events: tuple[Event, ...]
    changes: PrefixChanges
    idle: bool
    admissions: tuple[Admission, ...] = ()
    # None when nothing was computed.
    report: StepReport | None = None


class Engine:
    """Scheduler and runner together. Its commands take effect between two steps."""

    def __init__(self, scheduler: Scheduler, runner: Runner, *, clock: Clock = monotonic) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._admissions = AdmissionLog(clock)
        self._meter = PaceMeter()
        self._fragmentation = 0.0
        self._was_idle = False
        self._num_steps = 0
        self._max_steps_to_release = 0
        self._expert_tokens: tuple[ExpertTokens, ...] = ()

    def add(self, spec: SequenceSpec, role: SequenceRole, num_remote_tokens: int = 0) -> None:
        """Queues a sequence; see Scheduler.add."""
        self._scheduler.add(spec, role, num_remote_tokens)
        self._admissions.note_added(spec, role)

    def commit(self, sequence_id: SequenceId, first_tokens: Sequence[FirstToken]) -> None:
        """The sequence's KV has arrived in its reserved blocks; see Scheduler.commit."""
        self._scheduler.commit(sequence_id, first_tokens)

    def resume(self, sequence_id: SequenceId, candidate: int, num_blocks: int) -> None:
        """What was asked for with Recall is here, as far as it comes; see Scheduler.resume."""
        self._scheduler.resume(sequence_id, candidate, num_blocks)

    def release(self, sequence_id: SequenceId, asked_at_step: int, candidate: int | None = None) -> None:
        """Forgets a sequence, or one candidate of it. Someone asked for it when `asked_at_step` steps had been taken."""
        self._scheduler.release(sequence_id, candidate)
        self._admissions.note_released(sequence_id, candidate)
        self._max_steps_to_release = max(self._max_steps_to_release, self._num_steps - asked_at_step)
        # Where there is nothing left to do, no step will tell that nobody waits any more.
        if self._meter.is_blocked and not self._scheduler.has_work():
            self._meter.note_turns((), is_blocked=False, now_s=self._clock())

    def has_work(self) -> bool:
        """Whether a step could do anything."""
        return self._scheduler.has_work()

    def step(self) -> StepResult:
        """One step of every sequence that is scheduled."""
        begin_s = self._clock()
        output = self._scheduler.schedule()
        scheduled_s = self._clock()
        computed = self._execute(output)
        computed_s = self._clock()
        self._note_cost(output, computed_s - scheduled_s)
        events = self._scheduler.update(output, computed)
        end_s = self._clock()
        admissions = self._admissions.take(events)
        self._note_pace(output, admissions, begin_s, end_s)
        self._was_idle = not output.scheduled
        return StepResult(
            events=tuple(events),
            changes=self._scheduler.pool.take_changes(),
            idle=not output.scheduled,
            admissions=admissions,
            report=_report(
                output, computed, end_s - computed_s + scheduled_s - begin_s, computed_s - scheduled_s
            ),
        )

    def _execute(self, output: SchedulerOutput) -> StepOutput:
        if not output.scheduled:
            return StepOutput()
        if self._num_steps % _LOOK_EVERY_STEPS == 0:
            self._fragmentation = self._share_of_empty_slots(output)
        computed = self._runner.execute(output)
        self._num_steps += 1
        self._count_experts(computed.expert_tokens)
        return computed

    def _note_cost(self, output: SchedulerOutput, duration_s: float) -> None:
        """Where prompts are most of a step, it tells what computing them costs, and so what preempting somebody would."""
        num_tokens = sum(len(item.token_ids) for item in output.scheduled)
        if num_tokens >= 2 * len(output.scheduled) > 0:
            self._scheduler.costs.note_chunk(num_tokens, duration_s)

    def _note_pace(
        self, output: SchedulerOutput, admissions: tuple[Admission, ...], begin_s: float, end_s: float
    ) -> None:
        """A sequence with more than one token computes a prompt. One that waits while a step has room lacks a seat or blocks."""
        prompts = [len(item.token_ids) for item in output.scheduled if len(item.token_ids) > 1]
        num_decodes, num_tokens = len(output.scheduled) - len(prompts), sum(prompts)
        if output.scheduled:
            self._meter.note_step(num_decodes, num_tokens, end_s - begin_s)
        has_room = num_decodes + num_tokens < self._scheduler.config.max_num_batched_tokens
        self._meter.note_turns(admissions, is_blocked=output.has_urgent and has_room, now_s=end_s)

    def _share_of_empty_slots(self, output: SchedulerOutput) -> float:
        pool = self._scheduler.pool
        num_held = pool.num_blocks - pool.stats().num_free
        return num_empty_slots(output, pool.block_size) / (num_held * pool.block_size)

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
            pool=pool.stats(),
            queues=queues,
            pace=self._meter.pace(self._clock()),
            pending=_pending(queues.tokens, self._meter.cached_share),
            is_blocked=self._meter.is_blocked,
            is_stuck=self._was_idle and queues.num_waiting > 0 and pool.num_available == pool.num_blocks,
            fragmentation=self._fragmentation if pool.num_available < pool.num_blocks else 0.0,
        )

    def _count_experts(self, step: tuple[ExpertTokens, ...]) -> None:
        so_far = self._expert_tokens
        self._expert_tokens = tuple(map(ExpertTokens.plus, so_far, step)) if so_far else step

    def check_invariants(self) -> None:
        """See Scheduler.check_invariants."""
        self._scheduler.check_invariants()


def _report(
    output: SchedulerOutput, computed: StepOutput, scheduler_s: float, runner_s: float
) -> StepReport | None:
    if not output.scheduled:
        return None
    return StepReport(
        num_sequences=len(output.scheduled),
        num_tokens=sum(len(item.token_ids) for item in output.scheduled),
        num_sampled_tokens=len(computed.token_ids),
        scheduler_s=scheduler_s,
        runner_s=runner_s,
        bubble_s=computed.bubble_s,
    )


def _pending(tokens: TokensByLane, cached_share: float) -> PendingTokens:
    def expected(waiting: ByClass, running: ByClass) -> ByClass:
        realtime, standard, batch = (
            int(new * (1 - cached_share)) + begun for new, begun in zip(waiting, running, strict=True)
        )
        return realtime, standard, batch

    fast, normal = map(expected, tokens.waiting, tokens.running)
    return PendingTokens(fast, normal)
