"""Prefill and decode workers, whole but for their threads and sockets, on virtual time; and a router that is small.

Leases, senders, receivers, schedulers, pools, sessions, prefills and loans are the real ones. Engines step when told to.
What passes between workers takes time, and may be lost, damaged or late, to plan.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

from prometheus_client import CollectorRegistry

from decode_service.session import DecodeSession
from kvtransfer.borrower import PrefixBorrower
from kvtransfer.chunks import KvMessage, LeaseState
from kvtransfer.keep_alive import KeepAlive, Kept
from kvtransfer.leases import Lease, LeasePhase, LeaseTable, sweep_forever
from kvtransfer.lending import PrefixRequest
from kvtransfer.receiver import HandOverTimes, KVReceiver
from kvtransfer.sender import KVSender
from kvtransfer.transports.faulty import Fault, FaultKind, FaultyTransport
from kvtransfer.transports.late import LateTransport
from kvtransfer.transports.local import LocalTransport
from paceline.core.block_hash import BlockHash
from paceline.core.errors import InvariantError, KvLostError, PacelineError, PeerLostError
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.kv_layout import BlockId
from paceline.core.prefix import PrefixHint, PrefixOwner, WorkerKey
from paceline.core.request import BootEpoch, LeaseId, SequenceId, SequenceSpec, WorkerId
from paceline.core.ticket import KvTicket
from paceline.engine.async_engine import AsyncEngine
from paceline.engine.block_pool import BlockPool
from paceline.engine.engine import Engine
from paceline.engine.fake import FakeMemory, FakeModelRunner, fake_layout
from paceline.engine.scheduler import Scheduler
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.sequence import SequenceStatus
from paceline.runtime.channels import Channels
from paceline.runtime.wire_internal import (
    finish_reason_from_proto,
    first_token_from_proto,
    ticket_from_proto,
)
from paceline.v1 import decode_pb2, prefill_pb2
from paceline.worker.capacity import Capacity
from paceline.worker.failures import SequenceFailures
from paceline.worker.lender import Lender
from paceline.worker.runner import LoadedRunner
from paceline.worker.worker import Worker, _release_leased
from prefill_service.service import _Prefill
from tests.decode_service.pair import submit_message
from tests.engine.harness import VOCAB_SIZE, oracle
from tests.factories import BLOCK_SIZE, FINGERPRINT
from tests.virtual_time import VirtualTimeLoop, virtual_clock

HEARTBEAT_S = 5.0
# Two heartbeats.
TTL_S = 12.0
# A block takes 32 bytes, and so two messages, each of which is so long on its way.
MAX_CHUNK_BYTES = 16
LATENCY_S = 0.4
TIMES = HandOverTimes(stall_timeout_s=10.0, max_stalls=2)
LOAN_TIMES = HandOverTimes(stall_timeout_s=1.5, max_stalls=1)
# A call's own deadline.
CALL_S = 60.0
MAX_ATTEMPTS = 3
PREFILL_BLOCKS, DECODE_BLOCKS = 5, 6
ODD = replace(FINGERPRINT, dtype="bfloat16")


class SteppedEngine(AsyncEngine):
    """The engine without its thread: it steps when it is told to."""

    def step(self) -> None:
        """Takes what it was told, and one step."""
        if self._commands.empty() and not self._engine.has_work():
            return
        assert self._apply_commands(wait=False)
        result = self._engine.step() if self._engine.has_work() else None
        self._deliver(result, self._engine.stats())

    @property
    def scheduler(self) -> Scheduler:
        """Whose books are checked."""
        return self._engine._scheduler


class WatchedSender(KVSender):
    """Remembers which leases it has confirmed."""

    def __init__(self, *args: Any, confirmed: set[LeaseId], **options: Any) -> None:
        super().__init__(*args, **options)
        self._confirmed = confirmed

    def release(self, lease_ids: Sequence[LeaseId], boot_epoch: BootEpoch) -> list[LeaseState]:
        """See KVSender.release."""
        held = {lease_id for lease_id in lease_ids if self._leases._find(lease_id) is not None}
        states = super().release(lease_ids, boot_epoch)
        pairs = zip(lease_ids, states, strict=True)
        self._confirmed |= {lease_id for lease_id, state in pairs if state is LeaseState.VALID} & held
        return states


class WatchedKeepAlive(KeepAlive):
    """Remembers since when each lease has been kept."""

    def __init__(self, transport: "Network") -> None:
        super().__init__(transport, every_s=HEARTBEAT_S)
        self._kept: dict[LeaseId, tuple[Kept, float]] = {}

    @asynccontextmanager
    async def keep(self, ticket: KvTicket) -> AsyncGenerator[Kept, None]:
        """See KeepAlive.keep."""
        async with super().keep(ticket) as kept:
            self._kept[ticket.lease_id] = kept, virtual_clock()
            try:
                yield kept
            finally:
                del self._kept[ticket.lease_id]

    def has_renewed(self, lease_id: LeaseId) -> bool:
        """Whether it is kept now, and for so long that a heartbeat must have come of it."""
        kept, since_s = self._kept.get(lease_id, (None, 0.0))
        is_kept = kept is not None and kept in kept._pulse.kept
        return is_kept and virtual_clock() - since_s > HEARTBEAT_S + LATENCY_S


class WatchedLeases(LeaseTable):
    """Does not bear that a lease expires while somebody keeps it alive, unless renewals have been lost."""

    def __init__(self, cluster: "SmallCluster", on_end: Callable[[SequenceId], None]) -> None:
        super().__init__(on_end, ttl_s=TTL_S, clock=virtual_clock)
        self._cluster = cluster

    def _end(self, lease: Lease, phase: LeasePhase) -> None:
        super()._end(lease, phase)
        if phase is LeasePhase.EXPIRED and self._cluster.is_kept_alive(lease.lease_id):
            self._cluster.errors.append(f"{lease.lease_id} expired though it was renewed")


class ReservedBlocks:
    """A worker's memory as its receivers see it: they write where a sequence waits for KV, and nowhere else."""

    def __init__(self, cluster: "SmallCluster", memory: FakeMemory, scheduler: Scheduler) -> None:
        self._cluster = cluster
        self._memory = memory
        self._scheduler = scheduler
        self.block_bytes = memory.block_bytes

    def read(self, block_id: BlockId) -> memoryview:
        """See BlockStore.read."""
        return self._memory.read(block_id)

    def checksum(self, block_id: BlockId) -> int:
        """See BlockStore.checksum."""
        return self._memory.checksum(block_id)

    def write(self, block_id: BlockId, offset: int, data: bytes | memoryview) -> None:
        """See BlockStore.write."""
        waiting = self._scheduler._running.parked
        if not any(block_id in table.held_ids for sequence in waiting for table in sequence.blocks.tables):
            self._cluster.errors.append(f"block {block_id} is written though nobody has reserved it")
        self._memory.write(block_id, offset, data)


