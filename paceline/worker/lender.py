"""Lends what is in the prefix cache to other workers, under leases like those of a prefill."""

import itertools
from collections.abc import Sequence

from kvtransfer.leases import Lease
from kvtransfer.lending import PrefixRequest
from paceline.core.errors import InvariantError, KvLostError
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.request import BootEpoch, RequestId, SamplingParams, SequenceId, SequenceSpec
from paceline.core.ticket import KvTicket
from paceline.engine.events import BlocksReady, Event, Failed, Started
from paceline.engine.sequence import SequenceRole
from paceline.worker.events import EventQueue
from paceline.worker.worker import Worker


class Lender:
    """One worker's. A loan costs it nothing but that the blocks stay: it ends by release or by the lease's clock."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._numbers = itertools.count()

    async def lend(
        self, request: PrefixRequest, boot_epoch: BootEpoch, fingerprint: ModelFingerprint
    ) -> KvTicket | None:
        """See PrefixLender.lend; raises KvLostError, FingerprintMismatchError or InvariantError."""
        self._check(request, boot_epoch, fingerprint)
        spec = self._spec(request)
        events = EventQueue()
        granted: tuple[Lease, KvTicket] | None = None
        is_over = False

        def sink(said: Sequence[Event]) -> None:
            """Also hears later, when nobody waits for it any more, that the engine needs the room: then the lease ends."""
            nonlocal is_over
            events.put(said)
            if any(isinstance(event, Failed) for event in said):
                is_over = True
                self._worker.leases.release_sequence(spec.sequence_id)

        self._worker.engine.submit(spec, SequenceRole.LEND, sink)
        try:
            async for event in events:
                match event:
                    case Started():
                        if is_over:
                            return None
                        granted = self._worker.grant(event)
                    case BlocksReady() if granted is not None:
                        lease, ticket = granted
                        self._worker.leases.progress(lease.lease_id, event.blocks)
                        self._worker.leases.complete(lease.lease_id, ())
                        return ticket
                    case Failed(error=KvLostError()):
                        return None
                    case Failed():
                        raise event.error
            raise AssertionError("a loan ends with its blocks or with a failure")
        finally:
            self._close(spec.sequence_id, granted)

    def _check(self, request: PrefixRequest, boot_epoch: BootEpoch, fingerprint: ModelFingerprint) -> None:
        worker = self._worker
        if boot_epoch != worker.key.boot_epoch:
            raise KvLostError(f"{worker.key.worker_id} has restarted since, and its cache is empty")
        worker.loaded.fingerprint.require_same(fingerprint)
        num_tokens = len(request.token_ids)
        limit = worker.loaded.capacity.max_model_tokens
        if num_tokens > limit:
            raise InvariantError(f"{num_tokens} tokens are more than this worker's {limit}")
        if not num_tokens or num_tokens % worker.loaded.layout.block_size:
            raise InvariantError(f"{num_tokens} tokens do not fill blocks")

    def _spec(self, request: PrefixRequest) -> SequenceSpec:
        """As a sequence of its own: several candidates of one attempt may borrow at once."""
        request_id, attempt = request.sequence_id
        return SequenceSpec(
            SequenceId(RequestId(f"{request_id}/loan-{next(self._numbers)}"), attempt),
            prompt_ids=request.token_ids,
            sampling=SamplingParams(),
            max_tokens=1,
            cache_scope=request.cache_scope,
        )

    def _close(self, sequence_id: SequenceId, granted: tuple[Lease, KvTicket] | None) -> None:
        """Whatever happened: gives back what no complete lease holds."""
        if granted is None:
            self._worker.engine.release(sequence_id)
        else:
            self._worker.leases.drop(granted[0].lease_id)
