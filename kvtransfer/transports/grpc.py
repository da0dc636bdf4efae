"""A hand-over over gRPC: works between any two workers that reach each other."""

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

import grpc

from kvtransfer.chunks import KvMessage, LeaseState
from kvtransfer.wire import lease_state_from_proto, message_from_proto
from paceline.core.block_hash import BlockHash
from paceline.core.errors import FingerprintMismatchError, KvError, KvLostError
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.ticket import KvTicket
from paceline.runtime.channels import Channels
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
        self, ticket: KvTicket, held_hashes: Sequence[BlockHash]
    ) -> AsyncGenerator[KvMessage, None]:
        """The blocks after the held ones, then the end."""
        request = kv_transfer_pb2.PullRequest(
            lease_id=ticket.lease_id,
            boot_epoch=ticket.boot_epoch,
            fingerprint=self._fingerprint,
            held_hashes=held_hashes,
        )
        call = self._stub(ticket).Pull(request, timeout=self._pull_timeout_s)
        try:
            async for response in call:
                yield message_from_proto(response)
        except grpc.aio.AioRpcError as error:
            raise _kv_error(error, ticket) from error
        finally:
            call.cancel()

    async def renew(self, ticket: KvTicket) -> LeaseState:
        """Keeps the lease alive."""
        request = kv_transfer_pb2.RenewLeasesRequest(
            lease_ids=[ticket.lease_id], boot_epoch=ticket.boot_epoch
        )
        try:
            response = await self._stub(ticket).RenewLeases(request, timeout=self._call_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _kv_error(error, ticket) from error
        return _only_state(response.states)

    async def release(self, ticket: KvTicket) -> LeaseState:
        """Ends the lease."""
        request = kv_transfer_pb2.ReleaseLeasesRequest(
            lease_ids=[ticket.lease_id], boot_epoch=ticket.boot_epoch
        )
        try:
            response = await self._stub(ticket).ReleaseLeases(request, timeout=self._call_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _kv_error(error, ticket) from error
        return _only_state(response.states)

    def _stub(self, ticket: KvTicket) -> "KvTransferServiceAsyncStub":
        return KvTransferServiceStub(self._channels.get(ticket.owner_address))


def _only_state(states: Sequence[kv_transfer_pb2.LeaseState]) -> LeaseState:
    if len(states) != 1:
        raise KvLostError(f"asked for one lease, the owner answered for {len(states)}")
    return lease_state_from_proto(states[0])


def _kv_error(error: grpc.aio.AioRpcError, ticket: KvTicket) -> KvError | FingerprintMismatchError:
    """To the receiver a peer that is lost, late or confused is all one: the blocks will not come from there."""
    ours = error_from_rpc(error, ticket.owner_id)
    if isinstance(ours, KvError | FingerprintMismatchError):
        return ours
    return KvLostError(f"the hand-over from {ticket.owner_id} broke off: {ours}")
