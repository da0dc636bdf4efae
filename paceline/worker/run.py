"""A worker process from its settings to its end: load, serve, drain."""

import asyncio
from collections.abc import Callable
from functools import partial

import grpc

from kvtransfer.service import KvTransferServicer, add_kv_transfer_service
from paceline.core.errors import InvariantError
from paceline.prefix_index.registration import Tier
from paceline.runtime import metrics
from paceline.runtime.channels import Channels
from paceline.runtime.log import configure_logging, get_logger
from paceline.runtime.membership import Membership
from paceline.runtime.memory import keep_for_good, keep_freed_memory
from paceline.runtime.metrics import Sample, StatsCollector
from paceline.runtime.metrics_server import on_loop, serving_metrics
from paceline.runtime.reload import reload_certificates, reloading
from paceline.runtime.server import GrpcServer, run_service
from paceline.v1 import inference_pb2, kv_transfer_pb2, worker_pb2
from paceline.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from paceline.worker.config import WorkerConfig
from paceline.worker.followers import OwnedFollowers, owned_followers
from paceline.worker.lender import Lender
from paceline.worker.metrics import worker_samples
from paceline.worker.pinned import pin_unless_stopped, plan_pinned, read_pinned
from paceline.worker.registrar import registered
from paceline.worker.runner import LoadedRunner, load_runner
from paceline.worker.service import WorkerServicer
from paceline.worker.worker import Worker, open_worker

# Adds the tier's own service to the server and returns the service's full name.
AddService = Callable[[grpc.aio.Server, Worker], str]

_SHARED_SERVICES = (
    kv_transfer_pb2.DESCRIPTOR.services_by_name["KvTransferService"].full_name,
    worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name,
)
_TIERS: dict[inference_pb2.WorkerRole, Tier] = {
    inference_pb2.WORKER_ROLE_PREFILL: "prefill",
    inference_pb2.WORKER_ROLE_DECODE: "decode",
}

log = get_logger()


def run_worker(config: WorkerConfig, role: inference_pb2.WorkerRole, add_service: AddService) -> int:
    """Runs a worker until SIGTERM or SIGINT; gives the exit status."""
    configure_logging(_TIERS[role], config.worker_id, config.log_level)
    keep_freed_memory()
    return run_service(lambda stop: _serve(config, role, add_service, stop))


async def _serve(
    config: WorkerConfig, role: inference_pb2.WorkerRole, add_service: AddService, stop: asyncio.Event
) -> None:
    async with owned_followers(config) as owned:
        await _serve_with(owned, config, role, add_service, stop)


async def _load(config: WorkerConfig, owned: OwnedFollowers | None) -> LoadedRunner:
    if owned is None:
        return await asyncio.to_thread(load_runner, config)
    return await owned.unless_lost(partial(load_runner, config, owned.followers))


async def _serve_with(
    owned: OwnedFollowers | None,
    config: WorkerConfig,
    role: inference_pb2.WorkerRole,
    add_service: AddService,
    stop: asyncio.Event,
) -> None:
    membership = config.membership()
    channels = Channels(membership)
    server = GrpcServer(
        config.listen,
        credentials=membership.server_credentials(),
        interceptors=membership.interceptors(),
    )
    prefixes = read_pinned(config.pinned_prefixes)
    loaded = await _load(config, owned)
    plan = plan_pinned(
        prefixes, loaded.layout, loaded.capacity, loaded.vocab_size, config.max_num_batched_tokens
    )
    async with open_worker(config, loaded, channels) as worker:
        name = add_service(server.grpc, worker)
        add_kv_transfer_service(KvTransferServicer(worker.sender, Lender(worker)), server.grpc)
        add_WorkerServiceServicer_to_server(WorkerServicer(worker, role), server.grpc)
        read = on_loop(partial(_samples, worker, membership), asyncio.get_running_loop())
        worker.metrics.registry.register(StatsCollector(read))
        async with serving_metrics(config.listen, config.metrics_port, worker.metrics.registry):
            await pin_unless_stopped(worker, plan, stop)
            await server.start([name, *_SHARED_SERVICES])
            keep_for_good()
            renew = partial(reload_certificates, "cluster", membership, channels.renew)
            async with registered(config, worker, _TIERS[role]):
                await server.set_serving(serving=True)
                log.info("serving", address=config.listen, tls=membership.encrypts)
                with reloading([renew] if membership.encrypts else []):
                    await _until_stopped(worker, stop, owned)
                await _shut_down(server, worker, config.grace_s)


def _samples(worker: Worker, membership: Membership) -> list[Sample]:
    return [*worker_samples(worker), Sample(metrics.STRANGERS, membership.strangers.num_refused)]


async def _until_stopped(worker: Worker, stop: asyncio.Event, owned: OwnedFollowers | None) -> None:
    ends = [stop, worker.failed, *([] if owned is None else [owned.lost])]
    waits = [asyncio.create_task(event.wait()) for event in ends]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if owned is None:
        return
    if owned.lost.is_set():
        worker.failed.set()
    if worker.failed.is_set():
        owned.kill()


async def _shut_down(server: GrpcServer, worker: Worker, grace_s: float) -> None:
    if worker.failed.is_set():
        await server.set_dead()
        await server.stop(grace_s=0.5)
        raise InvariantError("the engine failed; see the log above")
    log.info("draining", grace_s=grace_s)
    await server.set_serving(serving=False)
    await worker.drain(grace_s)
    await server.stop(grace_s=0.5)
    log.info("stopped")
