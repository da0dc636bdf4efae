"""Calls of prefill workers: what each says, until it has ended, is given up, or nobody sees its worker any more."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from paceline.core.errors import PacelineError, PeerLostError
from paceline.core.prefix import PrefixHint
from paceline.core.request import SequenceSpec
from paceline.runtime.channels import Channels, responses_of
from paceline.runtime.grpc_status import error_from_rpc
from paceline.runtime.wire_internal import prefix_hint_to_proto, spec_to_proto
from paceline.v1 import prefill_pb2
from paceline.v1.prefill_pb2_grpc import PrefillServiceStub
from router.decode_link import LEAVING
from router.views import WorkerView
from router.workers import WorkerRegistry


class Prefills:
    """One router's."""

    def __init__(self, channels: Channels, registry: WorkerRegistry) -> None:
        self._channels = channels
        self._registry = registry

    @asynccontextmanager
    async def asked(
        self, spec: SequenceSpec, worker: WorkerView, hint: PrefixHint | None
    ) -> AsyncIterator[AsyncIterator[prefill_pb2.PrefillResponse]]:
        """Asks for one prompt; its responses. Leaving the block gives it up. Raises PacelineError, also out of the block.

        A process that hangs answers the pings of its connection, so that the call by itself would wait for ever.
        """
        name, is_lost = worker.key.worker_id, False
        call = PrefillServiceStub(self._channels.get(worker.address)).Prefill(
            _request(spec, hint), timeout=spec.time_budget_s
        )

        def lose() -> None:
            nonlocal is_lost
            is_lost = True
            call.cancel()

        try:
            with self._registry.until_lost(worker.key, lose):
                async with responses_of(call) as responses:
                    yield responses
        except grpc.aio.AioRpcError as rpc_error:
            error = error_from_rpc(rpc_error, name)
            await self._note_failure(worker, error)
            raise error from rpc_error
        except asyncio.CancelledError:
            if not is_lost or _is_cancelled():
                raise
            raise PeerLostError(f"{name} is lost: it reports nothing any more") from None
        finally:
            call.cancel()

    async def _note_failure(self, worker: WorkerView, error: PacelineError) -> None:
        """What a failed prefill says about its worker, so that the next attempt is not placed there again."""
        if isinstance(error, LEAVING):
            self._registry.note_leaving(worker.key)
        elif isinstance(error, PeerLostError):
            await self._registry.until_gone(worker.key)


def _request(spec: SequenceSpec, hint: PrefixHint | None) -> prefill_pb2.PrefillRequest:
    context, sequence = spec_to_proto(spec)
    return prefill_pb2.PrefillRequest(
        context=context, sequence=sequence, prefix_hint=prefix_hint_to_proto(hint)
    )


def _is_cancelled() -> bool:
    """Whether whoever reads is to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
