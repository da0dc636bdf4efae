"""InferenceService: turns messages into requests or refuses them, and streams what comes of them."""

import secrets
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from paceline.core.clock import monotonic
from paceline.core.errors import (
    BadStopError,
    DeadlineError,
    NoEndpointError,
    PacelineError,
    PromptTooLongError,
)
from paceline.core.request import Request, RequestId, RequestLimits, SequenceId, SequenceSpec, StopConditions
from paceline.prefix_index.index import PrefixIndex
from paceline.runtime.grpc_status import abort_with, as_paceline_error
from paceline.runtime.log import get_logger
from paceline.runtime.version import VERSION
from paceline.runtime.wire import check_prompt_logprobs, parse_generate, parse_tokenize
from paceline.v1 import inference_pb2
from router.admission import AdmissionController
from router.cache_scopes import CacheScopes
from router.config import RouterConfig
from router.job import Job, RequestRunner, Tokens, session_id_of
from router.output import OutputStream
from router.timeline import RequestTimeline
from router.tokenizer import Tokenizer
from router.workers import ServedModel, WorkerRegistry

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name

_MAX_BYTES_PER_TOKEN = 16
_MAX_TOKENIZING = 8
# A deadline is met this much early, so that its error is ours, with its phase, and not the caller's own clock's.
_DEADLINE_MARGIN_S = 0.05

_Context = grpc.aio.ServicerContext[Any, Any]

log = get_logger()


@dataclass(frozen=True, slots=True)
class ServiceStats:
    """Requests since the start by how they ended: a finish reason, "cancelled", or the reason of an error."""

    num_ended: Mapping[str, int]


@dataclass(slots=True)
class _End:
    """How a request has ended; whoever leaves before anything else is known has cancelled it."""

    how: str = "cancelled"


@dataclass(frozen=True, slots=True)
class _Call:
    """A request that has been taken, and what becomes of it."""

    request: Request
    job: Job
    output: OutputStream


