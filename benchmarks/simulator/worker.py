"""One worker on the virtual clock: a real engine, whose steps take what the cost model says."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulator.cost import CostModel
from benchmarks.simulator.decisions import DecisionLog
from benchmarks.simulator.records import StepRecord, WorkerRecord
from benchmarks.simulator.runner import CostedRunner, VirtualClock
from benchmarks.simulator.spec import ClusterSpec
from paceline.core.prefix import WorkerKey
from paceline.core.request import SequenceId, SequenceSpec
from paceline.engine.block_pool import BlockPool
from paceline.engine.engine import BlockMemory, Engine, EngineStats, Runner, StepResult
from paceline.engine.scheduler import Scheduler
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.sequence import SequenceRole

Command = Callable[[Engine], None]


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a step brought, and when it is over."""

    end_s: float
    result: StepResult


class SimulatedWorker:
    """Commands wait in its inbox until the step under way is over, as they do in the real engine's thread."""

    def __init__(
        self,
        key: WorkerKey,
        config: SchedulerConfig,
        spec: ClusterSpec,
        cost: CostModel,
        runner: Runner,
        log: DecisionLog | None = None,
    ) -> None:
        self.key = key
        self.name = str(key.worker_id)
        self.steps: list[StepRecord] = []
        self.is_busy = False
        # Whether its next turn is on the agenda already, now or after a while.
        self.is_called = self.is_ticking = False
        self.config = config
        self._clock = VirtualClock()
        self._runner = CostedRunner(runner, cost, self._clock)
        self._pool = BlockPool(spec.num_blocks, spec.block_size, spec.groups)
        scheduler = Scheduler(config, self._pool, runner.memory, clock=self._clock)
        # What a step costs, and so what is preempted how, is a matter of virtual time too.
        self._engine = Engine(scheduler, self._runner, clock=self._clock)
        self._inbox: list[Command] = []
        self._present: set[SequenceId] = set()
        self._log = log

    # -- what others ask of it

    def add(self, spec: SequenceSpec, role: SequenceRole) -> None:
        """Queues a sequence."""
        self._present.add(spec.sequence_id)
        self._inbox.append(lambda engine: engine.add(spec, role))

    def release(self, sequence_id: SequenceId) -> None:
        """Forgets a sequence."""
        asked_at_step = len(self.steps)
        self._present.discard(sequence_id)
        self._inbox.append(lambda engine: engine.release(sequence_id, asked_at_step))

    def command(self, command: Command) -> None:
        """Anything else."""
        self._inbox.append(command)

    def note_end(self, sequence_id: SequenceId) -> None:
        """A sequence has ended by itself."""
        self._present.discard(sequence_id)

    # -- its turn

    def step(self, now_s: float) -> Stepped:
        """Takes the inbox, then a step; it must not be in one."""
        assert not self.is_busy, "a worker takes one step after the other"
        self._clock.now_s = now_s
        inbox, self._inbox = self._inbox, []
        for command in inbox:
            command(self._engine)
        num_present = len(self._present)
        result = self._engine.step()
        end_s = self._clock.now_s
        if not result.idle:
            self.steps.append(StepRecord(self.name, now_s, end_s, self._runner.work, num_present))
            if self._log is not None:
                self._log.note(self.name, now_s, self._runner.output.scheduled, self._engine.stats())
        return Stepped(end_s, result)

    @property
    def has_work(self) -> bool:
        """Whether a turn could do anything."""
        return bool(self._inbox) or self._engine.has_work()

    @property
    def memory(self) -> BlockMemory:
        """Where its blocks are."""
        return self._runner.memory

    def stats(self) -> EngineStats:
        """A picture of now."""
        return self._engine.stats()

    def check_invariants(self) -> None:
        """See Engine.check_invariants."""
        self._engine.check_invariants()

    def record(self) -> WorkerRecord:
        """What came of it."""
        return WorkerRecord(
            worker=self.name,
            max_num_seqs=self.config.max_num_seqs,
            num_blocks=self._pool.num_blocks,
            num_steps=len(self.steps),
            num_preemptions=self.stats().num_preemptions,
            num_evictions=self._pool.stats().num_evictions,
        )
