"""A scheduler on a virtual clock: steps take as long as a simple model says, requests come when they come."""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from paceline.core.clock import ManualClock
from paceline.core.errors import PacelineError
from paceline.core.kv_layout import BlockId
from paceline.core.request import SequenceId, SequenceSpec
from paceline.engine.block_pool import BlockPool
from paceline.engine.events import Failed, NewTokens
from paceline.engine.scheduler import Scheduler
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.sequence import SequenceRole
from paceline.engine.step import SchedulerOutput, StepOutput


class NoMemory:
    """Blocks without bytes."""

    def copy(self, source: BlockId, target: BlockId) -> None:
        """Nothing to copy."""

    def checksum(self, block_id: BlockId) -> int:
        """Nothing to sum."""
        return 0

    def save(self, block_id: BlockId) -> None:
        """Nothing to save."""

    def restore(self, saved: None, block_id: BlockId) -> None:
        """Nothing to restore."""


def memory_bound_s(output: SchedulerOutput) -> float:
    """5 ms a step, 0.3 ms a decoding sequence, 0.2 ms a token of a prompt."""
    num_decodes = sum(len(item.token_ids) == 1 for item in output.scheduled)
    num_prompt = sum(len(item.token_ids) for item in output.scheduled) - num_decodes
    return 5e-3 + 0.3e-3 * num_decodes + 0.2e-3 * num_prompt


@dataclass
class Life:
    """What became of one request, in seconds of the virtual clock."""

    arrival_s: float
    token_s: list[float] = field(default_factory=list)
    error: PacelineError | None = None
    has_ended: bool = False
    num_preemptions: int = 0

    @property
    def ttft_s(self) -> float:
        """From arrival to first token."""
        return self.token_s[0] - self.arrival_s

    @property
    def itl_s(self) -> list[float]:
        """Between tokens."""
        return [later - earlier for earlier, later in zip(self.token_s, self.token_s[1:], strict=False)]


class Timed:
    """One engine's worth of scheduling."""

    def __init__(self, num_blocks: int = 4096, *, block_size: int = 16, **config: object) -> None:
        self.clock = ManualClock()
        settings = {"max_num_batched_tokens": 512, "max_num_seqs": 64, **config}
        self.scheduler = Scheduler(
            SchedulerConfig(**settings),  # type: ignore[arg-type] # each has its field's type
            BlockPool(num_blocks, block_size),
            NoMemory(),
            clock=self.clock,
        )
        self.lives: dict[SequenceId, Life] = {}
        self.outputs: list[SchedulerOutput] = []
        self.num_computed = 0
        self.num_idle = 0

    def serve(
        self,
        arrivals: Iterable[tuple[float, SequenceSpec]],
        *,
        until_s: float = 1e9,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        """All of them to their ends, or up to a time; `watch` is called after each step."""
        coming = [(arrival_s, number, spec) for number, (arrival_s, spec) in enumerate(arrivals)]
        heapq.heapify(coming)
        while (coming or self.scheduler.has_work()) and self.clock() < until_s:
            if coming and not self.scheduler.has_work():
                self.clock.advance(max(0.0, coming[0][0] - self.clock()))
            while coming and coming[0][0] <= self.clock():
                arrival_s, _, spec = heapq.heappop(coming)
                self.lives[spec.sequence_id] = Life(arrival_s)
                self.scheduler.add(spec, SequenceRole.GENERATE)
            self.step()
            watch()

    def step(self) -> None:
        """One step, which takes its time."""
        output = self.scheduler.schedule()
        is_waiting = not (output.scheduled or output.events) and self.scheduler.has_work()
        if is_waiting:
            # Only for what others hold, and not for ever.
            self.num_idle += 1
            self.clock.advance(0.1)
            assert self.num_idle < 30, self.scheduler.stats()
            assert self.scheduler.pool.num_available < self.scheduler.pool.num_blocks
        elif output.scheduled:
            self.num_idle = 0
            self.outputs.append(output)
            self.clock.advance(memory_bound_s(output))
        self.num_computed += sum(len(item.token_ids) for item in output.scheduled)
        num_samples = sum(len(item.samples) for item in output.scheduled)
        for event in self.scheduler.update(output, StepOutput((7,) * num_samples)):
            life = self.lives[event.sequence_id]
            if isinstance(event, NewTokens):
                life.token_s.append(self.clock())
                life.has_ended |= event.finish_reason is not None
                life.num_preemptions = event.num_preemptions
            elif isinstance(event, Failed):
                life.error, life.has_ended = event.error, True

    @property
    def num_output_tokens(self) -> int:
        """Of all requests."""
        return sum(len(life.token_s) for life in self.lives.values())

    def require_all_ended(self) -> None:
        """Every request has had its end, and every block is free."""
        assert all(life.has_ended for life in self.lives.values())
        assert self.scheduler.pool.num_available == self.scheduler.pool.num_blocks


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest of the values that so large a share of them does not pass."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
