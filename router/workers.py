"""The workers that this router sees: found by address, known by their own words, gone when their stream breaks."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from paceline.core.clock import Clock, monotonic
from paceline.core.errors import FingerprintMismatchError, PacelineError, PeerLostError
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.prefix import WorkerKey
from paceline.core.request import BootEpoch, WorkerId
from paceline.runtime.channels import Channels
from paceline.runtime.grpc_status import error_from_rpc
from paceline.runtime.log import get_logger
from paceline.runtime.wire_internal import fingerprint_from_proto
from paceline.v1 import inference_pb2, worker_pb2
from paceline.v1.worker_pb2_grpc import WorkerServiceStub
from router.assignments import Assignments
from router.decode_link import DecodeLink
from router.views import WorkerView

_INFO_TIMEOUT_S = 5.0
# A worker reports every second. One that is silent for so long is frozen: its connection would show it only after 30 s.
_SILENCE_S = 10.0
# Three reports that have not come: what it has to do by now is not known any more.
_STALE_S = 3.0
_RETRY_EVERY_S = 0.25
_GOING_S = 0.5

if TYPE_CHECKING:  # the stub's async form has a type, but no class
    from paceline.v1.worker_pb2_grpc import WorkerServiceAsyncStub

log = get_logger()


@dataclass(slots=True)
class _Known:
    """A worker that is there."""

    address: str
    info: worker_pb2.GetInfoResponse
    load: worker_pb2.WatchLoadResponse
    link: DecodeLink | None
    reported_s: float
    # Whether it has refused a prefill since it is about to end; its load report follows, or the end of its stream.
    has_refused: bool = False

    @property
    def key(self) -> WorkerKey:
        return WorkerKey(WorkerId(self.info.worker_id), BootEpoch(self.info.boot_epoch))

    @property
    def fingerprint(self) -> ModelFingerprint:
        return fingerprint_from_proto(self.info.fingerprint)

    @property
    def is_there(self) -> bool:
        """Whether it can be given work: a decode worker whose stream has broken is as good as gone."""
        return self.link is None or self.link.is_open

    @property
    def is_draining(self) -> bool:
        """Whether it takes nothing new, as far as anyone has heard."""
        return self.load.draining or self.has_refused or (self.link is not None and self.link.is_leaving)

    def view(self, assignments: Assignments, now_s: float) -> WorkerView:
        return WorkerView(
            key=self.key,
            address=self.address,
            fingerprint=self.fingerprint.digest(),
            block_size=self.info.fingerprint.block_size,
            num_blocks=self.info.num_blocks,
            num_free_blocks=self.load.num_free_blocks,
            num_running=self.load.num_running,
            num_waiting=self.load.num_waiting,
            num_pending_tokens=self.load.num_pending_tokens,
            draining=self.is_draining,
            cooling_down=self.load.cooling_down,
            is_load_known=now_s - self.reported_s < _STALE_S,
            num_assigned_tokens=assignments.num_tokens(self.key),
            num_assigned_sequences=assignments.num_sequences(self.key),
        )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What all known workers serve, and the lengths that the smallest of them allows."""

    model_id: str
    fingerprint: ModelFingerprint
    vocab_size: int
    max_model_tokens: int


