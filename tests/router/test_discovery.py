"""Workers that come and go while a router runs, as sources name them, tell lies about them, or fall silent."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing

import grpc
import pytest
from structlog.testing import capture_logs

from paceline.core.clock import ManualClock, monotonic
from paceline.core.request import SequenceSpec
from paceline.runtime.channels import Channels
from paceline.runtime.wire_internal import fingerprint_to_proto, spec_to_proto
from paceline.v1 import prefill_pb2
from paceline.v1.prefill_pb2_grpc import PrefillServiceStub
from router.discovery import MAX_ADDRESSES, Discovery
from router.worker_sources import DnsSource, StaticSource, WorkerSource
from router.workers import WorkerRegistry
from tests.factories import make_fingerprint, make_spec
from tests.router.cluster import DECODE, PREFILL
from tests.router.scripted_workers import ScriptedWorker, result, started


class ScriptedSource:
    """Names what it is told to, when it is told to."""

    name, is_fixed = "script", False

    def __init__(self) -> None:
        self._said: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()

    def say(self, *addresses: str) -> None:
        """From now on these."""
        self._said.put_nowait(frozenset(addresses))

    def fall_silent(self) -> None:
        """It cannot say."""
        self._said.put_nowait(None)

    async def sets(self) -> AsyncIterator[frozenset[str] | None]:
        """See WorkerSource."""
        while True:
            yield await self._said.get()
            self._said.task_done()

    async def heard(self) -> None:
        """Returns when somebody has taken in all that was said."""
        await self._said.join()


class Finding:
    """A registry that is told by a script where prefill workers are."""

    def __init__(self) -> None:
        self.source = ScriptedSource()
        self.registry = WorkerRegistry(Channels(), 10)
        self.discovery = Discovery(self.registry, {PREFILL: [self.source], DECODE: []})
        self.workers: list[ScriptedWorker] = []

    async def worker(self, name: str) -> ScriptedWorker:
        """One that listens, and that nobody has named yet."""
        worker = ScriptedWorker(name, PREFILL)
        await worker.start()
        self.workers.append(worker)
        return worker

    def seen(self) -> dict[str, int]:
        """Each worker's life."""
        return {view.key.worker_id: view.key.boot_epoch for view in self.registry.views(PREFILL)}

    async def until(self, holds: Callable[[], bool]) -> None:
        """Returns when the registry is in a state."""
        async with asyncio.timeout(20):
            while True:
                changed = self.registry.changed
                if holds():
                    return
                await changed.wait()

    async def until_seen(self, **lives: int) -> None:
        """Returns when exactly these are seen."""
        await self.until(
            lambda: self.seen() == {name.replace("_", "-"): life for name, life in lives.items()}
        )

    async def until_dropped(self, address: str) -> None:
        """Returns when nobody looks for a worker there any more."""
        await self.until(lambda: self.registry.state(address, PREFILL) == "unknown")


@asynccontextmanager
async def finding() -> AsyncIterator[Finding]:
    """A running one."""
    found = Finding()
    found.discovery.start()
    try:
        yield found
    finally:
        await found.discovery.aclose()
        await found.registry.channels.aclose()
        for worker in found.workers:
            await worker.stop()


async def test_a_worker_that_is_named_later_joins() -> None:
    """It is asked who it is, and seen from its first report on."""
    async with finding() as found:
        first, second = await found.worker("first"), await found.worker("second")
        found.source.say(first.address)
        await found.until_seen(first=1)
        found.source.say(first.address, second.address)
        await found.until_seen(first=1, second=1)
        assert first.num_asked == 1


