"""Errors as gRPC statuses, over a real server and back."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from paceline.client_error import from_rpc_error
from paceline.core import errors
from paceline.core.errors import PacelineError
from paceline.runtime.grpc_status import (
    DOMAIN,
    abort_with,
    as_paceline_error,
    code_of,
    error_from_reason,
    error_from_rpc,
)
from tests.factories import make_errors

Code = grpc.StatusCode
CODES = {
    "BAD_PROMPT": Code.INVALID_ARGUMENT,
    "PROMPT_TOO_LONG": Code.INVALID_ARGUMENT,
    "BAD_SAMPLING": Code.INVALID_ARGUMENT,
    "BAD_STOP": Code.INVALID_ARGUMENT,
    "BAD_FIELD": Code.INVALID_ARGUMENT,
    "NOT_BUILT": Code.UNIMPLEMENTED,
    "ARCHITECTURE_UNSUPPORTED": Code.UNIMPLEMENTED,
    "TENANT_UNKNOWN": Code.UNAUTHENTICATED,
    "PEER_UNKNOWN": Code.UNAUTHENTICATED,
    "SCOPE_FORBIDDEN": Code.PERMISSION_DENIED,
    "QUEUE_FULL": Code.RESOURCE_EXHAUSTED,
    "RATE_LIMITED": Code.RESOURCE_EXHAUSTED,
    "SLOW_CONSUMER": Code.RESOURCE_EXHAUSTED,
    "NO_ENDPOINT": Code.UNAVAILABLE,
    "DRAINING": Code.UNAVAILABLE,
    "PEER_LOST": Code.UNAVAILABLE,
    "ENGINE_FAILED": Code.UNAVAILABLE,
    "DEADLINE_EXCEEDED": Code.DEADLINE_EXCEEDED,
    "CANCELLED": Code.CANCELLED,
    "FINGERPRINT_MISMATCH": Code.FAILED_PRECONDITION,
    "KV_LOST": Code.ABORTED,
    "LEASE_EXPIRED": Code.ABORTED,
    "KV_CHECKSUM": Code.DATA_LOSS,
    "INVARIANT": Code.INTERNAL,
    "CONFIG": Code.INTERNAL,
    "START": Code.INTERNAL,
}
# What one of our processes may hear from another and understand.
UNDERSTOOD = {
    "KV_CHECKSUM",
    "KV_LOST",
    "LEASE_EXPIRED",
    "FINGERPRINT_MISMATCH",
    "DRAINING",
    "ENGINE_FAILED",
    "DEADLINE_EXCEEDED",
    "INVARIANT",
    "QUEUE_FULL",
}
ERRORS = make_errors()
IDS = [type(error).__name__ for error in ERRORS]
Call = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]


async def _fail(request: bytes, context: "grpc.aio.ServicerContext[Any, Any]") -> bytes:
    """Ends the call with the error that is asked for by its place."""
    if request == b"crash":
        raise ValueError("a bug")
    if request == b"hang":
        await asyncio.Event().wait()
    await abort_with(context, ERRORS[int(request)])


@pytest.fixture
async def call() -> AsyncIterator[Call]:
    """A method that fails on a real server."""
    server = grpc.aio.server()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(_fail)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Fail": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel.unary_unary("/test.Test/Fail")
    await server.stop(None)


async def _failed(call: Call, request: bytes, timeout_s: float | None = None) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(request, timeout=timeout_s)
    return caught.value


def _details(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """google.rpc.Status as any client finds it."""
    values = dict(error.trailing_metadata() or ())
    status = status_pb2.Status()
    status.ParseFromString(values["grpc-status-details-bin"])
    return status


def test_each_error_has_one_code() -> None:
    """The table of the contract, and no error is missing in it."""
    assert {error.reason: code_of(error) for error in ERRORS} == CODES


@pytest.mark.parametrize("index", range(len(ERRORS)), ids=IDS)
async def test_an_error_arrives_with_code_reason_facts_and_message(call: Call, index: int) -> None:
    """Over a real connection: code and message in the status, reason, domain and facts in ErrorInfo."""
    error = ERRORS[index]
    failed = await _failed(call, str(index).encode())
    status, info = _details(failed), error_details_pb2.ErrorInfo()
    assert failed.code() is CODES[error.reason]
    assert failed.details() == status.message == str(error)
    assert status.code == failed.code().value[0]
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain, dict(info.metadata)) == (error.reason, DOMAIN, error.facts())
    assert from_rpc_error(failed).reason == error.reason


@pytest.mark.parametrize("index", range(len(ERRORS)), ids=IDS)
async def test_a_delay_is_told_exactly_where_a_retry_helps(call: Call, index: int) -> None:
    """RetryInfo comes with every refusal for want of room, and with no other error."""
    error, delays = ERRORS[index], list[float]()
    for detail in _details(await _failed(call, str(index).encode())).details:
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(retry):
            delays.append(retry.retry_delay.ToNanoseconds() / 1e9)
    assert delays == ([error.retry_after_s] if isinstance(error, errors.OverloadedError) else [])


@pytest.mark.parametrize("index", range(len(ERRORS)), ids=IDS)
async def test_what_another_process_says_is_understood(call: Call, index: int) -> None:
    """The errors between our processes come back as themselves, facts included; any other means a lost peer."""
    error = ERRORS[index]
    received = error_from_rpc(await _failed(call, str(index).encode()), "worker-0")
    if error.reason in UNDERSTOOD:
        assert type(received) is type(error)
        assert received.facts() == error.facts()
    else:
        assert type(received) is errors.PeerLostError
        assert "worker-0" in str(received)


async def test_a_failure_without_details_is_a_lost_peer(call: Call) -> None:
    """A bug over there, or nobody there: the message names the peer, and the reason is empty."""
    crashed = await _failed(call, b"crash")
    assert from_rpc_error(crashed).reason == ""
    assert isinstance(error_from_rpc(crashed, "worker-0"), errors.PeerLostError)
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        gone = await _failed(channel.unary_unary("/test.Test/Fail"), b"0")
    assert gone.code() is Code.UNAVAILABLE
    assert "worker-0" in str(error_from_rpc(gone, "worker-0"))


async def test_a_deadline_that_passed_on_the_way_is_a_deadline(call: Call) -> None:
    """Our own time-out of a call, about which the other side says nothing."""
    late = await _failed(call, b"hang", timeout_s=0.05)
    assert isinstance(error_from_rpc(late, "worker-0"), errors.DeadlineError)


def test_a_reason_without_facts_is_still_understood() -> None:
    """An older process may not send them."""
    for reason in UNDERSTOOD:
        assert error_from_reason(reason, "a message", "worker-0").reason == reason
    assert error_from_reason("NEVER_HEARD_OF", "a message", "worker-0").reason == "PEER_LOST"


@pytest.mark.parametrize(
    ("reason", "facts"),
    [
        ("KV_CHECKSUM", {"ordinal": "first"}),
        ("QUEUE_FULL", {"retry_after_s": "soon"}),
        ("QUEUE_FULL", {"retry_after_s": "nan"}),
        ("QUEUE_FULL", {"retry_after_s": "-1"}),
        ("QUEUE_FULL", {"retry_after_s": "1e300"}),
    ],
)
def test_facts_that_make_no_sense_are_a_lost_peer(reason: str, facts: dict[str, str]) -> None:
    """They are neither a bug here nor passed on."""
    assert error_from_reason(reason, "a message", "worker-0", facts).reason == "PEER_LOST"


def test_any_exception_has_a_status() -> None:
    """Ours stays itself, a cancellation is one, and everything else is a bug of ours whose text stays here."""
    ours = errors.KvLostError("gone")
    assert as_paceline_error(ours) is ours
    assert isinstance(as_paceline_error(asyncio.CancelledError()), errors.CancelledRequestError)
    bug = as_paceline_error(KeyError("secret"))
    assert isinstance(bug, errors.InvariantError)
    assert "KeyError" in str(bug)
    assert "secret" not in str(bug)


def test_a_subclass_has_the_code_of_its_family() -> None:
    """A narrower error that is added tomorrow is not INTERNAL."""

    class MoreLostError(errors.KvLostError):
        """Not in the table."""

    assert code_of(MoreLostError("gone")) is Code.ABORTED
    assert code_of(PacelineError("?")) is Code.INTERNAL
