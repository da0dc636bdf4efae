"""InferenceService: turns messages into requests or refuses them, and streams what comes of them."""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc

from paceline.core.clock import monotonic
from paceline.core.errors import (
    DeadlineError,
    DrainingError,
    EngineFailedError,
    InvariantError,
    NoEndpointError,
    PacelineError,
    PeerLostError,
)
from paceline.core.request import RequestId
from paceline.prefix_index.index import PrefixIndex
from paceline.runtime.grpc_status import abort_with, as_paceline_error
from paceline.runtime.log import get_logger
from paceline.runtime.version import VERSION
from paceline.v1 import inference_pb2
from router.admission import AdmissionController, Door
from router.intake import Call, Intake
from router.job import RequestRunner, Tokens, session_id_of
from router.sender import Sender
from router.served import ServedModel
from router.tenants import Tenant, Tenants
from router.workers import WorkerRegistry

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name

_MAX_TOKENIZING = 8
# Long for a client that reads, whose status is on its way at once.
_FAREWELL_S = 1.0
_Context = grpc.aio.ServicerContext[Any, Any]

_FAULTS = (NoEndpointError, DrainingError, PeerLostError, EngineFailedError, InvariantError)
_OUR_FAULTS = {each.reason for each in _FAULTS}

log = get_logger()


@dataclass(frozen=True, slots=True)
class ServiceStats:
    """Requests since the start by how they ended: a finish reason, "cancelled", or the reason of an error."""

    num_ended: Mapping[str, int]


@dataclass(slots=True)
class _End:
    """How a request has ended; whoever leaves before anything else is known has cancelled it."""

    how: str = "cancelled"


class InferenceServicer:
    """The public handlers. Generate and Tokenize get raw bytes, so that text that is not UTF-8 has a proper error."""

    def __init__(
        self,
        intake: Intake,
        registry: WorkerRegistry,
        index: PrefixIndex,
        admission: AdmissionController,
        dispatcher: RequestRunner,
        tenants: Tenants,
        *,
        max_unread_s: float,
    ) -> None:
        self._intake = intake
        self._registry = registry
        self._index = index
        self._admission = admission
        self._dispatcher = dispatcher
        self._tenants = tenants
        self._max_unread_s = max_unread_s
        # Requests to tokenise wait in the same line as those to generate.
        self._tokenizing = Door(_MAX_TOKENIZING)
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

    async def Generate(self, raw: bytes, context: _Context) -> None:
        """Generates from one prompt."""
        request_id, end = RequestId(secrets.token_hex(16)), _End()
        async with _status_of_errors(context, request_id):
            with self._counted(end):
                tenant = self._tenants.of_call(context.invocation_metadata())
                session_id = session_id_of(context.invocation_metadata())
                with self._intake.reading(raw, tenant) as reading:
                    async with self._admission.admit(tenant, len(raw)) as visit:
                        call = await self._intake.take(reading, request_id, visit, context.time_remaining())
                        call.job.session_id = session_id
                        with Sender(context, self._max_unread_s) as sender:
                            await self._run(call, end, sender)

    async def Tokenize(self, raw: bytes, context: _Context) -> inference_pb2.TokenizeResponse:
        """Turns text or a chat into token ids."""
        async with _status_of_errors(context, ""):
            tenant = self._tenants.of_call(context.invocation_metadata())
            limits = self._intake.limits(tenant)
            with self._tokenizing.enter():
                await self._admission.charge_request(tenant)
                token_ids = await self._intake.tokenize(raw, limits)
            return inference_pb2.TokenizeResponse(
                token_ids=token_ids, max_prompt_tokens=limits.max_prompt_tokens
            )

    async def GetServerInfo(self, raw: bytes, context: _Context) -> inference_pb2.GetServerInfoResponse:
        """Says what is served."""
        async with _status_of_errors(context, ""):
            tenant = self._tenants.of_call(context.invocation_metadata())
            return self._server_info(self._intake.require_served(), tenant)

    def _server_info(self, served: ServedModel, tenant: Tenant) -> inference_pb2.GetServerInfoResponse:
        limits = self._intake.limits(tenant)
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
            limiter_mode=self._admission.limiter_mode,
            workers=self._registry.infos(),
        )

    @contextmanager
    def _counted(self, end: _End) -> Iterator[None]:
        """Counts a request by how it ends, before its client hears of that."""
        try:
            yield
        except Exception as error:
            end.how = as_paceline_error(error).reason
            raise
        finally:
            self._num_ended[end.how] += 1

    async def _run(self, call: Call, end: _End, sender: Sender) -> None:
        try:
            async with aclosing(self._dispatcher.run(call.job)) as events:
                async for event in events:
                    for response in call.output.take(event):
                        await sender.send(response)
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
            call.visit.use(_num_used(call, end.how))
            _log_end(call, end.how)


@asynccontextmanager
async def _status_of_errors(context: _Context, request_id: str) -> AsyncIterator[None]:
    """Ends the call with the status of whatever error leaves the body; a bug is logged, without its text."""
    try:
        yield
    except PacelineError as error:
        log.info("request_refused", request_id=request_id, reason=error.reason)
        await _abort(context, error)
    except Exception as error:
        log.exception("request_failed", request_id=request_id)
        await _abort(context, as_paceline_error(error))


async def _abort(context: _Context, error: PacelineError) -> None:
    """Who is gone need not hear of it.

    A client that does not read could let this wait for as long as it is connected, and all that it has sent would stay with us. gRPC
    has the status by then, and gives it to a client that reads later.
    """
    with suppress(grpc.aio.InternalError, TimeoutError):
        async with asyncio.timeout(_FAREWELL_S):
            await abort_with(context, error)


def _num_used(call: Call, ended: str) -> int:
    """The tokens that are charged: a prompt that was begun is, and so are those that the client has; what we broke is not."""
    num_prompt = 0 if ended in _OUR_FAULTS else len(call.job.spec.prompt_ids)
    return num_prompt + call.output.num_output_tokens


def _log_end(call: Call, ended: str) -> None:
    """One line a request: facts, never text."""
    timeline = call.job.timeline.to_proto()
    log.info(
        "request_done",
        request_id=call.job.request_id,
        client_request_id=call.request.client_request_id[:64],
        tenant=call.visit.tenant.name,
        ended=ended,
        num_prompt_tokens=len(call.job.spec.prompt_ids),
        num_output_tokens=call.output.num_output_tokens,
        prefill_worker=timeline.prefill_worker,
        decode_worker=timeline.decode_worker,
        attempts=timeline.attempts,
        queued_s=round(timeline.queued_s, 4),
        predicted_ttft_s=_rounded(call.job.timeline.predicted_ttft_s),
        ttft_s=_rounded(call.job.timeline.ttft_s),
        prefill_s=round(timeline.prefill_s, 4),
        transfer_s=round(timeline.transfer_s, 4),
        decode_s=round(timeline.decode_s, 4),
        kv_bytes=timeline.kv_bytes,
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
