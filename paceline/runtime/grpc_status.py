"""The only table of error <-> gRPC code, and how an error's reason and facts travel: as google.rpc.ErrorInfo."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from paceline.core import errors

DOMAIN = "paceline"
# A RetryInfo takes about ten thousand years.
_LONGEST_DELAY_S = 1e9
# What gRPC says where one side speaks TLS and the other does not, or one does not trust the other.
_NOT_LET_IN = ("Socket closed", "handshake failed", "erification")
_CHECK_TLS = "do both sides have --cluster-tls-cert, signed by one CA, for the name that is called?"

# The first class that an error is an instance of decides.
_CODES: tuple[tuple[type[errors.PacelineError], grpc.StatusCode], ...] = (
    (errors.InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NotBuiltError, grpc.StatusCode.UNIMPLEMENTED),
    (errors.UnsupportedModelError, grpc.StatusCode.UNIMPLEMENTED),
    (errors.TenantUnknownError, grpc.StatusCode.UNAUTHENTICATED),
    (errors.PeerUnknownError, grpc.StatusCode.UNAUTHENTICATED),
    (errors.AccessError, grpc.StatusCode.PERMISSION_DENIED),
    (errors.OverloadedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.CancelledRequestError, grpc.StatusCode.CANCELLED),
    (errors.FingerprintMismatchError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.KvChecksumError, grpc.StatusCode.DATA_LOSS),
    (errors.KvError, grpc.StatusCode.ABORTED),
)


def code_of(error: errors.PacelineError) -> grpc.StatusCode:
    """The gRPC code of an error; INTERNAL for what has none of its own."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def status_of(error: errors.PacelineError) -> status_pb2.Status:
    """The error as google.rpc.Status with ErrorInfo, and RetryInfo where a retry helps."""
    number: int = code_of(error).value[0]
    return status_pb2.Status(code=number, message=str(error), details=_details(error))


async def abort_with(context: "grpc.aio.ServicerContext[Any, Any]", error: errors.PacelineError) -> NoReturn:
    """Ends the call with the error's status."""
    await context.abort_with_status(rpc_status.to_status(status_of(error)))
    raise AssertionError("abort_with_status never returns")


def error_from_rpc(error: grpc.aio.AioRpcError, peer: str) -> errors.PacelineError:
    """A failed call to another of our processes as one of our errors; `peer` names it in the message."""
    info = _error_info(error)
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineError(info.metadata.get("phase", "prefill"))
    return error_from_reason(info.reason, _said(error), peer, dict(info.metadata))


def _said(error: grpc.aio.AioRpcError) -> str:
    """The status' own words; of a peer that is there and does not let us in, also what may be wrong."""
    said = error.details() or error.code().name
    # To hear that nobody listens is another thing: "Connection refused".
    hangs_up = said.startswith("failed to connect") and any(word in said for word in _NOT_LET_IN)
    return f"{said} ({_CHECK_TLS})" if hangs_up else said


def _seconds(text: str) -> float:
    """Of a delay that can be passed on; raises ValueError for what is none, NaN included."""
    seconds = float(text)
    if not 0 <= seconds <= _LONGEST_DELAY_S:
        raise ValueError("no delay")
    return seconds


# What a process of ours may hear from another and understand: made of its message, its name and its facts.
_UNDERSTOOD: dict[str, Callable[[str, str, Mapping[str, str]], errors.PacelineError]] = {
    errors.KvChecksumError.reason: lambda _, __, facts: errors.KvChecksumError(
        int(facts.get("ordinal", "0"))
    ),
    errors.KvLostError.reason: lambda message, _, __: errors.KvLostError(message),
    errors.LeaseExpiredError.reason: lambda message, _, __: errors.LeaseExpiredError(message),
    errors.FingerprintMismatchError.reason: lambda _, __, facts: errors.FingerprintMismatchError(
        *(facts.get(name, "?") for name in ("field", "ours", "theirs"))
    ),
    errors.DrainingError.reason: lambda _, peer, __: errors.DrainingError(f"{peer} is draining"),
    errors.EngineFailedError.reason: lambda message, peer, _: errors.EngineFailedError(f"{peer}: {message}"),
    errors.DeadlineError.reason: lambda _, __, facts: errors.DeadlineError(facts.get("phase", "decode")),
    errors.QueueFullError.reason: lambda message, _, facts: errors.QueueFullError(
        message, retry_after_s=_seconds(facts.get("retry_after_s", "1"))
    ),
    errors.InvariantError.reason: lambda message, peer, _: errors.InvariantError(f"{peer}: {message}"),
}


def error_from_reason(
    reason: str, message: str, peer: str, facts: Mapping[str, str] = MappingProxyType({})
) -> errors.PacelineError:
    """What another of our processes says has gone wrong there; an unknown reason means that it is lost to us."""
    lost = errors.PeerLostError(f"{peer} is lost: {message}")
    understood = _UNDERSTOOD.get(reason)
    if understood is None:
        return lost
    try:
        return understood(message, peer, facts)
    except ValueError:  # a fact is not the number that it should be
        return lost


def as_paceline_error(error: BaseException) -> errors.PacelineError:
    """Any exception as one that has a status; what is not ours already is a bug of ours."""
    if isinstance(error, errors.PacelineError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return errors.CancelledRequestError("the request was cancelled")
    return errors.InvariantError(f"unexpected {type(error).__name__}; this is a bug, see the server's log")


def _details(error: errors.PacelineError) -> list[any_pb2.Any]:
    details = [
        _packed(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.facts()))
    ]
    if isinstance(error, errors.OverloadedError):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return details


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            # What is no status says nothing; the code is there all the same.
            with suppress(DecodeError):
                for detail in status_pb2.Status.FromString(value).details:
                    if detail.Unpack(info):
                        return info
    return info
