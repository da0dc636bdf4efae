"""Looks at the workers before a request is taken, and refuses whoever would not have its first token in time.

What a request would cost is known once it is tokenised. How much of it is cached is asked only where that may decide.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import get_args

from paceline.core.clock import Clock, monotonic
from paceline.core.errors import DeadlineError, QueueFullError
from paceline.core.request import Priority
from paceline.prefix_index.index import PrefixLookup
from paceline.v1 import inference_pb2
from router.costs import lendable, num_computed
from router.in_time import Bounds, Prospect, Refusal, Rule, Way, prospects, refusal
from router.job import Job
from router.placement import Rules, can_compute
from router.prompt_lookup import PromptLookup
from router.views import Ask, PromptFacts, WorkerView
from router.workers import WorkerRegistry


class Gate:
    """Owned by the router's event loop; keeps nothing of a request."""

    def __init__(
        self,
        bounds: Bounds,
        rules: Rules,
        registry: WorkerRegistry,
        index: PrefixLookup,
        *,
        clock: Clock = monotonic,
    ) -> None:
        self._bounds = bounds
        self._rules = rules
        self._registry = registry
        self._lookup = PromptLookup(index)
        self._clock = clock
        self._num_refused: Counter[Rule] = Counter()

    async def require_time(self, job: Job) -> None:
        """Raises QueueFullError with the time after which it would be taken, or DeadlineError where there is none."""
        # Nothing of it being cached is the worst: whoever is taken then is taken anyway.
        known = self._prospects(job, PromptFacts(len(job.spec.prompt_ids), {}))
        found = self._refusal(job, known)
        if found is not None or self._may_be_late_for_realtime(job, known):
            await self.look_up(job)
            known = self._prospects(job, await self._lookup.facts(job, self._workers()))
            found = self._refusal(job, known)
        if found is not None:
            self._num_refused[found.rule] += 1
            raise error_of(found)
        if known:
            self._expect(job, known[0].way)

    async def look_up(self, job: Job) -> None:
        """Asks once what is cached of it, for its first attempt too."""
        if job.held_blocks is None:
            job.held_blocks = await self._lookup.held(job, self._workers())

    def _expect(self, job: Job, way: Way) -> None:
        """Until it is placed, whoever is asked for next sees it before itself: many may come at once."""
        expected = self._registry.assignments.expect(way.worker, Ask.of(job.spec), way.num_tokens)
        job.unplaced.enter_context(expected)

    def num_refused(self) -> Mapping[Rule, int]:
        """Requests refused since the start, by the bound that they would have passed."""
        return {rule: self._num_refused[rule] for rule in get_args(Rule)}

    def _refusal(self, job: Job, known: Sequence[Prospect]) -> Refusal | None:
        time_left_s = None if job.deadline_s is None else job.deadline_s - self._clock()
        return refusal(Ask.of(job.spec), known, time_left_s, self._bounds)

    def _may_be_late_for_realtime(self, job: Job, known: Sequence[Prospect]) -> bool:
        """A REALTIME request that seems too long to keep what is promised may keep it with what is cached."""
        promised_s = self._bounds.realtime_ttft_s
        is_bound = bool(promised_s and known) and job.spec.priority is Priority.REALTIME
        return is_bound and known[0].forecast.ttft_s > promised_s

    def _prospects(self, job: Job, prompt: PromptFacts) -> list[Prospect]:
        prefill, decode = (self._registry.views(role) for role in _ROLES)
        return prospects(Ask.of(job.spec), ways(prompt, prefill, decode, self._rules))

    def _workers(self) -> list[WorkerView]:
        return [view for role in _ROLES for view in self._registry.views(role)]


_ROLES = (inference_pb2.WORKER_ROLE_PREFILL, inference_pb2.WORKER_ROLE_DECODE)


def ways(prompt: PromptFacts, prefill: list[WorkerView], decode: list[WorkerView], rules: Rules) -> list[Way]:
    """Who could compute a prompt, and how much of it; what can be pulled is not computed."""
    lent = lendable(prompt, (*prefill, *decode), rules.costs)
    generating = {worker.key for worker in decode}
    return [
        Way(worker, num_computed(prompt, worker, lent), worker.key in generating)
        for worker in can_compute(prompt, prefill, decode, rules.mode)
    ]


def error_of(found: Refusal) -> QueueFullError | DeadlineError:
    """What the caller is told."""
    if found.retry_after_s is None:
        return DeadlineError(
            "queued", f"{found.problem}, and could not come in time from idle workers; allow more time"
        )
    return QueueFullError(found.problem, retry_after_s=found.retry_after_s)