@dataclass(slots=True)
class WorkerRegistry:
    """Owned by the router's event loop. Losing Redis removes nobody; only a broken stream does."""

    channels: Channels
    max_buffered_events: int
    assignments: Assignments = field(default_factory=Assignments)
    clock: Clock = monotonic
    _known: dict[WorkerKey, _Known] = field(default_factory=dict)
    # Set, and replaced by a new one, when a worker has come or gone.
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def watch(self, address: str, role: inference_pb2.WorkerRole) -> None:
        """Follows the worker at `address` for ever: while it is there, while it is away, when it comes back."""
        complaint = ""
        while True:
            try:
                await self._follow(address, role)
            except PacelineError as error:
                # A worker that stays away is one line in the log, not one every quarter of a second.
                if str(error) != complaint:
                    log.warning("worker_unreachable", address=address, reason=error.reason, error=str(error))
                complaint = str(error)
            await asyncio.sleep(_RETRY_EVERY_S)

    def views(self, role: inference_pb2.WorkerRole) -> list[WorkerView]:
        """The workers of one tier."""
        return [
            known.view(self.assignments, self.clock())
            for known in self._known.values()
            if known.info.role == role and known.is_there
        ]

    def infos(self) -> list[inference_pb2.WorkerInfo]:
        """All workers, for GetServerInfo."""
        return [
            inference_pb2.WorkerInfo(
                worker_id=known.info.worker_id,
                role=known.info.role,
                num_blocks=known.info.num_blocks,
                num_free_blocks=known.load.num_free_blocks,
                num_running=known.load.num_running,
                num_waiting=known.load.num_waiting,
            )
            for known in self._known.values()
        ]

    def link(self, key: WorkerKey) -> DecodeLink | None:
        """The stream to a decode worker; None if it is gone."""
        known = self._known.get(key)
        return known.link if known and known.is_there else None

    def note_leaving(self, key: WorkerKey) -> None:
        """A worker has refused work since it is about to end: nobody is sent there until its next life."""
        known = self._known.get(key)
        if known is not None:
            known.has_refused = True

    async def until_gone(self, key: WorkerKey) -> None:
        """Waits a moment for a worker to go whose call has just broken.

        If it is dead, its load stream breaks too; without the wait the next attempts could be sent to it meanwhile.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_GOING_S):
                while key in self._known:
                    await self.changed.wait()

    @property
    def served(self) -> ServedModel | None:
        """What is served; None while nobody is there."""
        if not self._known:
            return None
        infos = [known.info for known in self._known.values()]
        return ServedModel(
            model_id=infos[0].model_id,
            fingerprint=fingerprint_from_proto(infos[0].fingerprint),
            vocab_size=infos[0].vocab_size,
            max_model_tokens=min(info.max_model_tokens for info in infos),
        )

    async def _follow(self, address: str, role: inference_pb2.WorkerRole) -> None:
        stub = WorkerServiceStub(self.channels.get(address))
        try:
            info = await stub.GetInfo(
                worker_pb2.GetInfoRequest(), timeout=_INFO_TIMEOUT_S, wait_for_ready=False
            )
            self._require_fit(info, role, address)
            await self._follow_known(stub, address, info)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, address) from error

    async def _follow_known(
        self, stub: "WorkerServiceAsyncStub", address: str, info: worker_pb2.GetInfoResponse
    ) -> None:
        """Reads load reports; for a decode worker also the Decode stream. If one of the two ends, both do."""
        link = None
        if info.role == inference_pb2.WORKER_ROLE_DECODE:
            link = DecodeLink(self.channels.get(address), info.worker_id, self.max_buffered_events)
        streams = [asyncio.create_task(self._read_loads(stub, address, info, link))]
        if link is not None:
            streams.append(asyncio.create_task(link.run()))
        try:
            ended, _ = await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
            for stream in ended:
                stream.result()
        finally:
            self._remove(info)
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)

    async def _read_loads(
        self,
        stub: "WorkerServiceAsyncStub",
        address: str,
        info: worker_pb2.GetInfoResponse,
        link: DecodeLink | None,
    ) -> None:
        call = stub.WatchLoad(worker_pb2.WatchLoadRequest())
        try:
            while True:
                async with asyncio.timeout(_SILENCE_S):
                    load = await call.read()
                if not isinstance(load, worker_pb2.WatchLoadResponse):  # grpc.aio.EOF
                    return
                self._update(address, info, load, link)
        except TimeoutError:
            raise PeerLostError(f"{info.worker_id} has said nothing for {_SILENCE_S:g} s") from None
        finally:
            call.cancel()

    def _update(
        self,
        address: str,
        info: worker_pb2.GetInfoResponse,
        load: worker_pb2.WatchLoadResponse,
        link: DecodeLink | None,
    ) -> None:
        fresh = _Known(address, info, load, link, self.clock())
        known = self._known.setdefault(fresh.key, fresh)
        known.load, known.reported_s = load, fresh.reported_s
        if known is fresh:
            log.info("worker_found", peer=info.worker_id, address=address, num_blocks=info.num_blocks)
            self._notify()

    def _remove(self, info: worker_pb2.GetInfoResponse) -> None:
        key = WorkerKey(WorkerId(info.worker_id), BootEpoch(info.boot_epoch))
        if self._known.pop(key, None) is not None:
            log.warning("worker_lost", peer=info.worker_id)
            self._notify()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def _require_fit(
        self, info: worker_pb2.GetInfoResponse, role: inference_pb2.WorkerRole, address: str
    ) -> None:
        if info.role != role:
            names = inference_pb2.WorkerRole.Name(role), inference_pb2.WorkerRole.Name(info.role)
            raise FingerprintMismatchError(f"role of the worker at {address}", *names)
        served = self.served
        if served is not None:
            # How they cut their KV into blocks is for them: a hand-over converts it, or refuses.
            served.fingerprint.require_same_content(fingerprint_from_proto(info.fingerprint))
