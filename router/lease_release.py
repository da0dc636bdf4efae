"""Ends leases that no decode worker has confirmed, in the background, since nobody waits for it."""

import asyncio
from contextlib import suppress

import grpc

from paceline.core.request import BootEpoch, SequenceId
from paceline.runtime.channels import Channels
from paceline.v1 import kv_transfer_pb2
from paceline.v1.kv_transfer_pb2_grpc import KvTransferServiceStub

_TIMEOUT_S = 2.0


class LeaseRelease:
    """Owned by the router's event loop."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        # The loop itself holds tasks only weakly.
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, address: str, boot_epoch: BootEpoch, sequence_id: SequenceId) -> None:
        """Names the attempt, since whoever leaves early has not heard the lease's name."""
        task = asyncio.create_task(self._release(address, boot_epoch, sequence_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, address: str, boot_epoch: BootEpoch, sequence_id: SequenceId) -> None:
        attempt = kv_transfer_pb2.AttemptRef(request_id=sequence_id.request_id, attempt=sequence_id.attempt)
        request = kv_transfer_pb2.ReleaseLeasesRequest(boot_epoch=boot_epoch, attempts=[attempt])
        stub = KvTransferServiceStub(self._channels.get(address))
        # If this fails, the lease's own clock ends it.
        with suppress(grpc.aio.AioRpcError):
            await stub.ReleaseLeases(request, timeout=_TIMEOUT_S)
