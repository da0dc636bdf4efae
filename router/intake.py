"""What a client sends becomes work for the workers here, or is refused: parsed, tokenised, measured against all limits."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from paceline.core.clock import monotonic
from paceline.core.errors import (
    BadStopError,
    DeadlineError,
    NoEndpointError,
    PromptTooLongError,
    QueueFullError,
)
from paceline.core.request import Request, RequestId, RequestLimits, SequenceId, SequenceSpec, StopConditions
from paceline.runtime.wire import check_prompt_logprobs, parse_generate, parse_tokenize
from router.admission import Visit
from router.cache_scopes import CacheScopes
from router.config import RouterConfig
from router.gate import Gate
from router.job import Job
from router.output import OutputStream
from router.served import ServedModel
from router.tenants import Tenant
from router.timeline import RequestTimeline
from router.tokenizer import Tokenizer
from router.workers import WorkerRegistry

_MAX_BYTES_PER_TOKEN = 16
# Text of so many is tokenised in less time than it takes to refuse somebody: it need not wait until its sender has been let in.
_SHORT_BYTES = 512
# A deadline is met this much early, so that its error is ours, with its phase, and not the caller's own clock's.
_DEADLINE_MARGIN_S = 0.05


@dataclass(frozen=True, slots=True)
class Call:
    """A request that has been taken, and what becomes of it."""

    request: Request
    job: Job
    output: OutputStream
    visit: Visit


@dataclass(slots=True)
class Reading:
    """What a client has sent, and what is read of it already, or why it cannot be."""

    raw: bytes
    # It begins here, so that what is asked of Redis is a part of the time to first token.
    timeline: RequestTimeline = field(default_factory=RequestTimeline)
    # Until the end of `Intake.reading`: an error that holds what it came from would be left to the garbage collector.
    early: "asyncio.Task[tuple[Request, tuple[int, ...]]] | None" = None


class Intake:
    """Knows the model's limits, the tokenizer, whose blocks may be shared and who would be served in time; it owns nothing."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        registry: WorkerRegistry,
        scopes: CacheScopes,
        gate: Gate,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._registry = registry
        self._scopes = scopes
        self._gate = gate

    @contextmanager
    def reading(self, raw: bytes, tenant: Tenant) -> Iterator[Reading]:
        """Reads what is short while Redis is asked whether its sender may come in. Nobody hears what is wrong with it before that."""
        if len(raw) > _SHORT_BYTES:
            yield Reading(raw)
            return
        early = asyncio.create_task(self._read_meanwhile(raw, tenant))
        reading = Reading(raw, early=early)
        try:
            yield reading
        finally:
            # Also of one that has failed: nobody need hear why.
            early.cancel()
            reading.early = None

    async def _read_meanwhile(self, raw: bytes, tenant: Tenant) -> tuple[Request, tuple[int, ...]]:
        # Begun before Redis is asked, and to go on once that has left.
        await asyncio.sleep(0)
        return await self._read(raw, tenant)

    async def _read(self, raw: bytes, tenant: Tenant) -> tuple[Request, tuple[int, ...]]:
        request = parse_generate(raw, self.limits(tenant))
        tenant.require_priority(request.priority)
        return request, await self._tokenizer.aencode(request.prompt)

    async def take(
        self, reading: Reading, request_id: RequestId, visit: Visit, time_remaining_s: float | None
    ) -> Call:
        """Everything before the first worker hears of a request that was let in; raises what refuses it."""
        timeline, now_s = reading.timeline, monotonic()
        request, prompt_ids = await (reading.early or self._read(reading.raw, visit.tenant))
        job = self._job(request, request_id, prompt_ids, timeline, visit.tenant)
        if time_remaining_s is not None:
            job.deadline_s = now_s + time_remaining_s - _DEADLINE_MARGIN_S
            if job.deadline_s <= monotonic():
                raise DeadlineError("queued")
        await self._require_time(job, visit)
        output = OutputStream(
            self._tokenizer,
            request.stopping,
            timeline,
            request_id=request_id,
            num_prompt_tokens=len(prompt_ids),
            queue_position=visit.position,
            n=request.n,
        )
        # Last of all: what is refused above costs no tokens.
        await self._reserve(job, visit)
        return Call(request, job, output, visit)

    async def _reserve(self, job: Job, visit: Visit) -> None:
        """Takes the tokens, and asks the table meanwhile: both go to Redis and back at once, and a look changes nothing.

        Tokens are taken by who gives them back in the end: nothing is on its way to be taken once this has failed.
        """
        looking = asyncio.create_task(self._gate.look_up(job))
        try:
            await visit.reserve(len(job.spec.prompt_ids) + len(job.spec.candidates) * job.spec.max_tokens)
            await looking
        finally:
            looking.cancel()

    async def _require_time(self, job: Job, visit: Visit) -> None:
        """Whoever is refused here is not charged."""
        job.unplaced = visit.unplaced
        try:
            await self._gate.require_time(job)
        except (QueueFullError, DeadlineError):
            visit.give_request_back()
            raise

    async def tokenize(self, raw: bytes, limits: RequestLimits) -> tuple[int, ...]:
        """The tokens of a TokenizeRequest's bytes; raises InvalidRequestError."""
        return await self._tokenizer.aencode(parse_tokenize(raw, limits))

    def limits(self, tenant: Tenant) -> RequestLimits:
        """What a request of this tenant may ask for; raises NoEndpointError while no worker is known."""
        served = self.require_served()
        most = served.max_model_tokens - 1
        return RequestLimits(
            max_model_tokens=served.max_model_tokens,
            max_output_tokens=min(most, tenant.max_output_tokens or most),
            vocab_size=served.vocab_size,
            # Text of more bytes than this for each token is no text; it would only keep the tokenizer from the others.
            max_prompt_bytes=min(
                self._config.max_prompt_bytes, _MAX_BYTES_PER_TOKEN * served.max_model_tokens
            ),
        )

    def require_served(self) -> ServedModel:
        """What the workers serve; raises NoEndpointError while none is known."""
        served = self._registry.served
        if served is None:
            raise NoEndpointError("no worker is there; start some or wait until they are up")
        return served

    def _job(
        self,
        request: Request,
        request_id: RequestId,
        prompt_ids: tuple[int, ...],
        timeline: RequestTimeline,
        tenant: Tenant,
    ) -> Job:
        limits, num_prompt = self.limits(tenant), len(prompt_ids)
        if num_prompt > limits.max_prompt_tokens:
            raise PromptTooLongError(limit=limits.max_prompt_tokens, given=num_prompt)
        check_prompt_logprobs(request, num_prompt)
        num_left = limits.max_model_tokens - num_prompt
        spec = SequenceSpec(
            sequence_id=SequenceId(request_id, 0),
            prompt_ids=prompt_ids,
            sampling=request.sampling,
            max_tokens=self._max_tokens(request.stopping, num_prompt, num_left, limits.max_output_tokens),
            min_tokens=request.stopping.min_tokens,
            stop_token_ids=request.stopping.stop_token_ids,
            ignore_eos=request.stopping.ignore_eos,
            num_top_logprobs=request.num_top_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            bypass_cache=request.bypass_cache,
            cache_scope=self._scopes.scope_of(request.public_prefix, prompt_ids, tenant.name),
            candidates=tuple(range(request.n)),
            priority=request.priority,
            tenant=tenant.name,
            tenant_weight=tenant.weight,
        )
        return Job(spec, None, timeline)

    def _max_tokens(self, stopping: StopConditions, num_prompt: int, num_left: int, most: int) -> int:
        """What was asked for, or the default; raises BadStopError when that does not fit behind the prompt."""
        for name, number in (("max_tokens", stopping.max_tokens or 0), ("min_tokens", stopping.min_tokens)):
            if number > num_left:
                problem = f"is {number}; after this prompt of {num_prompt} tokens {num_left} fit"
                raise BadStopError(f"stopping.{name}", problem)
        default = max(self._config.default_max_tokens, stopping.min_tokens)
        return stopping.max_tokens or min(default, num_left, most)
