"""The receiver's side of a loan: asks a worker for the blocks of a prefix and pulls those that it still has.

A loan is a hand-over without a prefill: lease, pull and checks are the same. It may give less than was asked for, or nothing.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import grpc

from kvtransfer.lending import PrefixRequest
from kvtransfer.receiver import KVReceiver
from paceline.core.block_hash import BlockHash
from paceline.core.errors import KvLostError, PacelineError
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.kv_layout import BlockId
from paceline.core.prefix import PrefixOwner
from paceline.core.ticket import KvTicket
from paceline.runtime.channels import Channels
from paceline.runtime.grpc_status import error_from_rpc
from paceline.runtime.wire_internal import fingerprint_to_proto, ticket_from_proto
from paceline.v1 import engine_pb2, kv_transfer_pb2
from paceline.v1.kv_transfer_pb2_grpc import KvTransferServiceStub

# By then every owner has answered that will. Nobody waits for it so long; but a lease that is granted late must be given back.
_CALL_TIMEOUT_S = 60.0


class PrefixBorrower:
    """Borrows for one worker. Whatever goes wrong is a PacelineError; the blocks that were not held hold rubbish then."""

    def __init__(
        self,
        channels: Channels,
        receiver: KVReceiver,
        fingerprint: ModelFingerprint,
        *,
        ask_timeout_s: float = 2.0,
    ) -> None:
        self._channels = channels
        self._receiver = receiver
        self._fingerprint = fingerprint_to_proto(fingerprint)
        self._ask_timeout_s = ask_timeout_s
        # The loop itself holds tasks only weakly.
        self._unwanted: set[asyncio.Task[None]] = set()

    async def borrow(
        self,
        owner: PrefixOwner,
        request: PrefixRequest,
        block_hashes: Sequence[BlockHash],
        block_ids: Sequence[BlockId],
        num_held: int,
    ) -> int:
        """Fills `block_ids` behind the first `num_held` as far as the owner can; says how many have their content then.

        When it has returned or raised, nothing writes to them any more. A loan is worth little, and so nobody is told of its
        failure before that.
        """
        ticket = await self._ask(owner, request)
        if ticket is None:
            return num_held
        try:
            async with self._receiver.hold(ticket) as loan:
                _require_asked(ticket, block_hashes)
                if ticket.num_blocks <= num_held:
                    return num_held
                await loan.receive(block_ids[: ticket.num_blocks], num_held)
        finally:
            await self._receiver.until_settled(block_ids)
        return ticket.num_blocks

    async def _ask(self, owner: PrefixOwner, request: PrefixRequest) -> KvTicket | None:
        """The owner's answer, if it comes in time."""
        try:
            async with asyncio.timeout(self._ask_timeout_s):
                return await self._answer(owner, request)
        except TimeoutError:
            raise KvLostError(f"{owner.worker_id} did not say in time what it has cached") from None

    async def _answer(self, owner: PrefixOwner, request: PrefixRequest) -> KvTicket | None:
        """Who is cancelled meanwhile leaves no lease behind: the call goes on, and what it brings is given back."""
        asking = asyncio.create_task(self._call(owner, request))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            giving_back = asyncio.create_task(self._give_back(asking))
            self._unwanted.add(giving_back)
            giving_back.add_done_callback(self._unwanted.discard)
            raise

    async def _call(self, owner: PrefixOwner, request: PrefixRequest) -> KvTicket | None:
        request_id, attempt = request.sequence_id
        context = engine_pb2.CallContext(
            request_id=request_id, attempt=attempt, cache_scope=request.cache_scope
        )
        message = kv_transfer_pb2.LeasePrefixRequest(
            boot_epoch=owner.boot_epoch,
            fingerprint=self._fingerprint,
            context=context,
            token_ids=request.token_ids,
        )
        stub = KvTransferServiceStub(self._channels.get(owner.address))
        try:
            response = await stub.LeasePrefix(message, timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, owner.worker_id) from error
        return ticket_from_proto(response.ticket) if response.HasField("ticket") else None

    async def _give_back(self, asking: "asyncio.Task[KvTicket | None]") -> None:
        await asyncio.wait({asking})
        ticket = None if asking.cancelled() or asking.exception() else asking.result()
        if ticket is None:
            return
        # Held and not received, it goes back.
        with suppress(PacelineError):
            async with self._receiver.hold(ticket):
                pass


def _require_asked(ticket: KvTicket, block_hashes: Sequence[BlockHash]) -> None:
    """The names of blocks say which tokens are in them, so whoever counts wrong is found out before anything is written."""
    if tuple(block_hashes[: ticket.num_blocks]) != ticket.block_hashes or ticket.num_blocks != len(
        ticket.block_hashes
    ):
        raise KvLostError(f"{ticket.owner_id} lends other blocks than it was asked for")
