"""The router's metrics: what the dispatcher says about each request, observed on its way, and what the parts count."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import get_args

from prometheus_client import CollectorRegistry

from paceline.core.block_hash import BlockHash
from paceline.core.clock import Clock, monotonic
from paceline.core.prefix import WorkerKey
from paceline.prefix_index.index import PrefixIndex, PrefixLookup
from paceline.runtime import metrics
from paceline.runtime.metrics import PRIORITY_NAMES, Sample, counter, histogram
from paceline.v1 import inference_pb2
from router.admission import AdmissionController
from router.discovery import Discovery
from router.gate import Gate
from router.job import DispatchEvent, Job, Placed, PromptComputed, RequestRunner, Tokens
from router.rate_limit import LimiterMode, RateLimiter
from router.service import InferenceServicer
from router.workers import WorkerRegistry

_TIERS = {"prefill": inference_pb2.WORKER_ROLE_PREFILL, "decode": inference_pb2.WORKER_ROLE_DECODE}


class RequestMetrics:
    """What is observed of requests; at most one observation a token."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ttft, itl, tpot = (
            histogram(metric, self.registry) for metric in (metrics.TTFT, metrics.ITL, metrics.TPOT)
        )
        self.ttft = {priority: ttft.labels(name) for priority, name in PRIORITY_NAMES.items()}
        self.itl = {priority: itl.labels(name) for priority, name in PRIORITY_NAMES.items()}
        self.tpot = {priority: tpot.labels(name) for priority, name in PRIORITY_NAMES.items()}
        self.ttft_error = histogram(metrics.TTFT_OVER_PREDICTED, self.registry)
        self.attempts = counter(metrics.ATTEMPTS, self.registry)
        self.migrations = counter(metrics.MIGRATIONS, self.registry)
        self.prompt_tokens = counter(metrics.PROMPT_TOKENS, self.registry)
        self.cached_prompt_tokens = counter(metrics.CACHED_PROMPT_TOKENS, self.registry)
        self.output_tokens = counter(metrics.OUTPUT_TOKENS, self.registry)
        self.lookup = histogram(metrics.INDEX_LOOKUP, self.registry)


class InstrumentedDispatcher:
    """Passes everything on from the next one and observes it."""

    def __init__(self, next_runner: RequestRunner, observed: RequestMetrics) -> None:
        self._next = next_runner
        self._observed = observed

    async def run(self, job: Job) -> AsyncGenerator[DispatchEvent, None]:
        """The next one's events."""
        watch = _Watch(job, self._observed)
        try:
            async with aclosing(self._next.run(job)) as events:
                async for event in events:
                    watch.take(event)
                    yield event
        finally:
            watch.end()


class InstrumentedIndex:
    """Times the look-ups of the next one; those that find no table, too."""

    def __init__(self, next_index: PrefixLookup, observed: RequestMetrics, clock: Clock = monotonic) -> None:
        self._next = next_index
        self._observed = observed
        self._clock = clock

    async def lookup(self, hashes: Sequence[BlockHash]) -> dict[WorkerKey, int]:
        """The next one's answer."""
        begin_s = self._clock()
        found = await self._next.lookup(hashes)
        self._observed.lookup.observe(self._clock() - begin_s)
        return found


@dataclass(slots=True)
class _Output:
    """The tokens of one candidate so far."""

    first_s: float
    last_s: float
    num_tokens: int


