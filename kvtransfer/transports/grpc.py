"""A hand-over over gRPC: works between any two workers that reach each other."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

import grpc

from kvtransfer.chunks import KvMessage, LeaseState, PullEnd, ReferenceMessage
from kvtransfer.offer import MemoryOffer
from kvtransfer.pull_codec import PULL_METHOD, decode, decode_references
from kvtransfer.wire import lease_state_from_proto, offer_from_proto
from paceline.core.block_hash import BlockHash
from paceline.core.errors import FingerprintMismatchError, KvError, KvLostError
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.kv_layout import BlockId
from paceline.core.ticket import KvTicket
from paceline.runtime.channels import Channels, responses_of
from paceline.runtime.grpc_status import error_from_rpc
from paceline.runtime.wire_internal import fingerprint_to_proto
from paceline.v1 import kv_transfer_pb2
from paceline.v1.kv_transfer_pb2_grpc import KvTransferServiceStub

if TYPE_CHECKING:
    # The generated stubs have this name for the type checker only.
    from paceline.v1.kv_transfer_pb2_grpc import KvTransferServiceAsyncStub


class GrpcTransport:
    """Calls the owner at the ticket's address. A pull may last as long as the prefill that it follows."""

    def __init__(
        self,
        channels: Channels,
        fingerprint: ModelFingerprint,
        *,
        pull_timeout_s: float = 600.0,
        call_timeout_s: float = 2.0,
    ) -> None:
        self._channels = channels
        self._fingerprint = fingerprint_to_proto(fingerprint)
        self._pull_timeout_s = pull_timeout_s
        self._call_timeout_s = call_timeout_s

    async def pull(
        self,
        ticket: KvTicket,
        held_hashes: Sequence[BlockHash],
        into: Sequence[BlockId],  # noqa: ARG002 - see KVTransport
    ) -> AsyncGenerator[KvMessage, None]:
        """The blocks after the held ones, then the end."""
        async with aclosing(self._responses(ticket, held_hashes, by_reference=False)) as responses:
            async for response in responses:
                message = decode(response)
                if isinstance(message, PullEnd):
                    yield message
                    continue
                for piece in message:
                    yield piece

    async def pull_references(
        self, ticket: KvTicket, held_hashes: Sequence[BlockHash]
    ) -> AsyncGenerator[ReferenceMessage, None]:
        """Where the blocks after the held ones lie, then the end; for transports that read the owner's pool themselves."""
        async with aclosing(self._responses(ticket, held_hashes, by_reference=True)) as responses:
            async for response in responses:
                yield decode_references(response)

    async def describe(self, ticket: KvTicket) -> MemoryOffer:
        """Which ways into its pool the ticket's owner offers, in this life of its."""
        request = kv_transfer_pb2.DescribeMemoryRequest(boot_epoch=ticket.boot_epoch)
        await self._reached(ticket)
        try:
            response = await self._stub(ticket).DescribeMemory(request, timeout=self._call_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _kv_error(error, ticket) from error
        return offer_from_proto(response)

    def settling(self, into: Sequence[BlockId]) -> None:
        """Nothing but the receiver writes."""

    async def _responses(
        self, ticket: KvTicket, held_hashes: Sequence[BlockHash], *, by_reference: bool
    ) -> AsyncGenerator[bytes, None]:
        request = kv_transfer_pb2.PullRequest(
            lease_id=ticket.lease_id,
            boot_epoch=ticket.boot_epoch,
            fingerprint=self._fingerprint,
            held_hashes=held_hashes,
            by_reference=by_reference,
        )
        # Not by the stub, whose messages are copied into protobuf's memory.
        channel = await self._reached(ticket)
        pull: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(PULL_METHOD)
        call = pull(request.SerializeToString(), timeout=self._pull_timeout_s)
        try:
            async with responses_of(call) as responses:
                async for response in responses:
                    yield response
        except grpc.aio.AioRpcError as error:
            raise _kv_error(error, ticket) from error
        finally:
            call.cancel()

    async def _reached(self, ticket: KvTicket) -> grpc.aio.Channel:
        """A ticket is fresh word of its owner: one that could not be reached a moment ago may be back, and is waited for."""
        channel = self._channels.get(ticket.owner_address)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._call_timeout_s):
                await channel.channel_ready()
        return channel

    async def renew(self, tickets: Sequence[KvTicket]) -> list[LeaseState]:
        """Keeps the leases alive."""
        first = tickets[0]
        request = kv_transfer_pb2.RenewLeasesRequest(
            lease_ids=[ticket.lease_id for ticket in tickets], boot_epoch=first.boot_epoch
        )
        try:
            response = await self._stub(first).RenewLeases(request, timeout=self._call_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _kv_error(error, first) from error
        return _states(response.states, num_leases=len(tickets))

    async def release(self, ticket: KvTicket) -> LeaseState:
        """Ends the lease."""
        request = kv_transfer_pb2.ReleaseLeasesRequest(
            lease_ids=[ticket.lease_id], boot_epoch=ticket.boot_epoch
        )
        try:
            response = await self._stub(ticket).ReleaseLeases(request, timeout=self._call_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _kv_error(error, ticket) from error
        (state,) = _states(response.states, num_leases=1)
        return state

    def _stub(self, ticket: KvTicket) -> "KvTransferServiceAsyncStub":
        return KvTransferServiceStub(self._channels.get(ticket.owner_address))


def _states(states: Sequence[kv_transfer_pb2.LeaseState], num_leases: int) -> list[LeaseState]:
    if len(states) != num_leases:
        raise KvLostError(f"asked for {num_leases} leases, the owner answered for {len(states)}")
    return [lease_state_from_proto(state) for state in states]


def _kv_error(error: grpc.aio.AioRpcError, ticket: KvTicket) -> KvError | FingerprintMismatchError:
    """To the receiver a peer that is lost, late or confused is all one: the blocks will not come from there."""
    ours = error_from_rpc(error, ticket.owner_id)
    if isinstance(ours, KvError | FingerprintMismatchError):
        return ours
    return KvLostError(f"the hand-over from {ticket.owner_id} broke off: {ours}")
