"""Looks at the workers before a request is taken, and refuses whoever would not have its first token in time.

What a request would cost is known once it is tokenised. How much of it is cached is asked only where that may decide.
"""

from collections import Counter
from collections.abc import Mapping
from typing import get_args

from paceline.core.clock import Clock, monotonic
from paceline.core.errors import DeadlineError, QueueFullError
from paceline.core.request import Priority
from paceline.prefix_index.index import PrefixLookup
from paceline.v1 import inference_pb2
from router.costs import lendable, num_computed
from router.forecast import forecast, soonest
from router.in_time import Bounds, Refusal, Rule, Way, refusal
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
        prompt = PromptFacts(len(job.spec.prompt_ids), {})
        found = self._refusal(job, prompt)
        # Nothing of it being cached is the worst: whoever is taken then is taken anyway.
        if found is not None or self._may_be_late_for_realtime(job, prompt):
            prompt = await self._lookup.facts(job, self._workers())
            found = self._refusal(job, prompt)
        if found is not None:
            self._num_refused[found.rule] += 1
            raise error_of(found)
        self._expect(job, prompt)

    def _expect(self, job: Job, prompt: PromptFacts) -> None:
        """Until it is placed, whoever is asked for next sees it before itself: many may come at once."""
        ask = Ask.of(job.spec)
        told = [(forecast(ask, way.num_tokens, way.worker), way) for way in self._ways(prompt)]
        known = [(each.ttft_s, way) for each, way in told if each is not None]
        if known:
            _, way = min(known, key=lambda pair: pair[0])
            expected = self._registry.assignments.expect(way.worker, ask, way.num_tokens)
            job.unplaced.enter_context(expected)

    def num_refused(self) -> Mapping[Rule, int]:
        """Requests refused since the start, by the bound that they would have passed."""
        return {rule: self._num_refused[rule] for rule in get_args(Rule)}

    def _refusal(self, job: Job, prompt: PromptFacts) -> Refusal | None:
        time_left_s = None if job.deadline_s is None else job.deadline_s - self._clock()
        return refusal(Ask.of(job.spec), self._ways(prompt), time_left_s, self._bounds)

    def _may_be_late_for_realtime(self, job: Job, prompt: PromptFacts) -> bool:
        """A REALTIME request that seems too long to keep what is promised may keep it with what is cached."""
        if job.spec.priority is not Priority.REALTIME or not self._bounds.realtime_ttft_s:
            return False
        ask = Ask.of(job.spec)
        best = soonest(forecast(ask, way.num_tokens, way.worker) for way in self._ways(prompt))
        return best is not None and best.ttft_s > self._bounds.realtime_ttft_s

    def _ways(self, prompt: PromptFacts) -> list[Way]:
        prefill, decode = (self._registry.views(role) for role in _ROLES)
        return ways(prompt, prefill, decode, self._rules)

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
