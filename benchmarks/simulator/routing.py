"""The router's part: the real door, the real placement, fed with what a router would know of the workers."""

from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from benchmarks.simulator.spec import ClusterSpec
from benchmarks.simulator.worker import SimulatedWorker
from paceline.core.block_hash import chain_root, hash_full_blocks
from paceline.core.pace import FastLane
from paceline.core.prefix import PrefixChanges, WorkerKey
from paceline.core.request import SequenceSpec
from paceline.engine.engine import EngineStats
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.prefix_index.memory_index import MemoryPrefixIndex
from router.admission import Door
from router.assignments import Assigned, Assignments
from router.gate import error_of, ways
from router.hash_ring import prompt_key
from router.in_time import Bounds, refusal
from router.placement import Route
from router.placer import Placer
from router.views import Ask, PromptFacts, QueueFacts, WorkerView

# How often a worker reports its load (paceline/worker/service.py).
_REPORT_EVERY_S = 0.05
_NO_BOUND = 1 << 62

T = TypeVar("T")


class SimulatedRouter:
    """Sees the workers as the real one does: by reports that lag, by its own assignments, by the prefix table."""

    def __init__(
        self, spec: ClusterSpec, prefill: Sequence[SimulatedWorker], decode: Sequence[SimulatedWorker]
    ) -> None:
        self._spec = spec
        self._prefill = prefill
        self._decode = decode
        self._door = Door(spec.max_requests or _NO_BOUND)
        self._assignments = Assignments()
        self._placer = Placer(spec.rules)
        self._index = MemoryPrefixIndex()
        self._reports: dict[WorkerKey, tuple[float, EngineStats]] = {}

    def admit(self, leave: ExitStack) -> None:
        """Holds a place until `leave` is closed; raises what the router would answer."""
        leave.enter_context(self._door.enter())

    def require_time(self, spec: SequenceSpec, now_s: float) -> None:
        """Raises what the router would answer to a request that cannot have its first token in time."""
        if self._spec.bounds == Bounds():
            return
        possible = ways(self._facts(spec), *self._views(now_s), self._spec.rules)
        found = refusal(Ask.of(spec), possible, spec.time_budget_s, self._spec.bounds)
        if found is not None:
            raise error_of(found)

    def place(self, spec: SequenceSpec, now_s: float) -> Route:
        """The workers of a request."""
        return self._placer.place(self._facts(spec), *self._views(now_s))

    def _facts(self, spec: SequenceSpec) -> PromptFacts:
        root = chain_root(self._spec.decode.fingerprint, spec.cache_scope)
        hashes = hash_full_blocks(root, spec.prompt_ids, self._spec.block_size, spec.cache_scope)
        held = _at_once(self._index.lookup(hashes))
        return PromptFacts(
            len(spec.prompt_ids),
            held,
            max_tokens=spec.max_tokens,
            ring_key=prompt_key(spec.prompt_ids, spec.cache_scope),
        )

    def _views(self, now_s: float) -> tuple[list[WorkerView], list[WorkerView]]:
        return (
            [self._view(worker, now_s) for worker in self._prefill],
            [self._view(worker, now_s) for worker in self._decode],
        )

    def assign(self, spec: SequenceSpec, route: Route, leave: ExitStack) -> Assigned:
        """Counts a request to its workers until `leave` is closed; tell what it gives how the prompt gets on."""
        return leave.enter_context(self._assignments.assign(route, Ask.of(spec)))

    def note_changes(self, key: WorkerKey, changes: PrefixChanges) -> None:
        """What a worker's cache gained and lost in a step."""
        if changes.published:
            _at_once(self._index.publish(key, changes.published))
        if changes.evicted:
            _at_once(self._index.remove(key, changes.evicted))

    def _view(self, worker: SimulatedWorker, now_s: float) -> WorkerView:
        stats, assigned = self._report(worker, now_s), self._assignments.pending(worker.key)
        return WorkerView(
            key=worker.key,
            address=worker.name,
            fingerprint=self._spec.decode.fingerprint,
            block_size=self._spec.block_size,
            num_blocks=stats.num_blocks,
            num_free_blocks=stats.num_free_blocks,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_pending_tokens=stats.num_pending_tokens,
            draining=False,
            num_assigned_tokens=sum(assigned.fast) + sum(assigned.normal),
            num_assigned_sequences=self._assignments.num_sequences(worker.key),
            assigned=assigned,
            queue=_queue(stats, worker.config),
        )

    def _report(self, worker: SimulatedWorker, now_s: float) -> EngineStats:
        reported_s, stats = self._reports.get(worker.key, (-_REPORT_EVERY_S, None))
        if stats is None or now_s - reported_s >= _REPORT_EVERY_S:
            stats = worker.stats()
            self._reports[worker.key] = now_s, stats
        return stats


def _queue(stats: EngineStats, config: SchedulerConfig) -> QueueFacts | None:
    if stats.pace is None:
        return None
    return QueueFacts(
        pace=stats.pace,
        pending=stats.pending,
        waiting=stats.queues.num_waiting_by_priority,
        is_blocked=stats.is_blocked,
        max_seats=stats.queues.max_seats,
        max_step_tokens=config.max_num_batched_tokens,
        fast_lane=FastLane(
            config.fast_lane_share, config.fast_lane_prompt_tokens, config.fast_lane_output_tokens
        ),
    )


def _at_once(call: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, as those of the table in memory."""
    try:
        call.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("the table in memory waits for nobody")
