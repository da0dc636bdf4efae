"""The real engine on a real model, in real time, under a trace: what a simulation has to be measured against."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.simulator.cost import TEXTBOOK
from benchmarks.simulator.measure import Lab, StepSample
from benchmarks.simulator.records import RequestRecord
from benchmarks.simulator.runner import CostedRunner, VirtualClock
from benchmarks.simulator.spec import ClusterSpec
from benchmarks.simulator.trace import Trace, TraceRequest, spec_of
from paceline.core.errors import InvariantError
from paceline.engine.async_engine import AsyncEngine
from paceline.engine.block_pool import BlockPool
from paceline.engine.engine import Engine, StepResult
from paceline.engine.events import Event, Failed, NewTokens, Started
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import SequenceRole


class _Listener:
    """Notes when each token of one request comes, until its last."""

    def __init__(self, start_s: float) -> None:
        self.token_times_s: list[float] = []
        self.num_cached_tokens = self.num_preemptions = 0
        self.done = asyncio.Event()
        self._start_s = start_s
        self._loop = asyncio.get_running_loop()

    def take(self, events: Sequence[Event]) -> None:
        now_s = self._loop.time() - self._start_s
        for event in events:
            match event:
                case NewTokens():
                    self.token_times_s.append(now_s)
                    self.num_preemptions = event.num_preemptions
                    if event.finish_reason is not None:
                        self.done.set()
                case Started():
                    self.num_cached_tokens = event.num_cached_tokens
                case Failed():
                    raise InvariantError(f"a request of the trace failed: {event.error}")
                case _:
                    pass


@dataclass(frozen=True, slots=True)
class RealRun:
    """What came of it: the requests as a client sees them, and each step of the engine."""

    requests: tuple[RequestRecord, ...]
    steps: tuple[StepSample, ...]


class _TimedEngine(Engine):
    """Notes how long each step took, and of what it was."""

    def __init__(self, scheduler: Scheduler, runner: CostedRunner) -> None:
        super().__init__(scheduler, runner)
        self.samples: list[StepSample] = []
        self._costed = runner

    def step(self) -> StepResult:
        start_s = time.perf_counter()
        result = super().step()
        if not result.idle:
            self.samples.append(StepSample(self._costed.work, time.perf_counter() - start_s))
        return result


def run_real(trace: Trace, spec: ClusterSpec, lab: Lab) -> RealRun:
    """The trace on one worker of `spec`'s decode tier; takes as long as the trace."""
    return asyncio.run(_run(trace, spec, lab))


async def _run(trace: Trace, spec: ClusterSpec, lab: Lab) -> RealRun:
    pool = BlockPool(spec.num_blocks, spec.block_size, lab.layout.groups)
    # The clock that it moves is nobody's: what is wanted is that it tells the work of each step.
    runner = CostedRunner(lab.runner, TEXTBOOK, VirtualClock())
    timed = _TimedEngine(Scheduler(spec.decode, pool, runner.memory), runner)
    engine = AsyncEngine(timed, on_changes=lambda _: None, on_failure=lambda _: None)
    engine.start()
    try:
        start_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            request = partial(_request, engine, lab.vocab_size, start_s)
            tasks = [group.create_task(request(number, each)) for number, each in enumerate(trace.requests)]
        return RealRun(tuple(task.result() for task in tasks), tuple(timed.samples))
    finally:
        await engine.stop()


async def _request(
    engine: AsyncEngine, vocab_size: int, start_s: float, number: int, request: TraceRequest
) -> RequestRecord:
    spec = spec_of(request, number, vocab_size)
    await asyncio.sleep(start_s + request.arrival_s - asyncio.get_running_loop().time())
    listener = _Listener(start_s)
    engine.submit(spec, SequenceRole.GENERATE, listener.take)
    await listener.done.wait()
    return RequestRecord(
        number=number,
        request=request,
        mode="local",
        token_times_s=tuple(listener.token_times_s),
        num_cached_tokens=listener.num_cached_tokens,
        num_preemptions=listener.num_preemptions,
        decode_worker="decode-0",
    )