@dataclass(eq=False)
class Life:
    """A worker in one of its lives."""

    name: str
    worker: Worker
    engine: SteppedEngine
    runner: FakeModelRunner
    session: DecodeSession
    lender: Lender
    sweeper: "asyncio.Task[None]"
    network: "Network"
    is_dead: bool = False
    tickets: dict[SequenceId, KvTicket] = field(default_factory=dict)

    @property
    def as_owner(self) -> PrefixOwner:
        """As others know it."""
        return PrefixOwner(self.worker.key.worker_id, self.name, self.worker.key.boot_epoch)


class Line:
    """The way from one life to whoever answers at a ticket's address. The dead neither ask nor answer."""

    def __init__(self, cluster: "SmallCluster", name: str) -> None:
        self._cluster = cluster
        self._name = name
        self.is_cut = False

    async def pull(
        self,
        ticket: KvTicket,
        held_hashes: Sequence[BlockHash],
        into: Sequence[BlockId],
    ) -> AsyncGenerator[KvMessage, None]:
        """As the sender's, a little later."""
        owner = self._cluster.lives[ticket.owner_address]
        way = LocalTransport(owner.worker.sender, self._cluster.fingerprint_of(self._name))
        async with aclosing(way.pull(ticket, held_hashes, into)) as messages:
            async for message in messages:
                await asyncio.sleep(LATENCY_S)
                if owner.is_dead:
                    await asyncio.Event().wait()
                yield message

    async def renew(self, tickets: Sequence[KvTicket]) -> list[LeaseState]:
        """As the sender's, unless it is lost."""
        if self._cluster.num_renewals_to_lose:
            self._cluster.num_renewals_to_lose -= 1
            self._cluster.struck[FaultKind.LOSE_RENEWALS] += 1
            raise KvLostError("the renewal was lost, to plan")
        sender = self._answering(tickets[0])
        return sender.renew([ticket.lease_id for ticket in tickets], tickets[0].boot_epoch)

    async def release(self, ticket: KvTicket) -> LeaseState:
        """As the sender's, unless it or its answer is lost."""
        await asyncio.sleep(LATENCY_S)
        fault = self._cluster.next_loss()
        if fault is FaultKind.LOSE_RELEASE:
            raise KvLostError("the release was lost, to plan")
        (state,) = self._answering(ticket).release([ticket.lease_id], ticket.boot_epoch)
        if fault is FaultKind.LOSE_RELEASE_ANSWER:
            raise KvLostError("the answer to the release was lost, to plan")
        return state

    def _answering(self, ticket: KvTicket) -> KVSender:
        if self.is_cut:
            raise KvLostError("the dead ask nothing")
        return self._cluster.lives[ticket.owner_address].worker.sender


