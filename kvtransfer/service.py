"""KvTransferService on gRPC: messages in, KVSender, messages out."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from kvtransfer.chunks import ChunkMessage, ReferenceMessage
from kvtransfer.lending import PrefixLender, PrefixRequest
from kvtransfer.pull_codec import PULL_METHOD, encode
from kvtransfer.sender import KVSender
from kvtransfer.wire import lease_state_to_proto, offer_to_proto
from paceline.core.block_hash import BlockHash
from paceline.core.errors import PacelineError
from paceline.core.request import BootEpoch, LeaseId, RequestId, SequenceId
from paceline.runtime.grpc_status import abort_with
from paceline.runtime.wire_internal import fingerprint_from_proto, ticket_to_proto
from paceline.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc


def add_kv_transfer_service(servicer: "KvTransferServicer", server: grpc.aio.Server) -> None:
    """Puts the service on a server, with our own bytes for the messages of Pull: the handler that comes last is taken."""
    kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(servicer, server)
    pull: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
        servicer.Pull, request_deserializer=kv_transfer_pb2.PullRequest.FromString
    )
    service, _, method = PULL_METHOD[1:].partition("/")
    server.add_registered_method_handlers(service, {method: pull})


class KvTransferServicer(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """Serves one worker's leases, and loans from its prefix cache, to other workers. Without a lender it has nothing to lend."""

    def __init__(self, sender: KVSender, lender: PrefixLender | None = None) -> None:
        self._sender = sender
        self._lender = lender

    async def Pull(  # type: ignore[override] # its messages are bytes already, see add_kv_transfer_service
        self, request: kv_transfer_pb2.PullRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[bytes]:
        """Streams the blocks of a lease, or where they lie."""
        pull = self._sender.pull_references if request.by_reference else self._sender.pull
        messages: AsyncGenerator[ChunkMessage | ReferenceMessage, None] = pull(
            LeaseId(request.lease_id),
            BootEpoch(request.boot_epoch),
            fingerprint_from_proto(request.fingerprint),
            [BlockHash(block_hash) for block_hash in request.held_hashes],
        )
        try:
            async with aclosing(messages):
                async for message in messages:
                    yield encode(message)
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

    async def DescribeMemory(
        self,
        request: kv_transfer_pb2.DescribeMemoryRequest,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> kv_transfer_pb2.DescribeMemoryResponse:
        """Says how the blocks may be read."""
        try:
            offer = self._sender.describe(BootEpoch(request.boot_epoch))
        except PacelineError as error:
            await abort_with(context, error)
        return offer_to_proto(offer)

    async def LeasePrefix(
        self,
        request: kv_transfer_pb2.LeasePrefixRequest,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> kv_transfer_pb2.LeasePrefixResponse:
        """Grants a lease on what is cached."""
        if self._lender is None:
            return kv_transfer_pb2.LeasePrefixResponse()
        call = request.context
        wanted = PrefixRequest(
            SequenceId(RequestId(call.request_id), call.attempt), call.cache_scope, tuple(request.token_ids)
        )
        try:
            ticket = await self._lender.lend(
                wanted, BootEpoch(request.boot_epoch), fingerprint_from_proto(request.fingerprint)
            )
        except PacelineError as error:
            await abort_with(context, error)
        return kv_transfer_pb2.LeasePrefixResponse(ticket=ticket_to_proto(ticket) if ticket else None)
