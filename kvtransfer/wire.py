"""The hand-over's own values <-> messages; the words shared with other services are in paceline/runtime/wire.py."""

from kvtransfer.chunks import ChunkMessage, KvChunk, KvReference, LeaseState, PullEnd, ReferenceMessage
from kvtransfer.offer import MemoryOffer, NixlOffer
from paceline.core.errors import KvLostError
from paceline.core.kv_layout import BlockId
from paceline.runtime.pool_memory import SharedMemoryOffer
from paceline.runtime.wire_internal import first_token_from_proto, first_token_to_proto
from paceline.v1 import kv_transfer_pb2

_UNKNOWN_MESSAGE = "a message of the pull is of no known kind; run the same version on both workers"


def message_to_proto(message: ReferenceMessage) -> kv_transfer_pb2.PullResponse:
    """One message of a pull that has no bytes of blocks; those that do are in kvtransfer/pull_codec.py."""
    if isinstance(message, PullEnd):
        end = kv_transfer_pb2.PullEnd(first_tokens=map(first_token_to_proto, message.first_tokens))
        return kv_transfer_pb2.PullResponse(end=end)
    references = kv_transfer_pb2.KvReferences(blocks=map(_reference_to_proto, message))
    return kv_transfer_pb2.PullResponse(references=references)


def message_from_proto(response: kv_transfer_pb2.PullResponse) -> ChunkMessage:
    """One message of a pull of bytes; raises KvLostError for one that has neither chunks nor the end."""
    kind = response.WhichOneof("message")
    if kind == "chunk":
        return (_chunk_from_proto(response.chunk),)
    if kind == "chunks":
        return tuple(map(_chunk_from_proto, response.chunks.chunks))
    if kind == "end":
        return _end_from_proto(response.end)
    raise KvLostError(_UNKNOWN_MESSAGE)


def reference_message_from_proto(response: kv_transfer_pb2.PullResponse) -> ReferenceMessage:
    """One message of a pull by reference; raises KvLostError for one that is neither references nor the end."""
    kind = response.WhichOneof("message")
    if kind == "references":
        return tuple(
            KvReference(block.ordinal, BlockId(block.block_id), block.checksum)
            for block in response.references.blocks
        )
    if kind == "end":
        return _end_from_proto(response.end)
    raise KvLostError(_UNKNOWN_MESSAGE)


def _chunk_from_proto(chunk: kv_transfer_pb2.KvChunk) -> KvChunk:
    return KvChunk(chunk.ordinal, chunk.offset, chunk.data, chunk.checksum)


def _end_from_proto(end: kv_transfer_pb2.PullEnd) -> PullEnd:
    return PullEnd(tuple(map(first_token_from_proto, end.first_tokens)))


def _reference_to_proto(block: KvReference) -> kv_transfer_pb2.KvReference:
    return kv_transfer_pb2.KvReference(
        ordinal=block.ordinal, block_id=block.block_id, checksum=block.checksum
    )


def offer_to_proto(offer: MemoryOffer) -> kv_transfer_pb2.DescribeMemoryResponse:
    """What an owner offers."""
    response = kv_transfer_pb2.DescribeMemoryResponse(
        num_blocks=offer.num_blocks, block_bytes=offer.block_bytes
    )
    if (shared := offer.shared_memory) is not None:
        message = kv_transfer_pb2.SharedMemoryOffer(
            pid=shared.pid, fd=shared.fd, num_bytes=shared.num_bytes, nonce=shared.nonce
        )
        response.shared_memory.CopyFrom(message)
    if (nixl := offer.nixl) is not None:
        response.nixl.agent, response.nixl.metadata = nixl.agent, nixl.metadata
        response.nixl.address = nixl.address
    return response


def offer_from_proto(response: kv_transfer_pb2.DescribeMemoryResponse) -> MemoryOffer:
    """What an owner offers."""
    shared, nixl = response.shared_memory, response.nixl
    return MemoryOffer(
        num_blocks=response.num_blocks,
        block_bytes=response.block_bytes,
        shared_memory=SharedMemoryOffer(shared.pid, shared.fd, shared.num_bytes, shared.nonce)
        if response.HasField("shared_memory")
        else None,
        nixl=NixlOffer(nixl.agent, nixl.metadata, nixl.address) if response.HasField("nixl") else None,
    )


def lease_state_to_proto(state: LeaseState) -> kv_transfer_pb2.LeaseState:
    """What the owner says of a lease."""
    if state is LeaseState.VALID:
        return kv_transfer_pb2.LEASE_STATE_VALID
    return kv_transfer_pb2.LEASE_STATE_EXPIRED


def lease_state_from_proto(state: kv_transfer_pb2.LeaseState) -> LeaseState:
    """What the owner says of a lease; anything but a clear yes is a no."""
    return LeaseState.VALID if state == kv_transfer_pb2.LEASE_STATE_VALID else LeaseState.EXPIRED
