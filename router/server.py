"""The router process from its settings to its end: find workers, serve, drain."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from paceline.prefix_index.index import PrefixIndex
from paceline.prefix_index.memory_index import MemoryPrefixIndex
from paceline.prefix_index.redis_calls import RedisCalls
from paceline.prefix_index.redis_index import RedisPrefixIndex
from paceline.prefix_index.registration import WorkerTable
from paceline.runtime.channels import Channels
from paceline.runtime.log import configure_logging, get_logger
from paceline.runtime.membership import Membership
from paceline.runtime.memory import keep_for_good
from paceline.runtime.metrics import StatsCollector
from paceline.runtime.metrics_server import on_loop, serving_metrics
from paceline.runtime.reload import reload_certificates, reloading
from paceline.runtime.server import GrpcServer, run_service
from paceline.runtime.serving import is_private
from paceline.runtime.tls import CertificateSource
from paceline.v1 import inference_pb2
from router.admission import AdmissionController, Door
from router.cache_scopes import CacheScopes, read_public_prefixes, read_salt
from router.config import RouterConfig
from router.discovery import Discovery
from router.dispatcher import Dispatcher
from router.gate import Gate
from router.intake import Intake
from router.metrics import InstrumentedDispatcher, InstrumentedIndex, RequestMetrics, router_samples
from router.rate_limit import LocalRateLimiter, RateLimiter, RedisRateLimiter
from router.reload import reload_tenants
from router.service import SERVICE_NAME, InferenceServicer
from router.slots import LocalSlots, RedisSlots, Slots
from router.tenants import Tenants
from router.tokenizer import Tokenizer, keep_torch_out
from router.turnstile import Turnstile
from router.worker_sources import sources_of
from router.workers import WorkerRegistry

# The public limit is on the prompt; this only keeps a request over that limit from being cut off without a reason.
_MAX_RECEIVE_BYTES = 16 << 20
_DRAIN_LOOK_S = 0.05

log = get_logger()


def run_router(config: RouterConfig) -> int:
    """Runs a router until SIGTERM or SIGINT; gives the exit status."""
    configure_logging("router", "router", config.log_level, knows_text=True)
    keep_torch_out()
    return run_service(lambda stop: _serve(config, stop))


async def _serve(config: RouterConfig, stop: asyncio.Event) -> None:
    tenants, membership = Tenants(config.tenants), config.membership()
    public = CertificateSource(config.public_tls) if config.tls_cert else None
    tokenizer = await asyncio.to_thread(Tokenizer, Path(config.model))
    scopes = CacheScopes(_secret(config), read_public_prefixes(config.public_prefixes, tokenizer))
    server = GrpcServer(
        config.listen,
        max_receive_bytes=_MAX_RECEIVE_BYTES,
        credentials=public.server_credentials() if public else None,
        plain_listen=config.plain_listen,
    )
    channels = Channels(membership)
    registry = WorkerRegistry(channels, config.max_buffered_events, config.message_us * 1e-6)
    async with (
        _discovery(config, registry) as discovery,
        _index(config) as index,
        _counters(config) as (limiter, slots, turnstile),
    ):
        door = Door(config.max_requests, config.max_request_bytes)
        admission = AdmissionController(door, limiter, slots, turnstile)
        observed = RequestMetrics()
        timed = InstrumentedIndex(index, observed)
        dispatcher = InstrumentedDispatcher(Dispatcher(config, registry, timed, registry.channels), observed)
        gate = Gate(config.bounds, config.placement_rules, registry, timed)
        intake = Intake(config, tokenizer, registry, scopes, gate)
        service = InferenceServicer(
            intake, registry, index, admission, dispatcher, tenants, max_unread_s=config.max_unread_s
        )
        service.add_to(server.grpc)
        read = partial(router_samples, service, admission, gate, limiter, index, registry, discovery)
        observed.registry.register(StatsCollector(on_loop(read, asyncio.get_running_loop())))
        async with serving_metrics(config.listen, config.metrics_port, observed.registry):
            await server.start([SERVICE_NAME])
            keep_for_good()
            readiness = asyncio.create_task(report_readiness(config, server, registry, discovery))
            log.info("listening", address=config.listen, tls=public is not None)
            if tenants.are_known and public is None and not is_private(config.listen):
                log.warning("keys_in_the_clear", address=config.listen)
            with reloading(_reloads(tenants, public, membership, channels)):
                await stop.wait()
            readiness.cancel()
            await _shut_down(server, admission, config.grace_s)
    tokenizer.close()


def _reloads(
    tenants: Tenants, public: CertificateSource | None, membership: Membership, channels: Channels
) -> Iterator[Callable[[], None]]:
    """What SIGHUP reads again."""
    if tenants.are_known:
        yield partial(reload_tenants, tenants)
    if public is not None:
        yield partial(reload_certificates, "public", public)
    if membership.encrypts:
        yield partial(reload_certificates, "cluster", membership, channels.renew)


@asynccontextmanager
async def _discovery(config: RouterConfig, registry: WorkerRegistry) -> AsyncIterator[Discovery]:
    """Workers are found and followed until the end of the block."""
    table = WorkerTable(RedisCalls(config.redis)) if config.redis else None
    every_s = config.discovery_interval_s
    discovery = Discovery(
        registry,
        {
            inference_pb2.WORKER_ROLE_PREFILL: sources_of(config.prefill_places, "prefill", table, every_s),
            inference_pb2.WORKER_ROLE_DECODE: sources_of(config.decode_places, "decode", table, every_s),
        },
    )
    discovery.start()
    try:
        yield discovery
    finally:
        await discovery.aclose()
        await registry.channels.aclose()
        if table is not None:
            await table.aclose()


def _secret(config: RouterConfig) -> bytes:
    """Of the cache scopes. Tenants never see each other's blocks: without a secret of the operator's there is one of this process."""
    secret = read_salt(config.cache_salt_file)
    if config.tenants and not secret:
        log.info("cache_salt_minted")
        return secrets.token_bytes(16)
    return secret


@asynccontextmanager
async def _counters(config: RouterConfig) -> AsyncIterator[tuple[RateLimiter, Slots, Turnstile | None]]:
    """Who counts what tenants take: all routers together in Redis, which both ask together, or this one."""
    if not (config.tenants and config.redis):
        yield LocalRateLimiter(mode="local" if config.tenants else "none"), LocalSlots(), None
        return
    calls, budget_s, num_routers = RedisCalls(config.redis), config.limiter_budget_s, config.limiter_routers
    limiter = RedisRateLimiter(calls, budget_s=budget_s, num_routers=num_routers)
    slots = RedisSlots(calls, budget_s=budget_s, num_routers=num_routers)
    keeping = asyncio.create_task(slots.keep())
    try:
        yield limiter, slots, Turnstile(calls, slots, limiter, budget_s)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await slots.aclose()
        await limiter.aclose()


@asynccontextmanager
async def _index(config: RouterConfig) -> AsyncIterator[PrefixIndex]:
    index: PrefixIndex = MemoryPrefixIndex()
    if config.redis:
        index = RedisPrefixIndex(config.redis, budget_s=config.lookup_budget_s)
    try:
        yield index
    finally:
        await index.aclose()


async def report_readiness(
    config: RouterConfig, server: GrpcServer, registry: WorkerRegistry, discovery: Discovery
) -> None:
    """Serving from when every worker has been found, and then while requests can be placed."""
    complete = False
    while True:
        changed = registry.changed
        num_prefill = len(registry.views(inference_pb2.WORKER_ROLE_PREFILL))
        num_decode = len(registry.views(inference_pb2.WORKER_ROLE_DECODE))
        complete = complete or discovery.is_complete
        can_place = num_decode > 0 and (num_prefill > 0 or config.mode != "always")
        await server.set_serving(serving=complete and can_place)
        await changed.wait()


async def _shut_down(server: GrpcServer, admission: AdmissionController, grace_s: float) -> None:
    log.info("draining", grace_s=grace_s)
    admission.close()
    await server.set_serving(serving=False)
    # The server itself would refuse new calls with a status that says nothing; this way they hear DRAINING.
    for _ in range(int(grace_s / _DRAIN_LOOK_S)):
        if admission.stats().num_active == 0:
            break
        await asyncio.sleep(_DRAIN_LOOK_S)
    # Whoever has just been told DRAINING gets to hear it; usually nobody is left, and this takes no time.
    await server.stop(grace_s=5.0)
    log.info("stopped")