class InferenceServicer:
    """The public handlers. Generate and Tokenize get raw bytes, so that text that is not UTF-8 has a proper error."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        registry: WorkerRegistry,
        index: PrefixIndex,
        admission: AdmissionController,
        dispatcher: RequestRunner,
        scopes: CacheScopes,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._registry = registry
        self._index = index
        self._admission = admission
        self._dispatcher = dispatcher
        self._scopes = scopes
        # Requests to tokenise wait in the same line as those to generate.
        self._tokenizing = AdmissionController(_MAX_TOKENIZING)
        self._num_ended: Counter[str] = Counter()

    def stats(self) -> ServiceStats:
        """A picture of now."""
        return ServiceStats(dict(self._num_ended))

    def add_to(self, server: grpc.aio.Server) -> None:
        """Puts the service on a server."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.Generate, response_serializer=inference_pb2.GenerateResponse.SerializeToString
            ),
            "Tokenize": grpc.unary_unary_rpc_method_handler(
                self.Tokenize, response_serializer=inference_pb2.TokenizeResponse.SerializeToString
            ),
            "GetServerInfo": grpc.unary_unary_rpc_method_handler(
                self.GetServerInfo, response_serializer=inference_pb2.GetServerInfoResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    async def Generate(self, raw: bytes, context: _Context) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Generates from one prompt."""
        request_id, end = RequestId(secrets.token_hex(16)), _End()
        try:
            async with _status_of_errors(context, request_id, end):
                with self._admission.admit() as position:
                    call = await self._prepare(raw, request_id, position, context.time_remaining())
                    call.job.session_id = session_id_of(context.invocation_metadata())
                    async with aclosing(self._run(call, end)) as responses:
                        async for response in responses:
                            yield response
        finally:
            self._num_ended[end.how] += 1

    async def Tokenize(self, raw: bytes, context: _Context) -> inference_pb2.TokenizeResponse:
        """Turns text or a chat into token ids."""
        async with _status_of_errors(context, ""):
            limits = self._limits(self._require_served())
            with self._tokenizing.admit():
                token_ids = await self._tokenizer.aencode(parse_tokenize(raw, limits))
            return inference_pb2.TokenizeResponse(
                token_ids=token_ids, max_prompt_tokens=limits.max_prompt_tokens
            )

    async def GetServerInfo(self, raw: bytes, context: _Context) -> inference_pb2.GetServerInfoResponse:
        """Says what is served."""
        async with _status_of_errors(context, ""):
            return self._server_info(self._require_served())

    def _server_info(self, served: ServedModel) -> inference_pb2.GetServerInfoResponse:
        limits = self._limits(served)
        return inference_pb2.GetServerInfoResponse(
            model_id=served.model_id,
            fingerprint=served.fingerprint.digest().hex(),
            version=VERSION,
            limits=inference_pb2.Limits(
                max_prompt_bytes=limits.max_prompt_bytes,
                max_prompt_tokens=limits.max_prompt_tokens,
                max_output_tokens=limits.max_output_tokens,
                max_model_tokens=limits.max_model_tokens,
                max_n=limits.max_n,
                max_stop_count=limits.max_stop_count,
                max_stop_chars=limits.max_stop_chars,
            ),
            index_mode=self._index.mode,
            limiter_mode="none",
            workers=self._registry.infos(),
        )

    async def _prepare(
        self, raw: bytes, request_id: RequestId, position: int, time_remaining_s: float | None
    ) -> _Call:
        """Everything before the first worker hears of the request; raises what refuses it."""
        timeline = RequestTimeline()
        limits = self._limits(self._require_served())
        request = parse_generate(raw, limits)
        prompt_ids = await self._tokenizer.aencode(request.prompt)
        job = self._job(request, request_id, prompt_ids, limits, timeline)
        if time_remaining_s is not None:
            job.deadline_s = timeline.received_s + time_remaining_s - _DEADLINE_MARGIN_S
            if job.deadline_s <= monotonic():
                raise DeadlineError("queued")
        output = OutputStream(
            self._tokenizer,
            request.stopping,
            timeline,
            request_id=request_id,
            num_prompt_tokens=len(prompt_ids),
            queue_position=position,
            n=request.n,
        )
        return _Call(request, job, output)

    async def _run(self, call: _Call, end: _End) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        try:
            async with aclosing(self._dispatcher.run(call.job)) as events:
                async for event in events:
                    for response in call.output.take(event):
                        yield response
                    # The dispatcher need not know of stop strings.
                    if isinstance(event, Tokens) and call.output.has_ended(event.candidate):
                        call.job.end(event.candidate)
                    if call.output.finish_reason is not None:
                        end.how = call.output.finish_reason.value
                        return
        except Exception as error:
            end.how = as_paceline_error(error).reason
            raise
        finally:
            deadline_s = call.job.deadline_s
            if end.how == _End().how and deadline_s is not None and deadline_s <= monotonic():
                end.how = DeadlineError.reason
            _log_end(call, end.how)

    def _job(
        self,
        request: Request,
        request_id: RequestId,
        prompt_ids: tuple[int, ...],
        limits: RequestLimits,
        timeline: RequestTimeline,
    ) -> Job:
        num_prompt = len(prompt_ids)
        if num_prompt > limits.max_prompt_tokens:
            raise PromptTooLongError(limit=limits.max_prompt_tokens, given=num_prompt)
        check_prompt_logprobs(request, num_prompt)
        num_left = limits.max_model_tokens - num_prompt
        spec = SequenceSpec(
            sequence_id=SequenceId(request_id, 0),
            prompt_ids=prompt_ids,
            sampling=request.sampling,
            max_tokens=self._max_tokens(request.stopping, num_prompt, num_left),
            min_tokens=request.stopping.min_tokens,
            stop_token_ids=request.stopping.stop_token_ids,
            ignore_eos=request.stopping.ignore_eos,
            num_top_logprobs=request.num_top_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            bypass_cache=request.bypass_cache,
            cache_scope=self._scopes.scope_of(request.public_prefix, prompt_ids),
            candidates=tuple(range(request.n)),
            priority=request.priority,
        )
        return Job(spec, None, timeline)

    def _max_tokens(self, stopping: StopConditions, num_prompt: int, num_left: int) -> int:
        """What was asked for, or the default; raises BadStopError when that does not fit behind the prompt."""
        for field, number in (("max_tokens", stopping.max_tokens or 0), ("min_tokens", stopping.min_tokens)):
            if number > num_left:
                problem = f"is {number}; after this prompt of {num_prompt} tokens {num_left} fit"
                raise BadStopError(f"stopping.{field}", problem)
        return stopping.max_tokens or min(max(self._config.default_max_tokens, stopping.min_tokens), num_left)

    def _require_served(self) -> ServedModel:
        served = self._registry.served
        if served is None:
            raise NoEndpointError("no worker is there; start some or wait until they are up")
        return served

    def _limits(self, served: ServedModel) -> RequestLimits:
        return RequestLimits(
            max_model_tokens=served.max_model_tokens,
            max_output_tokens=served.max_model_tokens - 1,
            vocab_size=served.vocab_size,
            # Text of more bytes than this for each token is no text; it would only keep the tokenizer from the others.
            max_prompt_bytes=min(
                self._config.max_prompt_bytes, _MAX_BYTES_PER_TOKEN * served.max_model_tokens
            ),
        )


@asynccontextmanager
async def _status_of_errors(
    context: _Context, request_id: str, end: _End | None = None
) -> AsyncIterator[None]:
    """Ends the call with the status of whatever error leaves the body; a bug is logged, without its text."""
    end = end or _End()
    try:
        yield
    except PacelineError as error:
        end.how = error.reason
        log.info("request_refused", request_id=request_id, reason=error.reason)
        await abort_with(context, error)
    except Exception as error:
        end.how = as_paceline_error(error).reason
        log.exception("request_failed", request_id=request_id)
        await abort_with(context, as_paceline_error(error))


def _log_end(call: _Call, ended: str) -> None:
    """One line a request: facts, never text."""
    timeline = call.job.timeline.to_proto()
    log.info(
        "request_done",
        request_id=call.job.spec.sequence_id.request_id,
        client_request_id=call.request.client_request_id[:64],
        ended=ended,
        num_prompt_tokens=len(call.job.spec.prompt_ids),
        num_output_tokens=call.output.num_output_tokens,
        prefill_worker=timeline.prefill_worker,
        decode_worker=timeline.decode_worker,
        attempts=timeline.attempts,
        queued_s=round(timeline.queued_s, 4),
        prefill_s=round(timeline.prefill_s, 4),
        transfer_s=round(timeline.transfer_s, 4),
        decode_s=round(timeline.decode_s, 4),
        kv_bytes=timeline.kv_bytes,
    )
