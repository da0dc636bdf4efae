"""Runners for the virtual clock: one that computes nothing, and one that says how long each step took."""

import itertools

from benchmarks.simulator.cost import CostModel, StepWork, work_of
from paceline.core.kv_layout import BlockId
from paceline.engine.engine import BlockMemory, Runner
from paceline.engine.step import SchedulerOutput, StepOutput

# Whatever the model would say: lengths come from the trace, and no token ends a sequence.
_TOKEN = 7
_NO_BYTES = memoryview(b"")


class VirtualClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class EmptyMemory:
    """Blocks without content; all are alike."""

    block_bytes = 0
    pool = None

    def read(self, block_id: BlockId) -> memoryview:  # noqa: ARG002 - see BlockMemory
        """Nothing."""
        return _NO_BYTES

    def write(self, block_id: BlockId, offset: int, data: bytes | memoryview) -> None:
        """Keeps nothing."""

    def copy(self, source: BlockId, target: BlockId) -> None:
        """Copies nothing."""

    def save(self, block_id: BlockId) -> None:
        """Keeps nothing."""

    def restore(self, saved: None, block_id: BlockId) -> None:
        """Brings nothing back."""

    def checksum(self, block_id: BlockId) -> int:  # noqa: ARG002 - see BlockMemory
        """The same for all."""
        return 0


class EmptyRunner:
    """Computes nothing: every token is the same one."""

    def __init__(self) -> None:
        self.memory: BlockMemory = EmptyMemory()

    def execute(self, output: SchedulerOutput) -> StepOutput:
        """One token for each that is asked for, at once."""
        return StepOutput((_TOKEN,) * sum([len(item.samples) for item in output.scheduled]))


class CostedRunner:
    """Lets another runner compute, and moves the clock by what the cost model says; keeps the last step's work."""

    def __init__(self, runner: Runner, cost: CostModel, clock: VirtualClock) -> None:
        self._runner = runner
        self._cost = cost
        self._clock = clock
        self._noise = itertools.cycle(cost.noise or (1.0,))
        self.output = SchedulerOutput((), ())
        self.work = StepWork(0, 0, 0, 0, 0)

    @property
    def memory(self) -> BlockMemory:
        """See Runner."""
        return self._runner.memory

    def execute(self, output: SchedulerOutput) -> StepOutput:
        """See Runner."""
        computed = self._runner.execute(output)
        self.output, self.work = output, work_of(output.scheduled)
        self._clock.now_s += self._cost.step_s(self.work) * next(self._noise)
        return computed