class Network(Line):
    """A line on which each pull meets the faults that are planned for the next one. Blocks may be written in place, too."""

    def __init__(self, cluster: "SmallCluster", name: str, target: "ReservedBlocks") -> None:
        super().__init__(cluster, name)
        self._target = target
        self._engines: dict[Life, LateTransport] = {}

    def pull(
        self, ticket: KvTicket, held_hashes: Sequence[BlockHash], into: Sequence[BlockId]
    ) -> AsyncGenerator[KvMessage, None]:
        """As the line's or an engine's, damaged."""
        faults, self._cluster.faults = self._cluster.faults, []
        way = self._engine(self._cluster.lives[ticket.owner_address]) if self._cluster.is_in_place else self
        pull = way.pull if isinstance(way, LateTransport) else super().pull
        damaged = FaultyTransport(_Pulling(pull), faults, struck=self._cluster.struck)
        return damaged.pull(ticket, held_hashes, into)

    def settling(self, into: Sequence[BlockId]) -> "asyncio.Future[None] | None":
        """What an engine still writes."""
        settling = [each for engine in self._engines.values() if (each := engine.settling(into)) is not None]
        assert len(settling) <= 1, "two engines write to the same blocks"
        return settling[0] if settling else None

    def _engine(self, owner: "Life") -> LateTransport:
        fingerprint = self._cluster.fingerprint_of(self._name)
        if owner not in self._engines:
            self._engines[owner] = LateTransport(
                owner.worker.sender, fingerprint, owner.runner.memory, self._target, write_s=2 * LATENCY_S
            )
        return self._engines[owner]


class _Pulling:
    """One way to pull, as a transport to damage."""

    def __init__(self, pull: Callable[..., AsyncGenerator[KvMessage, None]]) -> None:
        self.pull = pull

    def settling(self, into: Sequence[BlockId]) -> None:
        """The network is asked."""
        raise AssertionError

    async def renew(self, tickets: Sequence[KvTicket]) -> list[LeaseState]:
        """The network is asked."""
        raise AssertionError

    async def release(self, ticket: KvTicket) -> LeaseState:
        """The network is asked."""
        raise AssertionError


class LocalBorrower(PrefixBorrower):
    """Asks lenders in this process."""

    def __init__(self, cluster: "SmallCluster", receiver: KVReceiver, fingerprint: ModelFingerprint) -> None:
        super().__init__(Channels(), receiver, fingerprint)
        self._cluster = cluster
        self._own = fingerprint

    async def _call(self, owner: PrefixOwner, request: PrefixRequest) -> KvTicket | None:
        await asyncio.sleep(LATENCY_S)
        lender = self._cluster.lives[owner.address].lender
        try:
            async with asyncio.timeout(CALL_S):
                return await lender.lend(request, owner.boot_epoch, self._own)
        except TimeoutError:
            raise KvLostError("the dead lend nothing") from None


