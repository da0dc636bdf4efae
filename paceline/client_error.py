"""A failed call, with what the server said about it: the reason and facts of google.rpc.ErrorInfo, and RetryInfo.

The few fields that matter are read from the wire here, so that a client needs nothing but grpcio and protobuf.
"""

from contextlib import suppress

import grpc
from google.protobuf import any_pb2, duration_pb2, empty_pb2
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

_DETAILS_KEY = "grpc-status-details-bin"
_ERROR_INFO = "type.googleapis.com/google.rpc.ErrorInfo"
_RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"
_LENGTH_DELIMITED = 2  # wire type


class PacelineRpcError(Exception):
    """A call that failed.

    `reason` is one word of the server's ("PROMPT_TOO_LONG"), or "" where no Paceline server answered; `facts` are its
    details ({"limit": "4096"}); `retry_after_s` says when a retry may help, None where the server does not say.
    """

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = ""
        self.facts: dict[str, str] = {}
        self.retry_after_s: float | None = None

    def __str__(self) -> str:
        return f"{self.message} ({self.reason or self.code.name})"


def from_rpc_error(error: grpc.aio.AioRpcError) -> PacelineRpcError:
    """What grpc raised, in our words. Details that cannot be read are left out."""
    ours = PacelineRpcError(error.code(), error.details() or error.code().name)
    with suppress(DecodeError, UnicodeDecodeError):
        for detail in _details(error):
            _add_detail(ours, detail)
    return ours


def _add_detail(error: PacelineRpcError, detail: any_pb2.Any) -> None:
    if detail.type_url == _ERROR_INFO:
        error.reason, error.facts = _error_info(detail.value)
    if detail.type_url == _RETRY_INFO:
        error.retry_after_s = _retry_after_s(detail.value)


def _details(error: grpc.aio.AioRpcError) -> list[any_pb2.Any]:
    """The details of google.rpc.Status, which is its field 3."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            return [any_pb2.Any.FromString(detail) for detail in _values(value, 3)]
    return []


def _error_info(data: bytes) -> tuple[str, dict[str, str]]:
    """ErrorInfo: reason is field 1, and field 3 holds the entries of metadata, each a key (1) and a value (2)."""
    facts = {_text(entry, 1): _text(entry, 2) for entry in _values(data, 3)}
    return _text(data, 1), facts


def _retry_after_s(data: bytes) -> float:
    """RetryInfo: its one field is the delay."""
    delay = duration_pb2.Duration.FromString(b"".join(_values(data, 1)))
    return delay.ToTimedelta().total_seconds()


def _text(data: bytes, number: int) -> str:
    return b"".join(_values(data, number)).decode()


def _values(data: bytes, number: int) -> list[bytes]:
    """The values of the strings, bytes or messages in field `number` of an encoded message of any type."""
    fields = UnknownFieldSet(empty_pb2.Empty.FromString(data))
    wanted = (number, _LENGTH_DELIMITED)
    each = (fields[position] for position in range(len(fields)))
    return [field.data for field in each if (field.field_number, field.wire_type) == wanted]
