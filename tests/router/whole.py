"""A router in front of whole workers, all in this process: what a call is from its first byte until nothing of it is left."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import grpc
from google.rpc import error_details_pb2, status_pb2

from paceline.prefix_index.index import PrefixIndex
from paceline.prefix_index.memory_index import MemoryPrefixIndex
from paceline.runtime.channels import Channels
from paceline.runtime.wire_internal import fingerprint_to_proto
from paceline.v1 import inference_pb2
from paceline.worker.worker import Worker
from router.admission import AdmissionController, Door
from router.cache_scopes import CacheScopes
from router.config import RouterConfig
from router.dispatcher import Dispatcher
from router.gate import Gate
from router.intake import Intake
from router.rate_limit import LocalRateLimiter, RateLimiter
from router.service import InferenceServicer
from router.slots import LocalSlots, Slots
from router.tenants import Tenants
from router.tokenizer import Tokenizer
from router.turnstile import Turnstile
from router.workers import WorkerRegistry
from tests.router.cluster import DECODE, PREFILL
from tests.router.scripted_workers import ScriptedWorker
from tests.worker.bench import serving_worker, until

ROLES = {"prefill": PREFILL, "decode": DECODE}


class EndedError(Exception):
    """A call has ended with a status."""

    def __init__(self, status: Any) -> None:
        super().__init__(status.details)
        self.code: grpc.StatusCode = status.code
        info = error_details_pb2.ErrorInfo()
        (packed,) = [value for key, value in status.trailing_metadata if key == "grpc-status-details-bin"]
        assert any(detail.Unpack(info) for detail in status_pb2.Status.FromString(packed).details)
        self.reason = info.reason


class Call:
    """What gRPC gives a handler, as far as ours ask for it; takes what it is sent at once."""

    def __init__(self, metadata: tuple[tuple[str, str], ...] = (), time_left_s: float | None = None) -> None:
        self._metadata = metadata
        self._time_left_s = time_left_s
        self.responses: list[inference_pb2.GenerateResponse] = []

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """What the client has sent beside the message."""
        return self._metadata

    def time_remaining(self) -> float | None:
        """Until the client's deadline."""
        return self._time_left_s

    async def write(self, message: inference_pb2.GenerateResponse) -> None:
        """Waits, as gRPC does."""
        await asyncio.sleep(0)
        self.responses.append(message)

    async def abort_with_status(self, status: Any) -> NoReturn:
        """Ends the call."""
        raise EndedError(status)


@dataclass(frozen=True, slots=True)
class Books:
    """Who counts what tenants take, and who knows where prefixes are."""

    limiter: RateLimiter = field(default_factory=LocalRateLimiter)
    slots: Slots = field(default_factory=LocalSlots)
    index: PrefixIndex = field(default_factory=MemoryPrefixIndex)
    turnstile: Turnstile | None = None


@dataclass(frozen=True, slots=True)
class WholeRouter:
    """The public service, and whoever may keep something of a request."""

    service: InferenceServicer
    admission: AdmissionController
    dispatcher: Dispatcher
    registry: WorkerRegistry
    workers: Mapping[str, Worker]
    # One more of each tier, which serves the same model and follows scripts.
    scripted: Mapping[str, ScriptedWorker]

    async def generate(self, raw: bytes, call: Call) -> None:
        """The handler, as gRPC calls it."""
        await self.service.Generate(raw, call)  # type: ignore[arg-type] # it has what ours ask a context for

    async def until_idle(self) -> None:
        """Returns when nobody keeps anything of any request, on any tier. What is still on its way there shows the next time."""
        await until(lambda: self.admission.stats().num_active == 0 and self.registry.num_streams == 0)
        await until(lambda: not self.dispatcher._lease_release._tasks)
        for worker in self.workers.values():
            await until(lambda each=worker: _is_empty(each))  # type: ignore[misc] # a lambda's default
        for scripted in self.scripted.values():
            await scripted.until(lambda each=scripted: len(each.prefills) == len(each.ended_prefills))  # type: ignore[misc] # the same
        views = [view for role in ROLES.values() for view in self.registry.views(role)]
        assert sum(view.num_assigned_tokens + view.num_assigned_sequences for view in views) == 0
        assert self.admission.stats().num_bytes == 0


def _is_empty(worker: Worker) -> bool:
    """Every block is free, and no lease is out."""
    return worker.is_idle and worker.engine.stats.num_free_blocks == worker.loaded.capacity.num_blocks


@asynccontextmanager
async def whole_router(
    directory: Path,
    tokenizer: Tokenizer,
    *,
    scripted: tuple[str, ...] = (),
    books: Books | None = None,
    **settings: object,
) -> AsyncIterator[WholeRouter]:
    """A router that sees one worker of each tier with a fake runner, and those that follow scripts, such as `prefill-1`."""
    books = books or Books()
    async with AsyncExitStack() as stack:
        workers = {
            f"{tier}-0": await stack.enter_async_context(serving_worker(directory, f"{tier}-0", role))
            for tier, role in ROLES.items()
        }
        others = {name: await _started(name, workers["prefill-0"], stack) for name in scripted}
        addresses = {name: worker.address for name, worker in (workers | others).items()}
        config = RouterConfig(
            model="whole",
            prefill=",".join(_of_tier("prefill", addresses)),
            decode=",".join(_of_tier("decode", addresses)),
            **({"disaggregate": "always"} | settings),  # type: ignore[arg-type] # each name has its field's type
        )
        channels = Channels()
        stack.push_async_callback(channels.aclose)
        registry = WorkerRegistry(channels, config.max_buffered_events)
        watching = [
            asyncio.create_task(registry.watch(address, role))
            for tier, role in ROLES.items()
            for address in _of_tier(tier, addresses)
        ]
        stack.push_async_callback(_cancel, watching)
        await until(lambda: len(registry.infos()) == len(addresses))
        gate = Gate(config.bounds, config.placement_rules, registry, books.index)
        admission = AdmissionController(
            Door(config.max_requests, config.max_request_bytes), books.limiter, books.slots, books.turnstile
        )
        dispatcher = Dispatcher(config, registry, books.index, channels)
        service = InferenceServicer(
            Intake(config, tokenizer, registry, CacheScopes(), gate),
            registry,
            books.index,
            admission,
            dispatcher,
            Tenants(config.tenants),
            max_unread_s=config.max_unread_s,
        )
        yield WholeRouter(service, admission, dispatcher, registry, workers, others)


async def _started(name: str, like: Worker, stack: AsyncExitStack) -> ScriptedWorker:
    worker = ScriptedWorker(name, ROLES[name.partition("-")[0]])
    worker.info.fingerprint.CopyFrom(fingerprint_to_proto(like.loaded.fingerprint))
    worker.info.vocab_size = like.loaded.vocab_size
    worker.info.max_model_tokens = like.loaded.capacity.max_model_tokens
    await worker.start()
    stack.push_async_callback(worker.stop)
    return worker


def _of_tier(tier: str, addresses: Mapping[str, str]) -> list[str]:
    return [address for name, address in addresses.items() if name.startswith(tier)]


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