class _Watch:
    """Follows one request."""

    def __init__(self, job: Job, observed: RequestMetrics) -> None:
        self._job = job
        self._observed = observed
        self._priority = job.spec.priority
        self._outputs: dict[int, _Output] = {}
        self._is_prompt_counted = False

    def take(self, event: DispatchEvent) -> None:
        match event:
            case Tokens():
                self._take_tokens(event)
            case PromptComputed():
                self._take_prompt(event)
            case Placed():
                self._take_placed(event)
            case _:
                pass

    def end(self) -> None:
        """Nothing more comes. What was cut off has no mean that says anything."""
        for candidate, output in self._outputs.items():
            if output.num_tokens > 1 and candidate not in self._job.unfinished:
                mean_s = (output.last_s - output.first_s) / (output.num_tokens - 1)
                self._observed.tpot[self._priority].observe(mean_s)

    def _take_tokens(self, event: Tokens) -> None:
        if not event.token_ids:
            return
        now_s = self._job.timeline.clock()
        self._observed.output_tokens.inc(len(event.token_ids))
        output = self._outputs.get(event.candidate)
        if output is None:
            if not self._outputs:
                self._note_first_token(now_s - self._job.timeline.received_s)
            self._outputs[event.candidate] = _Output(now_s, now_s, len(event.token_ids))
            return
        self._observed.itl[self._priority].observe(now_s - output.last_s)
        output.last_s = now_s
        output.num_tokens += len(event.token_ids)

    def _note_first_token(self, ttft_s: float) -> None:
        self._observed.ttft[self._priority].observe(ttft_s)
        # Of one that lost a worker before its first token nothing was predicted.
        predicted_s = self._job.timeline.predicted_ttft_s
        if predicted_s and self._job.timeline.num_attempts == 1:
            self._observed.ttft_error.observe(ttft_s / predicted_s)

    def _take_prompt(self, event: PromptComputed) -> None:
        # Later attempts compute it again, mostly out of the cache of what the first one left.
        if not self._is_prompt_counted:
            self._is_prompt_counted = True
            self._observed.prompt_tokens.inc(len(self._job.spec.prompt_ids))
            self._observed.cached_prompt_tokens.inc(event.num_cached_tokens)

    def _take_placed(self, event: Placed) -> None:
        self._observed.attempts.labels("local" if event.is_local else "disaggregated").inc()
        if event.attempt > 0:
            self._observed.migrations.labels(event.reason).inc()


def router_samples(
    service: InferenceServicer,
    admission: AdmissionController,
    gate: Gate,
    limiter: RateLimiter,
    index: PrefixIndex,
    registry: WorkerRegistry,
    discovery: Discovery,
) -> list[Sample]:
    """What the router's parts say of themselves now."""
    door, rates, table = admission.stats(), limiter.stats(), index.stats()
    views = {tier: registry.views(role) for tier, role in _TIERS.items()}
    return [
        *(Sample(metrics.REQUESTS, number, (end,)) for end, number in service.stats().num_ended.items()),
        Sample(metrics.REQUESTS_ACTIVE, door.num_active),
        Sample(metrics.REQUESTS_ADMITTED, door.num_admitted),
        Sample(metrics.REQUESTS_REFUSED, door.num_refused),
        *(Sample(metrics.REQUESTS_TOO_LATE, number, (rule,)) for rule, number in gate.num_refused().items()),
        Sample(metrics.REQUEST_BYTES, door.num_bytes),
        *(Sample(metrics.LIMITER_MODE, limiter.mode == mode, (mode,)) for mode in get_args(LimiterMode)),
        Sample(metrics.LIMITER_FAILURES, rates.num_failures),
        Sample(metrics.LIMITER_SKIPPED, rates.num_skipped),
        Sample(metrics.LIMITER_STRICT, rates.num_strict),
        Sample(metrics.INDEX_SHARED, index.mode == "redis"),
        Sample(metrics.INDEX_LOOKUPS, table.num_lookups),
        Sample(metrics.INDEX_FAILURES, table.num_failures),
        Sample(metrics.INDEX_LATE, table.num_late),
        Sample(metrics.INDEX_SKIPPED, table.num_skipped),
        Sample(metrics.INDEX_GARBAGE, table.num_garbage),
        *(Sample(metrics.WORKERS, len(seen), (tier,)) for tier, seen in views.items()),
        *(
            Sample(metrics.WORKERS_COOLING, sum(view.cooling_down for view in seen), (tier,))
            for tier, seen in views.items()
        ),
        *(
            Sample(metrics.WORKER_ADDRESSES, registry.num_watched(role), (tier,))
            for tier, role in _TIERS.items()
        ),
        Sample(metrics.SOURCES_SILENT, discovery.num_silent),
    ]