class Trip:
    """One request, as the router sees it: attempt after attempt, until it has come to one end."""

    def __init__(self, cluster: "SmallCluster", spec: SequenceSpec) -> None:
        self.spec = spec
        self.expected = tuple(oracle(spec)[0])
        self.output: list[int] = []
        self.ends: list[str] = []
        self.attempt = -1
        self.is_placed = False
        self._cluster = cluster
        self._has_kv = self._is_prefilled = self._is_submitted = False
        self._heard: list[prefill_pb2.PrefillResponse | PacelineError] = []
        self._events: list[decode_pb2.SequenceEvent] = []

    @property
    def sequence_id(self) -> SequenceId:
        """Of the attempt under way."""
        return SequenceId(self.spec.sequence_id.request_id, self.attempt)

    @property
    def is_over(self) -> bool:
        """Whether it has come to an end."""
        return bool(self.ends)

    def place(self, prefill: Life, decode: Life, hint: Life | None = None) -> None:
        """The next attempt begins. The prefill may look for the beginning of the prompt in the cache of another worker."""
        self.attempt += 1
        self.is_placed = True
        self._has_kv = self._is_prefilled = self._is_submitted = False
        self._heard, self._events = [], []
        self.prefill, self.decode = prefill, decode
        num_tokens = len(self.spec.prompt_ids) // BLOCK_SIZE * BLOCK_SIZE
        self._hint = PrefixHint(hint.as_owner, num_tokens) if hint and num_tokens else None
        self._attempt_spec = replace(self.spec, sequence_id=self.sequence_id, output_ids=tuple(self.output))
        self._computing = asyncio.create_task(self._compute(self._heard))
        # One that is cancelled before it begins has submitted nothing.
        self._cluster.tasks.add(self._computing)
        self._computing.add_done_callback(self._cluster.tasks.discard)

    async def _compute(self, heard: list[prefill_pb2.PrefillResponse | PacelineError]) -> None:
        """As PrefillServicer does."""
        prefill = _Prefill(self.prefill.worker, self._attempt_spec, self._hint)
        try:
            async with aclosing(
                cast("AsyncGenerator[prefill_pb2.PrefillResponse, None]", prefill.run())
            ) as responses:
                async for response in responses:
                    heard.append(response)  # noqa: PERF401 - as they come, not when all have
        except PacelineError as error:
            heard.append(error)
        finally:
            prefill.close()

    def hear(self) -> None:
        """Takes what has been said since."""
        while self.is_placed and self._heard:
            self._hear_prefill(self._heard.pop(0))
        if self.is_placed and (self.decode.is_dead or (self.prefill.is_dead and not self._is_prefilled)):
            self.fail(PeerLostError.reason)
        while self.is_placed and self._is_prefilled and self._events:
            self._hear_decode(self._events.pop(0))

    def take(self, event: decode_pb2.SequenceEvent) -> None:
        """Something from its decode worker. It is looked at once the prefill has been read."""
        if event.HasField("kv_received"):
            self._has_kv = True
            self._require_confirmed()
        if event.HasField("failed"):
            self.fail(event.failed.reason)
        else:
            self._events.append(event)

    def _hear_prefill(self, response: prefill_pb2.PrefillResponse | PacelineError) -> None:
        if isinstance(response, PacelineError):
            self.fail(response.reason)
        elif response.HasField("started") and not self.decode.is_dead:
            ticket = ticket_from_proto(response.started.ticket)
            self._is_submitted = True
            self.decode.tickets[self.sequence_id] = ticket
            self.decode.session.submit(submit_message(self._attempt_spec, ticket))
        elif response.HasField("result"):
            self._is_prefilled = True
            (first,) = map(first_token_from_proto, response.result.first_tokens)
            self._accept(
                len(self._attempt_spec.output_ids), (first.token_id,), is_end=first.finish_reason is not None
            )

    def _hear_decode(self, event: decode_pb2.SequenceEvent) -> None:
        if event.HasField("tokens"):
            is_end = finish_reason_from_proto(event.tokens.finish_reason) is not None
            self._accept(event.tokens.first_index, tuple(event.tokens.token_ids), is_end=is_end)

    def _accept(self, first_index: int, token_ids: tuple[int, ...], *, is_end: bool) -> None:
        assert first_index <= len(self.output), "a token is missing"
        self.output += token_ids[len(self.output) - first_index :]
        assert tuple(self.output) == self.expected[: len(self.output)], "wrong tokens"
        if is_end:
            assert tuple(self.output) == self.expected, "the output ends too early"
            self.end("served")

    def _require_confirmed(self) -> None:
        ticket = self.decode.tickets[self.sequence_id]
        assert ticket.lease_id in self._cluster.confirmed, "committed without the owner's word"
        same = self._cluster.fingerprint_of(self.decode.name) == ticket.fingerprint
        assert same, "workers that compute differently have handed over"

    def fail(self, reason: str) -> None:
        """The attempt is lost; there are a few more."""
        self._cluster.reasons.append(reason)
        self._leave()
        if self.attempt + 1 == MAX_ATTEMPTS:
            self.end("failed")

    def end(self, how: str) -> None:
        """Once."""
        self.ends.append(how)
        if self.is_placed:
            self._leave()

    def _leave(self) -> None:
        """Neither tier goes on with the attempt."""
        self.is_placed = False
        self._computing.cancel()
        request_id, attempt = self.sequence_id
        if self._is_submitted and not self.decode.is_dead:
            self.decode.session.cancel(decode_pb2.Cancel(request_id=request_id, attempt=attempt))
        if not self._has_kv and not self.prefill.is_dead:
            self._cluster.release_for_router(self.prefill, self.sequence_id)


