"""A runner whose steps are computed on all cores that can be had at the moment."""

from collections.abc import Callable

from paceline.engine.engine import BlockMemory, Runner
from paceline.engine.step import SchedulerOutput, StepOutput
from paceline.runtime.cores import Cores


class LentCoresRunner:
    """Wraps another one. `set_threads` says on how many threads the next step is computed."""

    def __init__(self, runner: Runner, cores: Cores, set_threads: Callable[[int], None]) -> None:
        self._runner = runner
        self._cores = cores
        self._set_threads = set_threads
        self._num_threads = 0

    @property
    def memory(self) -> BlockMemory:
        """See Runner.memory."""
        return self._runner.memory

    def execute(self, output: SchedulerOutput) -> StepOutput:
        """See Runner.execute. Whoever borrowed one of our cores may be waited for."""
        with self._cores.taken() as num_cores:
            if num_cores != self._num_threads:
                self._set_threads(num_cores)
                self._num_threads = num_cores
            return self._runner.execute(output)
