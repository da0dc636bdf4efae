"""One worker's parts, wired together: engine, leases, receiver, prefix publisher. Both tiers run the same ones."""

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvtransfer.borrower import PrefixBorrower
from kvtransfer.keep_alive import KeepAlive
from kvtransfer.leases import Lease, LeaseTable, sweep_forever
from kvtransfer.receiver import HandOverTimes, KVReceiver
from kvtransfer.sender import KVSender
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.negotiated import NegotiatedTransport
from paceline.core.errors import DrainingError, InvariantError, KvLostError
from paceline.core.prefix import WorkerKey
from paceline.core.request import BootEpoch, SequenceId, SequenceSpec, WorkerId
from paceline.core.ticket import KvTicket
from paceline.engine.async_engine import AsyncEngine
from paceline.engine.block_pool import BlockPool
from paceline.engine.engine import Engine
from paceline.engine.events import Started
from paceline.engine.scheduler import Scheduler
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.prefix_index.index import PrefixIndex
from paceline.prefix_index.memory_index import MemoryPrefixIndex
from paceline.prefix_index.publisher import PrefixPublisher
from paceline.prefix_index.redis_index import RedisPrefixIndex
from paceline.runtime.channels import Channels
from paceline.worker.config import WorkerConfig
from paceline.worker.failures import SequenceFailures
from paceline.worker.metrics import StepMetrics
from paceline.worker.runner import LoadedRunner
from paceline.worker.scheduling import scheduler_config
from paceline.worker.transport import WorkerTransport
from paceline.worker.watchdog import Watchdog

_DRAIN_LOOK_S = 0.05
# What is borrowed is computed already, and could be computed here instead: whoever is silent for a second is given up.
_LOAN_TIMES = HandOverTimes(stall_timeout_s=1.0, max_stalls=1)


@dataclass(slots=True)
class Worker:
    """What a service's handlers work with; owned by the event loop."""

    key: WorkerKey
    address: str
    model_id: str
    loaded: LoadedRunner
    scheduling: SchedulerConfig
    engine: AsyncEngine
    leases: LeaseTable
    sender: KVSender
    transport: NegotiatedTransport
    receiver: KVReceiver
    borrower: PrefixBorrower
    index: PrefixIndex
    publisher: PrefixPublisher
    metrics: StepMetrics
    failures: SequenceFailures
    failed: asyncio.Event
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    num_blocks_pulled: int = 0
    # Sequences that hold pinned prefixes for as long as the worker lives, and the blocks that those take.
    num_pinned: int = 0
    num_pinned_blocks: int = 0

    def require_room_for(self, spec: SequenceSpec) -> None:
        """Raises DrainingError when nothing new is taken, InvariantError for what a router must not send."""
        if self.draining.is_set():
            raise DrainingError(f"{self.key.worker_id} is draining")
        num_tokens = len(spec.prompt_ids) + spec.max_tokens
        limit = self.loaded.capacity.max_model_tokens
        if num_tokens > limit:
            raise InvariantError(f"{num_tokens} tokens are more than this worker's {limit}")
        biased_ids = (token_id for token_id, _ in spec.sampling.logit_bias)
        if max((*spec.known_ids, *biased_ids, *spec.stop_token_ids)) >= self.loaded.vocab_size:
            raise InvariantError("a token id is outside of the model's vocabulary")

    def grant(self, started: Started) -> tuple[Lease, KvTicket]:
        """A lease on the blocks of a sequence that others read, and the right to it."""
        lease = self.leases.grant(started.sequence_id, started.num_blocks, started.block_hashes)
        ticket = KvTicket(
            lease_id=lease.lease_id,
            owner_id=self.key.worker_id,
            owner_address=self.address,
            boot_epoch=self.key.boot_epoch,
            fingerprint=self.loaded.fingerprint,
            block_hashes=started.block_hashes,
            num_blocks=started.num_blocks,
        )
        return lease, ticket

    @property
    def is_idle(self) -> bool:
        """Whether nobody's sequence is left and nobody may pull blocks any more."""
        return self.engine.num_sequences == self.num_pinned and self.leases.stats().num_active == 0

    async def drain(self, grace_s: float) -> None:
        """Takes nothing new, and returns once all is done, or after `grace_s` seconds."""
        self.draining.set()
        try:
            async with asyncio.timeout(grace_s):
                while not self.is_idle:  # noqa: ASYNC110 - engine and leases have no event in common
                    await asyncio.sleep(_DRAIN_LOOK_S)
        except TimeoutError:
            return