async def test_a_worker_that_is_not_named_any_more_stays_while_it_lives() -> None:
    """An emptied or lying source takes nobody away. When the stream dies nobody looks there again, until it is named again."""
    async with finding() as found:
        first, second = await found.worker("first"), await found.worker("second")
        found.source.say(first.address, second.address)
        await found.until_seen(first=1, second=1)
        found.source.say()
        await found.source.heard()
        first.report(num_running=3)
        await found.until(lambda: True)
        assert found.seen() == {"first": 1, "second": 1}
        with capture_logs() as logs:
            await first.restart()
            await found.until_dropped(first.address)
        assert "address_dropped" in [entry["event"] for entry in logs]
        assert (found.seen(), found.registry.num_watched(PREFILL)) == ({"second": 1}, 1)
        found.source.say(first.address)
        await found.until_seen(first=2, second=1)


async def test_a_call_outlives_the_view_of_its_worker() -> None:
    """What is under way at a worker that is lost from sight goes on; the connection is closed a quarter of an hour later."""
    async with finding() as found:
        worker, may_end = await found.worker("worker"), asyncio.Event()

        async def patient(
            worker: ScriptedWorker, spec: SequenceSpec
        ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
            """Answers the end when it is told to."""
            yield started(worker, spec)
            await may_end.wait()
            yield result(spec)

        worker.prefill_scripts.append(patient)
        found.source.say(worker.address)
        await found.until_seen(worker=1)
        context, sequence = spec_to_proto(make_spec())
        stub = PrefillServiceStub(found.registry.channels.get(worker.address))
        call = aiter(stub.Prefill(prefill_pb2.PrefillRequest(context=context, sequence=sequence)))
        await anext(call)
        found.source.say()
        await found.source.heard()
        worker.break_load_streams()
        await found.until_dropped(worker.address)
        clock = found.registry.clock = ManualClock(monotonic())
        clock.advance(890)
        found.source.say()
        await found.source.heard()
        may_end.set()
        assert (await anext(call)).HasField("result")
        clock.advance(20)
        assert worker.address in found.registry.channels._channels
        found.source.say()
        await found.source.heard()
        assert found.registry.channels._channels == {}


async def test_what_a_silent_source_said_last_counts() -> None:
    """While nobody says where workers are, nobody is forgotten: one that dies and comes back is found where it was."""
    async with finding() as found:
        worker = await found.worker("worker")
        found.source.say(worker.address)
        await found.until_seen(worker=1)
        with capture_logs() as logs:
            for _ in range(3):
                found.source.fall_silent()
            await found.source.heard()
            assert found.discovery.num_silent == 1
            await worker.restart()
            await found.until_seen(worker=2)
            found.source.say(worker.address)
            await found.source.heard()
        assert found.discovery.num_silent == 0
        said = [entry["event"] for entry in logs if entry["event"].startswith("source")]
        assert said == ["source_lost", "source_found"]


async def test_who_has_two_addresses_is_followed_once() -> None:
    """A name in DNS has an address of each family; the second one takes over when the first is not named any more and breaks."""
    async with finding() as found:
        worker = await found.worker("worker")
        alias = worker.address.replace("127.0.0.1", "localhost")
        found.source.say(worker.address)
        await found.until_seen(worker=1)
        found.source.say(worker.address, alias)
        await found.until(lambda: found.registry.state(alias, PREFILL) == "there")
        assert len(worker._watches) == 1
        found.source.say(alias)
        await found.source.heard()
        await worker.restart()
        await found.until_seen(worker=2)
        await found.until_dropped(worker.address)
        assert [view.address for view in found.registry.views(PREFILL)] == [alias]


async def test_a_name_leads_to_its_worker() -> None:
    """The machine's own resolver says where localhost is; the worker that listens on one of its addresses is found."""
    registry, worker = WorkerRegistry(Channels(), 10), ScriptedWorker("worker", PREFILL)
    await worker.start()
    port = int(worker.address.rpartition(":")[2])
    discovery = Discovery(registry, {PREFILL: [DnsSource("localhost", port, 0.01)]})
    discovery.start()
    async with asyncio.timeout(20):
        while not (registry.views(PREFILL) and discovery.is_complete):
            await registry.changed.wait()
    assert len(worker._watches) == 1
    await discovery.aclose()
    await registry.channels.aclose()
    await worker.stop()


@asynccontextmanager
async def not_a_worker() -> AsyncIterator[str]:
    """The address of a gRPC server that knows nothing of us."""
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


async def test_who_is_none_of_ours_is_refused_once_and_disturbs_nobody() -> None:
    """A port that is closed, a server of another kind, a worker of another model or of another tier: one line each, however often they are asked."""
    with closing(socket.socket()) as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{closed.getsockname()[1]}"
        async with finding() as found, not_a_worker() as server:
            worker = await found.worker("worker")
            found.source.say(worker.address)
            await found.until_seen(worker=1)
            other, decoder = await found.worker("other"), await found.worker("decoder")
            other.info.fingerprint.CopyFrom(fingerprint_to_proto(make_fingerprint(weights="x")))
            decoder.info.role = DECODE
            named = (nowhere, server, other.address, decoder.address)
            with capture_logs() as logs:
                found.source.say(worker.address, *named)
                await other.until(lambda: other.num_asked >= 4)
                await decoder.until(lambda: decoder.num_asked >= 4)
            refused = sorted(entry["address"] for entry in logs if entry["event"] == "worker_unreachable")
            assert refused == sorted(named)
            assert found.seen() == {"worker": 1}
            assert worker.num_asked == 1
            (why,) = (entry["error"] for entry in logs if entry.get("address") == other.address)
            assert "weights" in why


@pytest.mark.parametrize("broken", ["worker_id", "block_size"])
async def test_a_worker_that_cannot_be_is_not_taken(broken: str) -> None:
    """What placement would divide by, or name a point on the ring after, is there."""
    async with finding() as found:
        worker, other = await found.worker("worker"), await found.worker("other")
        if broken == "worker_id":
            other.info.worker_id = ""
        else:
            other.info.fingerprint.block_size = 0
        found.source.say(worker.address, other.address)
        await found.until(lambda: found.registry.state(other.address, PREFILL) == "away")
        await found.until_seen(worker=1)


async def test_a_source_that_names_very_many_is_followed_to_a_bound() -> None:
    """Those that were named before stay among them."""
    async with finding() as found:
        worker = await found.worker("worker")
        found.source.say(worker.address)
        await found.until_seen(worker=1)
        many = [f"127.0.0.1:{port}" for port in range(1, 3 * MAX_ADDRESSES) if port != 22]
        with capture_logs() as logs:
            found.source.say(worker.address, *many)
            await found.source.heard()
            found.source.say(worker.address, *many)
            await found.source.heard()
        assert found.registry.num_watched(PREFILL) <= MAX_ADDRESSES
        assert [entry["event"] for entry in logs].count("too_many_addresses") == 1
        assert found.seen() == {"worker": 1}


async def test_what_is_written_down_is_waited_for_and_what_is_said_is_looked_at() -> None:
    """All is found once every source has spoken, whoever is in the settings is there, and all others have been asked."""
    source, registry = ScriptedSource(), WorkerRegistry(Channels(), 10)
    written, said = ScriptedWorker("written", PREFILL), ScriptedWorker("said", PREFILL)
    for worker in (written, said):
        await worker.start()
    await written.stop()
    sources: list[WorkerSource] = [StaticSource(frozenset({written.address})), source]
    discovery = Discovery(registry, {PREFILL: sources})
    discovery.start()
    progress = [discovery.is_complete]
    source.say(said.address, "127.0.0.1:1")
    async with asyncio.timeout(20):
        while registry.state("127.0.0.1:1", PREFILL) != "away" or not registry.views(PREFILL):
            await registry.changed.wait()
        progress.append(discovery.is_complete)
        await written.start()
        while not discovery.is_complete:
            await registry.changed.wait()
    assert progress == [False, False]
    assert registry.state(written.address, PREFILL) == "there"
    await discovery.aclose()
    await registry.channels.aclose()
    for worker in (written, said):
        await worker.stop()
