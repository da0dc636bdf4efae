"""Runners that wait, or fail, when a test says so."""

import asyncio
import threading

from paceline.engine.fake import FakeModelRunner
from paceline.engine.step import SchedulerOutput, StepOutput


class GatedRunner:
    """The fake runner, whose steps wait at a gate while it is closed, and say that they have come to it."""

    def __init__(self, runner: FakeModelRunner) -> None:
        self._runner = runner
        self.memory = self._runner.memory
        self.num_steps = 0
        self._is_open = True
        self._permits = threading.Semaphore(0)
        self._arrived = threading.Event()

    def execute(self, output: SchedulerOutput) -> StepOutput:
        """See Runner.execute."""
        self._arrived.set()
        if not self._is_open:
            assert self._permits.acquire(timeout=30)
        self.num_steps += 1
        return self._runner.execute(output)

    def close(self) -> None:
        """The next step will wait."""
        self._is_open = False
        self._arrived.clear()

    async def until_arrived(self) -> None:
        """Returns when a step waits at the closed gate."""
        assert await asyncio.to_thread(self._arrived.wait, 30)

    def let_one_pass(self) -> None:
        """The step at the gate goes on; the next one will wait."""
        self._arrived.clear()
        self._permits.release()

    def open(self) -> None:
        """The step at the gate goes on, and so do all later ones."""
        self._is_open = True
        self._permits.release()


class BrokenRunner(FakeModelRunner):
    """Fails at a prompt that holds the token 13."""

    def execute(self, output: SchedulerOutput) -> StepOutput:
        """See Runner.execute."""
        if any(13 in item.token_ids for item in output.scheduled):
            raise MemoryError("no memory left")
        return super().execute(output)
