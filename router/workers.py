"""The workers that this router sees: found by address, known by their own words, gone when their stream breaks."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from paceline.core.clock import Clock, monotonic
from paceline.core.errors import FingerprintMismatchError, PacelineError, PeerLostError
from paceline.core.prefix import WorkerKey
from paceline.runtime.channels import Channels
from paceline.runtime.grpc_status import as_paceline_error, error_from_rpc
from paceline.runtime.log import get_logger
from paceline.runtime.wire_internal import fingerprint_from_proto
from paceline.v1 import inference_pb2, worker_pb2
from paceline.v1.worker_pb2_grpc import WorkerServiceStub
from router.assignments import Assignments
from router.decode_link import DecodeLink
from router.known_worker import KnownWorker, key_of
from router.pace import Pace
from router.served import ServedModel, served_by
from router.views import WorkerView
from router.watch import Watch, WatchState

_INFO_TIMEOUT_S = 5.0
_GOING_S = 0.5
# Longer than a call without a deadline of its own would be waited for.
_LINGER_S = 900.0

if TYPE_CHECKING:  # the stub's async form has a type, but no class
    from paceline.v1.worker_pb2_grpc import WorkerServiceAsyncStub

log = get_logger()


@dataclass(slots=True)
class WorkerRegistry:
    """Owned by the router's event loop. Losing Redis removes nobody; only a broken stream does."""

    channels: Channels
    max_buffered_events: int
    # What a message to a client costs this process; see Pace.
    message_s: float = 0.0
    # A worker reports every second. One that is silent for so long is frozen: its connection would show it only after 30 s.
    silence_s: float = 10.0
    assignments: Assignments = field(default_factory=Assignments)
    clock: Clock = monotonic
    # None while nobody is there.
    served: ServedModel | None = None
    _known: dict[WorkerKey, KnownWorker] = field(default_factory=dict)
    # The lives that somebody follows, and every address at which somebody looks.
    _claimed: set[WorkerKey] = field(default_factory=set)
    _watches: dict[tuple[inference_pb2.WorkerRole, str], Watch] = field(default_factory=dict)
    # When somebody looked there last, of addresses where nobody looks any more.
    _left_s: dict[str, float] = field(default_factory=dict)
    # Set, and replaced by a new one, when a worker has come or gone, or something has come of looking for one.
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def watch(
        self, address: str, role: inference_pb2.WorkerRole, is_named: Callable[[], bool] = lambda: True
    ) -> None:
        """Follows the worker at `address`: while it is there, while it is away, when it comes back.

        Returns when it is away and nobody names the address any more. While its stream lives it stays, whoever names it.
        """
        watch = self._watches[role, address] = Watch(address, role)
        self._left_s.pop(address, None)
        try:
            while True:
                try:
                    await self._follow(watch)
                except PacelineError as error:
                    watch.complain(error)
                except Exception as error:
                    # A bug of ours, or a worker that says what cannot be: it may be well the next time.
                    if watch.complain(as_paceline_error(error)):
                        log.exception("task_failed", address=address)
                self._note_state(watch, "away")
                if not is_named():
                    break
                await asyncio.sleep(watch.next_pause_s())
        finally:
            del self._watches[role, address]
            self._left_s[address] = self.clock()
        log.info("address_dropped", address=address)

    async def close_left(self) -> None:
        """Closes connections to where nobody has looked for a quarter of an hour. Sooner it could end what is still under way there."""
        watched = {watch.address for watch in self._watches.values()}
        for address, left_s in list(self._left_s.items()):
            if address in watched:
                del self._left_s[address]
            elif self.clock() - left_s > _LINGER_S:
                del self._left_s[address]
                await self.channels.drop(address)

    def state(self, address: str, role: inference_pb2.WorkerRole) -> WatchState:
        """What has come of looking for a worker there."""
        watch = self._watches.get((role, address))
        return watch.state if watch else "unknown"

    def num_watched(self, role: inference_pb2.WorkerRole) -> int:
        """Addresses of one tier at which workers are looked for."""
        return sum(watch.role == role for watch in self._watches.values())

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

    @property
    def num_streams(self) -> int:
        """Sequences that decode workers have of this router."""
        return sum(known.link.num_sequences for known in self._known.values() if known.link)

    def link(self, key: WorkerKey) -> DecodeLink | None:
        """The stream to a decode worker; None if it is gone."""
        known = self._known.get(key)
        return known.link if known and known.is_there else None

    @contextmanager
    def until_lost(self, key: WorkerKey, lose: Callable[[], None]) -> Iterator[None]:
        """Calls `lose` if the worker is lost from sight before the block ends. Raises PeerLostError when it is already."""
        known = self._known.get(key)
        if known is None:
            raise PeerLostError(f"{key.worker_id} has just gone")
        known.losing[lose] = None
        try:
            yield
        finally:
            del known.losing[lose]

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

    async def _follow(self, watch: Watch) -> None:
        stub = WorkerServiceStub(self.channels.get(watch.address))
        try:
            info = await stub.GetInfo(
                worker_pb2.GetInfoRequest(), timeout=_INFO_TIMEOUT_S, wait_for_ready=False
            )
            self._require_fit(info, watch)
            if key_of(info) in self._claimed:
                await self._until_left(watch, info)
                return
            with self._claim(key_of(info)):
                await self._follow_known(stub, watch, info)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, watch.address) from error

    @contextmanager
    def _claim(self, key: WorkerKey) -> Iterator[None]:
        """One worker is followed once, however many addresses it has: a name in DNS may have one of each family."""
        self._claimed.add(key)
        try:
            yield
        finally:
            self._claimed.remove(key)
            self.notify()

    async def _until_left(self, watch: Watch, info: worker_pb2.GetInfoResponse) -> None:
        """Waits for as long as the worker is followed at another address of its own."""
        self._note_state(watch, "there")
        while key_of(info) in self._claimed:
            await self.changed.wait()

    async def _follow_known(
        self, stub: "WorkerServiceAsyncStub", watch: Watch, info: worker_pb2.GetInfoResponse
    ) -> None:
        """Reads load reports; for a decode worker also the Decode stream. If one of the two ends, both do."""
        link = None
        if info.role == inference_pb2.WORKER_ROLE_DECODE:
            pace = Pace(self.message_s, lambda: self.num_streams)
            link = DecodeLink(
                self.channels.get(watch.address), info.worker_id, self.max_buffered_events, pace
            )
        streams = [asyncio.create_task(self._read_loads(stub, watch, info, link))]
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
        watch: Watch,
        info: worker_pb2.GetInfoResponse,
        link: DecodeLink | None,
    ) -> None:
        call = stub.WatchLoad(worker_pb2.WatchLoadRequest())
        try:
            while True:
                async with asyncio.timeout(self.silence_s):
                    load = await call.read()
                if not isinstance(load, worker_pb2.WatchLoadResponse):  # grpc.aio.EOF
                    return
                self._update(watch, info, load, link)
        except TimeoutError:
            raise PeerLostError(f"{info.worker_id} has said nothing for {self.silence_s:g} s") from None
        finally:
            call.cancel()

    def _update(
        self,
        watch: Watch,
        info: worker_pb2.GetInfoResponse,
        load: worker_pb2.WatchLoadResponse,
        link: DecodeLink | None,
    ) -> None:
        known = self._known.get(key_of(info))
        if known is not None:
            known.note_load(load, self.clock())
            return
        known = KnownWorker(watch.address, info, load, link, self.clock())
        self._known[known.key] = known
        self.served = served_by([known.info for known in self._known.values()])
        log.info("worker_found", peer=info.worker_id, address=watch.address, num_blocks=info.num_blocks)
        watch.note_found()
        self.notify()

    def _remove(self, info: worker_pb2.GetInfoResponse) -> None:
        known = self._known.pop(key_of(info), None)
        if known is not None:
            for lose in list(known.losing):
                lose()
            self.served = served_by([known.info for known in self._known.values()])
            log.warning("worker_lost", peer=info.worker_id)
            self.notify()

    def notify(self) -> None:
        """Wakes whoever waits for a change."""
        self.changed.set()
        self.changed = asyncio.Event()

    def _note_state(self, watch: Watch, state: WatchState) -> None:
        is_news, watch.state = watch.state != state, state
        if is_news:
            self.notify()

    def _require_fit(self, info: worker_pb2.GetInfoResponse, watch: Watch) -> None:
        where = f"of the worker at {watch.address}"
        if info.role != watch.role:
            names = inference_pb2.WorkerRole.Name(watch.role), _name_of(info.role)
            raise FingerprintMismatchError(f"role {where}", *names)
        # What else answers there in this form is none of ours.
        if not info.worker_id or info.fingerprint.block_size < 1:
            raise FingerprintMismatchError(f"block_size {where}", "1 or more", "0")
        served = self.served
        if served is not None:
            # How they cut their KV into blocks is for them: a hand-over converts it, or refuses.
            served.fingerprint.require_same_content(fingerprint_from_proto(info.fingerprint))


def _name_of(role: int) -> str:
    """Also of one that nobody has."""
    known = inference_pb2.WorkerRole.DESCRIPTOR.values_by_number.get(role)
    return known.name if known else str(role)
