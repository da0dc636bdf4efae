"""Carries one request through its workers: the only place that knows prefill comes before decode.

Failure lives here too: whatever is lost, the tokens that the client has seen go into the next attempt as input, and the
stream goes on where it was.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from paceline.core.clock import Clock, monotonic
from paceline.core.errors import (
    DeadlineError,
    DrainingError,
    EngineFailedError,
    KvError,
    NoEndpointError,
    PeerLostError,
)
from paceline.core.prefix import PrefixHint
from paceline.core.request import SequenceId, SequenceSpec
from paceline.core.ticket import KvTicket
from paceline.prefix_index.index import PrefixLookup
from paceline.runtime.channels import Channels
from paceline.runtime.log import get_logger
from paceline.runtime.wire_internal import (
    finish_reason_from_proto,
    logprob_from_proto,
    ticket_from_proto,
)
from paceline.v1 import decode_pb2, inference_pb2
from router.config import RouterConfig
from router.decode_handle import DecodeHandle
from router.decode_link import DecodeLink, first_tokens
from router.forecast import forecast
from router.job import DispatchEvent, Failures, Job, Placed, PromptComputed, PromptProgress, Tokens
from router.lease_release import LeaseRelease
from router.merge import merged
from router.placement import Route
from router.placer import Placer
from router.prefills import Prefills
from router.prompt_lookup import PromptLookup
from router.prompt_scores import PromptScores
from router.views import Ask, WorkerView
from router.workers import WorkerRegistry

# What another attempt may heal. An error of the request itself, or a bug, would only happen again.
_RETRYABLE = (KvError, PeerLostError, DrainingError, EngineFailedError)
_ROLES = (inference_pb2.WORKER_ROLE_PREFILL, inference_pb2.WORKER_ROLE_DECODE)

log = get_logger()


class Dispatcher:
    """Runs requests on the workers of a registry."""

    def __init__(
        self,
        config: RouterConfig,
        registry: WorkerRegistry,
        index: PrefixLookup,
        channels: Channels,
        *,
        clock: Clock = monotonic,
    ) -> None:
        self._config = config
        self._registry = registry
        self._lookup = PromptLookup(index)
        self._placer = Placer(config.placement_rules)
        self._clock = clock
        self._prefills = Prefills(channels, registry)
        self._lease_release = LeaseRelease(channels)

    def run(self, job: Job) -> AsyncGenerator[DispatchEvent, None]:
        """Events until the last token of the last candidate; close the generator to give the request up.

        A candidate that the reader has ended, by `job.end`, gives nothing more. Raises PacelineError.
        """
        return self._go_on(job, Failures())

    async def _go_on(self, job: Job, failures: Failures) -> AsyncGenerator[DispatchEvent, None]:
        """Attempt after attempt, until one succeeds or `failures` have become too many."""
        parts = job.parts()
        if len(parts) > 1:
            streams = [self._go_on(part, failures) for part in parts]
            async with aclosing(merged(streams)) as events:
                async for event in events:
                    yield event
            return
        attempt, num_first = next(job.attempt_numbers), job.num_output_tokens + len(job.candidates)
        try:
            async with aclosing(self._attempt(job, attempt, failures.reason)) as events:
                async for event in events:
                    yield event
        except _RETRYABLE as error:
            failures = failures.and_one(error.reason, has_advanced=job.num_output_tokens > num_first)
            if self._is_over(job, failures):
                raise
            job.failed_on.add(job.prefill_worker)
            facts = {"reason": error.reason, "error": str(error)}
            log.warning("attempt_failed", request_id=job.request_id, attempt=attempt, **facts)
        else:
            return
        async with aclosing(self._go_on(job, failures)) as events:
            async for event in events:
                yield event

    async def _attempt(self, job: Job, attempt: int, reason: str) -> AsyncGenerator[DispatchEvent, None]:
        route = await self._route(job, patient=attempt > 0)
        spec = job.attempt_spec(attempt, self._clock())
        with self._registry.assignments.assign(route, ask := Ask.of(spec)) as assigned:
            job.timeline.note_dispatch(forecast(ask, route.num_tokens, route.computing))
            job.timeline.decode_worker = route.decode.key.worker_id
            job.prefill_worker = route.computing.key.worker_id
            job.timeline.prefill_worker = job.prefill_worker
            placed = Placed(attempt, route.prefill is None, reason, spec.candidates[0])
            async with aclosing(self._on_route(job, spec, route, placed)) as events:
                async for event in events:
                    if isinstance(event, PromptComputed):
                        assigned.prompt_done()
                        job.is_prompt_told = True
                    # A prompt on the decode worker counts whole until then: its class is not let in on a part of it.
                    elif isinstance(event, PromptProgress) and route.prefill is not None:
                        assigned.note_progress(event.num_computed_tokens)
                    yield event

    def _on_route(
        self, job: Job, spec: SequenceSpec, route: Route, placed: Placed
    ) -> AsyncGenerator[DispatchEvent, None]:
        """The client hears that it is placed while its worker begins, not before."""
        link = self._registry.link(route.decode.key)
        if link is None:
            raise PeerLostError(f"{route.decode.key.worker_id} has just gone")
        if route.prefill is None:
            return self._local(job, spec, link, route.hint, placed)
        return self._disaggregated(job, spec, route.prefill, link, route.hint, placed)

    async def _local(
        self, job: Job, spec: SequenceSpec, link: DecodeLink, hint: PrefixHint | None, placed: Placed
    ) -> AsyncGenerator[DispatchEvent, None]:
        """The decode worker computes the prompt itself."""
        handle = link.submit(spec, hint=hint)
        try:
            yield placed
            async with aclosing(self._decoded(job, handle, PromptScores(spec))) as events:
                async for event in events:
                    yield event
        finally:
            handle.close()

    async def _disaggregated(
        self,
        job: Job,
        spec: SequenceSpec,
        worker: WorkerView,
        link: DecodeLink,
        hint: PrefixHint | None,
        placed: Placed,
    ) -> AsyncGenerator[DispatchEvent, None]:
        """The prefill worker computes the prompt, the decode worker pulls its blocks meanwhile and goes on."""
        handle: DecodeHandle | None = None
        num_cached, scores = 0, PromptScores(spec)
        try:
            async with self._prefills.asked(spec, worker, hint) as responses:
                yield placed
                async for response in responses:
                    match response.WhichOneof("event"):
                        case "started":
                            job.timeline.note_started(response.started)
                            num_cached = response.started.cached_tokens
                            ticket = ticket_from_proto(response.started.ticket)
                            _require_own(ticket, worker)
                            handle = link.submit(job.at(self._clock(), spec), ticket)
                        case "progress":
                            yield PromptProgress(response.progress.computed_tokens)
                        case "prompt_scored":
                            scores.add(response.prompt_scored)
                        case "result":
                            yield PromptComputed(num_cached, worker.key.worker_id, scores.take())
                            for first in response.result.first_tokens:
                                # One that is none of them leaves a gap, which decode's tokens show.
                                if first.candidate in job.candidates:
                                    yield self._accept(job, first_tokens(first, index=len(spec.output_ids)))
                            if not job.candidates:
                                return
            handle = _require_begun(handle, worker)
            handle.keep(job.unfinished)
            async with aclosing(self._decoded(job, handle, scores)) as events:
                async for event in events:
                    yield event
        finally:
            self._leave(worker, spec.sequence_id, handle)

    async def _decoded(
        self, job: Job, handle: DecodeHandle, scores: PromptScores
    ) -> AsyncGenerator[DispatchEvent, None]:
        """What the decode worker says, until the last token; `scores` are complete when it does not compute the prompt."""
        num_cached: int | None = None
        async for event in handle:
            match event.WhichOneof("event"):
                case "started":
                    job.timeline.note_started(event.started)
                    num_cached = event.started.cached_tokens
                case "progress":
                    yield PromptProgress(event.progress.computed_tokens)
                case "prompt_scored":
                    scores.add(event.prompt_scored)
                case "kv_received":
                    received = event.kv_received
                    job.timeline.note_transfer(received.num_blocks, received.num_bytes, received.duration_s)
                # Otherwise its reader has ended it meanwhile.
                case "tokens" if event.tokens.candidate in job.candidates:
                    scores.require_complete()
                    if num_cached is not None:
                        yield PromptComputed(num_cached, job.timeline.decode_worker, scores.take())
                        num_cached = None
                    job.timeline.note_preemptions(event.tokens.candidate, event.tokens.num_preemptions)
                    yield self._accept(job, event.tokens)
                    if not job.candidates:
                        return
                    handle.keep(job.unfinished)

    def _accept(self, job: Job, message: decode_pb2.SequenceTokens) -> Tokens:
        fresh = job.accept(message.first_index, tuple(message.token_ids), message.candidate)
        if message.finish_reason:
            job.end(message.candidate)
        job.timeline.note_tokens()
        # One a token or none; what was seen has been dropped from the front of both.
        logprobs = message.logprobs[len(message.logprobs) - len(fresh) :] if message.logprobs else ()
        return Tokens(
            fresh,
            finish_reason_from_proto(message.finish_reason),
            tuple(map(logprob_from_proto, logprobs)),
            message.candidate,
        )

    # -- choosing workers

    async def _route(self, job: Job, *, patient: bool) -> Route:
        """Places an attempt. A patient one waits for a worker to come back, for a while and not past its deadline."""
        if not patient:
            return await self._place(job)
        wait_s, left_s = self._config.recovery_wait_s, job.time_left_s(self._clock())
        is_short = left_s is not None and left_s < wait_s
        try:
            async with asyncio.timeout(left_s if is_short else wait_s):
                while True:
                    # Taken before the look: who comes or goes after it still wakes us.
                    changed = self._registry.changed
                    with suppress(NoEndpointError):
                        return await self._place(job)
                    await changed.wait()
        except TimeoutError:
            if is_short:
                raise DeadlineError("queued") from None
            raise NoEndpointError(f"no worker came back within {wait_s:g} s") from None

    async def _place(self, job: Job) -> Route:
        if self._registry.served is None:
            raise NoEndpointError("no worker is there; start some or wait until they are up")
        workers = [view for role in _ROLES for view in self._registry.views(role)]
        facts = await self._lookup.facts(job, workers)
        # Of a later attempt more may be known, and other workers are there.
        job.held_blocks = None
        job.unplaced.close()
        # Looked at after the look-ups: what others were given meanwhile counts.
        return self._placer.place(facts, *(self._registry.views(role) for role in _ROLES))

    def _is_over(self, job: Job, failures: Failures) -> bool:
        """Whether another attempt is of no use. In all they are bounded too: a request may be what its workers die of."""
        config, is_late = self._config, job.deadline_s is not None and job.deadline_s <= self._clock()
        is_hopeless = failures.num_in_a_row >= config.max_attempts
        return is_late or is_hopeless or failures.num_in_all >= config.max_attempts_in_all

    # -- giving leases back

    def _leave(self, worker: WorkerView, sequence_id: SequenceId, handle: DecodeHandle | None) -> None:
        """However a disaggregated attempt ended: neither tier goes on with it."""
        if handle is not None:
            handle.close()
        if handle is None or not handle.has_kv:
            # Also without a ticket: all may be computed there, and only the news of it was not read.
            self._lease_release.start(worker.address, worker.key.boot_epoch, sequence_id)


def _require_own(ticket: KvTicket, worker: WorkerView) -> None:
    """Its tokens go to the client before a decode worker compares what it pulls: another process may be at its address by now."""
    if ticket.fingerprint.digest() != worker.fingerprint:
        raise PeerLostError(f"{worker.key.worker_id} serves something else than it has said")


def _require_begun(handle: DecodeHandle | None, worker: WorkerView) -> DecodeHandle:
    if handle is None:
        raise PeerLostError(f"{worker.key.worker_id} ended a prefill without a result")
    return handle