class SmallCluster:
    """Two workers of each tier and their router. Make it on the loop that runs it."""

    def __init__(self, *, has_odd_worker: bool) -> None:
        self.has_odd_worker = has_odd_worker
        self.lives: dict[str, Life] = {}
        self.trips: list[Trip] = []
        self.confirmed: set[LeaseId] = set()
        self.faults: list[Fault] = []
        self.releases_to_lose: deque[FaultKind] = deque()
        self.num_renewals_to_lose = 0
        # What has gone wrong, and who has died in the midst of a hand-over.
        self.struck: Counter[FaultKind] = Counter()
        self.deaths: list[str] = []
        self.reasons: list[str] = []
        # What nobody has caught.
        self.errors: list[object] = []
        self.is_in_place = False
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.errors.append(context))
        self.tasks: set[asyncio.Task[None]] = set()
        self._num_lives = 0
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            self.lives[name] = self._make(name)

    def fingerprint_of(self, name: str) -> ModelFingerprint:
        """What a worker serves."""
        return ODD if self.has_odd_worker and name == "decode-1" else FINGERPRINT

    def of_tier(self, tier: str) -> list[Life]:
        """Those that are there."""
        return [life for name, life in self.lives.items() if name.startswith(tier)]

    def _make(self, name: str) -> Life:
        self._num_lives += 1
        is_decode = name.startswith("decode")
        num_blocks = DECODE_BLOCKS if is_decode else PREFILL_BLOCKS
        fingerprint, epoch = self.fingerprint_of(name), BootEpoch(self._num_lives)
        runner = FakeModelRunner(num_blocks, BLOCK_SIZE, VOCAB_SIZE)
        config = SchedulerConfig(
            max_num_batched_tokens=6, max_num_seqs=4, fingerprint=fingerprint.digest(), prefix_pull="always"
        )
        pool = BlockPool(num_blocks, BLOCK_SIZE)
        scheduler = Scheduler(config, pool, runner.memory, clock=virtual_clock)
        engine = SteppedEngine(Engine(scheduler, runner, clock=virtual_clock))
        leases = WatchedLeases(self, _release_leased(engine))
        reserved = ReservedBlocks(self, runner.memory, scheduler)
        network = Network(self, name, reserved)
        keep_alive = WatchedKeepAlive(network)
        loans = KVReceiver(network, reserved, fingerprint, LOAN_TIMES, keep_alive=keep_alive)
        num_tokens = num_blocks * BLOCK_SIZE
        worker = Worker(
            key=WorkerKey(WorkerId(name), epoch),
            address=name,
            model_id="fake",
            loaded=LoadedRunner(
                runner,
                fingerprint,
                fake_layout(BLOCK_SIZE),
                Capacity(num_blocks, num_tokens, num_tokens, num_tokens, 1),
                VOCAB_SIZE,
                frozenset(),
            ),
            scheduling=config,
            engine=engine,
            leases=leases,
            sender=WatchedSender(
                leases,
                runner.memory,
                fingerprint,
                epoch,
                max_chunk_bytes=MAX_CHUNK_BYTES,
                confirmed=self.confirmed,
            ),
            transport=cast("Any", network),
            receiver=KVReceiver(network, reserved, fingerprint, TIMES, keep_alive=keep_alive),
            borrower=LocalBorrower(self, loans, fingerprint),
            index=cast("Any", None),
            publisher=cast("Any", None),
            metrics=cast("Any", None),
            failures=SequenceFailures(CollectorRegistry()),
            failed=asyncio.Event(),
        )
        sweeper = asyncio.create_task(sweep_forever(leases))
        return Life(name, worker, engine, runner, DecodeSession(worker), Lender(worker), sweeper, network)

    # -- what happens

    def kill(self, name: str) -> None:
        """The worker is gone from one moment to the next, and another life of it begins."""
        life = self.lives[name]
        if life.session._hand_overs or life.worker.leases.stats().num_active:
            self.deaths.append(name)
        life.is_dead = True
        life.network.is_cut = True
        life.sweeper.cancel()
        for task in life.session._hand_overs.values():
            task.cancel()
        self.lives[name] = self._make(name)

    def is_kept_alive(self, lease_id: LeaseId) -> bool:
        """Whether a worker that lives keeps it, long enough to have renewed it, and no renewal has been lost."""
        keepers = [cast("WatchedKeepAlive", life.worker.receiver._keep_alive) for life in self.lives.values()]
        return not self.struck[FaultKind.LOSE_RENEWALS] and any(
            each.has_renewed(lease_id) for each in keepers
        )

    def next_loss(self) -> FaultKind | None:
        """What becomes of the release that is sent now."""
        if not self.releases_to_lose:
            return None
        kind = self.releases_to_lose.popleft()
        self.struck[kind] += 1
        return kind

    def release_for_router(self, life: Life, sequence_id: SequenceId) -> None:
        """As LeaseRelease does, unless it is lost."""
        if self.next_loss() is FaultKind.LOSE_RELEASE:
            return
        life.worker.sender.release_sequence(sequence_id, life.worker.key.boot_epoch)

    async def hear(self) -> None:
        """The router reads what has been said to it."""
        for life in self.of_tier("decode"):
            while life.session._outbox._events:
                for event in await life.session.take_events():
                    self._hear(life, event)
        for trip in self.trips:
            trip.hear()

    def _hear(self, life: Life, event: decode_pb2.SequenceEvent) -> None:
        for trip in self.trips:
            if (
                trip.is_placed
                and trip.decode is life
                and trip.sequence_id == (event.request_id, event.attempt)
            ):
                trip.take(event)

    async def settle(self) -> None:
        """Everybody does what takes no time."""
        await cast("VirtualTimeLoop", asyncio.get_running_loop()).settle()

    async def work(self) -> None:
        """Every engine steps once, and the router reads."""
        for life in self.lives.values():
            life.engine.step()
            await self.settle()
        await self.hear()
        await asyncio.sleep(LATENCY_S / 2)

    async def finish(self, *, max_rounds: int = 400) -> None:
        """Nothing more goes wrong; every request is placed until it ends. Raises AssertionError when that does not come."""
        self.faults.clear()
        self.releases_to_lose.clear()
        self.num_renewals_to_lose = 0
        for _ in range(max_rounds):
            for trip in self.trips:
                if not (trip.is_over or trip.is_placed):
                    trip.place(self.of_tier("prefill")[0], self.of_tier("decode")[0])
            has_work = any(life.engine.scheduler.has_work() for life in self.lives.values())
            await self.work()
            await asyncio.sleep(0 if has_work else 2 * LATENCY_S)
            self.check()
            if all(trip.is_over for trip in self.trips) and self.is_idle:
                return
        raise AssertionError("something waits for ever, or is leaked")

    @property
    def is_idle(self) -> bool:
        """Whether every pool is whole, and no lease is out."""
        return all(
            life.worker.is_idle and life.engine.stats.num_free_blocks == life.engine.stats.num_blocks
            for life in self.lives.values()
        )

    @property
    def num_expired(self) -> int:
        """Leases whose clock ended them."""
        return sum(life.worker.leases.stats().num_expired for life in self.lives.values())

    # -- what must hold

    def check(self) -> None:
        """The books, the leases, and the bytes of everything that counts as computed."""
        for life in self.lives.values():
            life.engine.scheduler.check_invariants()
            life.worker.leases.check_invariants()
            _check_bytes(life)
        assert not self.errors, f"nobody caught {self.errors}"
        assert InvariantError.reason not in self.reasons, "a bug, by its own word"
        assert all(len(trip.ends) <= 1 for trip in self.trips), "a request has ended twice"


def _check_bytes(life: Life) -> None:
    """What a sequence counts as computed lies in its blocks."""
    for family in life.engine.scheduler._members.families.values():
        for sequence in family:
            if sequence.status is SequenceStatus.RUNNING:
                num_tokens = sequence.num_computed_tokens
                (table,) = sequence.blocks.view
                seen = life.runner._read_range(table, 0, num_tokens) if num_tokens else b""
                assert seen == _kv_of(sequence.token_ids[:num_tokens]), f"wrong bytes at {life.name}"


def _kv_of(token_ids: Sequence[int]) -> bytes:
    return b"".join(
        token_id.to_bytes(4, "little") + position.to_bytes(4, "little")
        for position, token_id in enumerate(token_ids)
    )
