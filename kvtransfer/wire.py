"""The hand-over's own values <-> messages; the words shared with other services are in paceline/runtime/wire.py."""

from kvtransfer.chunks import KvChunk, KvMessage, LeaseState, PullEnd
from paceline.core.errors import KvLostError
from paceline.runtime.wire_internal import first_token_from_proto, first_token_to_proto
from paceline.v1 import kv_transfer_pb2


def message_to_proto(message: KvMessage) -> kv_transfer_pb2.PullResponse:
    """One message of a pull."""
    if isinstance(message, PullEnd):
        end = kv_transfer_pb2.PullEnd(first_tokens=map(first_token_to_proto, message.first_tokens))
        return kv_transfer_pb2.PullResponse(end=end)
    chunk = kv_transfer_pb2.KvChunk(
        ordinal=message.ordinal, offset=message.offset, data=message.data, checksum=message.checksum
    )
    return kv_transfer_pb2.PullResponse(chunk=chunk)


def message_from_proto(response: kv_transfer_pb2.PullResponse) -> KvMessage:
    """One message of a pull; raises KvLostError for one that is neither a chunk nor the end."""
    kind = response.WhichOneof("message")
    if kind == "chunk":
        chunk = response.chunk
        return KvChunk(chunk.ordinal, chunk.offset, chunk.data, chunk.checksum)
    if kind == "end":
        return PullEnd(tuple(map(first_token_from_proto, response.end.first_tokens)))
    raise KvLostError("a message of the pull is of no known kind; run the same version on both workers")


def lease_state_to_proto(state: LeaseState) -> kv_transfer_pb2.LeaseState:
    """What the owner says of a lease."""
    if state is LeaseState.VALID:
        return kv_transfer_pb2.LEASE_STATE_VALID
    return kv_transfer_pb2.LEASE_STATE_EXPIRED


def lease_state_from_proto(state: kv_transfer_pb2.LeaseState) -> LeaseState:
    """What the owner says of a lease; anything but a clear yes is a no."""
    return LeaseState.VALID if state == kv_transfer_pb2.LEASE_STATE_VALID else LeaseState.EXPIRED