@asynccontextmanager
async def open_worker(
    config: WorkerConfig, loaded: LoadedRunner, channels: Channels | None = None
) -> AsyncIterator[Worker]:
    """The parts of one worker, running; stopped in the opposite order. Both tiers answer each Recall.

    `channels` are to other workers, and are closed in the end.
    """
    channels = channels or Channels()
    # Every container has a process with number 1: without the host, all of them would be one point on the ring.
    worker_id = config.worker_id or f"worker-{socket.gethostname()}-{os.getpid()}"
    key = WorkerKey(WorkerId(worker_id), BootEpoch(secrets.randbits(64)))
    index: PrefixIndex = RedisPrefixIndex(config.redis) if config.redis else MemoryPrefixIndex()
    publisher = PrefixPublisher(index, key)
    failed, metrics = asyncio.Event(), StepMetrics(config)
    scheduling = scheduler_config(config, loaded)
    engine = AsyncEngine(
        _engine(config, loaded, scheduling),
        on_changes=publisher.offer,
        on_step=metrics.note_step,
        on_failure=lambda _: failed.set(),
    )
    leases = LeaseTable(_release_leased(engine), ttl_s=config.lease_ttl_s)
    memory, fingerprint = loaded.runner.memory, loaded.fingerprint
    transport = WorkerTransport(
        config.kv_transport,
        GrpcTransport(channels, fingerprint),
        memory,
        loaded.capacity.num_blocks,
        agent=f"{key.worker_id}-{key.boot_epoch:016x}",
        is_read=lambda: leases.stats().num_active > 0,
        must_encrypt=bool(config.cluster_tls_cert),
    )
    keep_alive = KeepAlive(transport.receiving)
    loans = KVReceiver(transport.receiving, memory, fingerprint, _LOAN_TIMES, keep_alive=keep_alive)
    background = [
        asyncio.create_task(sweep_forever(leases)),
        asyncio.create_task(publisher.refresh_forever()),
        asyncio.create_task(Watchdog(engine, config.stall_s).watch(failed)),
    ]
    engine.start()
    try:
        yield Worker(
            key=key,
            address=config.advertise or config.listen,
            model_id=Path(config.model).name,
            loaded=loaded,
            scheduling=scheduling,
            engine=engine,
            leases=leases,
            sender=KVSender(
                leases,
                memory,
                fingerprint,
                key.boot_epoch,
                offer=transport.offer,
                on_read=transport.on_read,
            ),
            transport=transport.receiving,
            receiver=KVReceiver(
                transport.receiving, memory, fingerprint, layout=loaded.layout, keep_alive=keep_alive
            ),
            borrower=PrefixBorrower(channels, loans, fingerprint),
            index=index,
            publisher=publisher,
            metrics=metrics,
            failures=SequenceFailures(metrics.registry),
            failed=failed,
        )
    finally:
        for task in background:
            task.cancel()
        await engine.stop()
        await publisher.aclose()
        await index.aclose()
        await transport.receiving.aclose()
        await channels.aclose()


def _release_leased(engine: AsyncEngine) -> Callable[[SequenceId], None]:
    """What ends with a lease: its sequence, which may still be computing if its reader gave up early."""
    lost = KvLostError("the lease ended before the prompt was computed")
    return lambda sequence_id: engine.release(sequence_id, lost)


def _engine(config: WorkerConfig, loaded: LoadedRunner, scheduling: SchedulerConfig) -> Engine:
    pool = BlockPool(loaded.capacity.num_blocks, config.block_size, loaded.layout.groups)
    return Engine(Scheduler(scheduling, pool, loaded.runner.memory), loaded.runner)
