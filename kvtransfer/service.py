"""KvTransferService on gRPC: messages in, KVSender, messages out."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from kvtransfer.sender import KVSender
from kvtransfer.wire import lease_state_to_proto, message_to_proto
from paceline.core.block_hash import BlockHash
from paceline.core.errors import PacelineError
from paceline.core.request import BootEpoch, LeaseId, RequestId, SequenceId
from paceline.runtime.grpc_status import abort_with
from paceline.runtime.wire_internal import fingerprint_from_proto
from paceline.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc


class KvTransferServicer(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """Serves one worker's leases to other workers."""

    def __init__(self, sender: KVSender) -> None:
        self._sender = sender

    async def Pull(
        self, request: kv_transfer_pb2.PullRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[kv_transfer_pb2.PullResponse]:
        """Streams the blocks of a lease."""
        messages = self._sender.pull(
            LeaseId(request.lease_id),
            BootEpoch(request.boot_epoch),
            fingerprint_from_proto(request.fingerprint),
            [BlockHash(block_hash) for block_hash in request.held_hashes],
        )
        try:
            async with aclosing(messages):
                async for message in messages:
                    yield message_to_proto(message)
        except PacelineError as error:
            await abort_with(context, error)

    async def RenewLeases(
        self,
        request: kv_transfer_pb2.RenewLeasesRequest,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> kv_transfer_pb2.RenewLeasesResponse:
        """Keeps leases alive."""
        lease_ids = [LeaseId(lease_id) for lease_id in request.lease_ids]
        states = self._sender.renew(lease_ids, BootEpoch(request.boot_epoch))
        return kv_transfer_pb2.RenewLeasesResponse(states=map(lease_state_to_proto, states))

    async def ReleaseLeases(
        self,
        request: kv_transfer_pb2.ReleaseLeasesRequest,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> kv_transfer_pb2.ReleaseLeasesResponse:
        """Ends leases."""
        for ref in request.attempts:
            sequence_id = SequenceId(RequestId(ref.request_id), ref.attempt)
            self._sender.release_sequence(sequence_id, BootEpoch(request.boot_epoch))
        lease_ids = [LeaseId(lease_id) for lease_id in request.lease_ids]
        states = self._sender.release(lease_ids, BootEpoch(request.boot_epoch))
        return kv_transfer_pb2.ReleaseLeasesResponse(states=map(lease_state_to_proto, states))
