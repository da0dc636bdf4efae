"""The workers that a router sees."""

import asyncio

import pytest
from structlog.testing import capture_logs

from paceline.core.clock import ManualClock, monotonic
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.prefix import WorkerKey
from paceline.core.request import BootEpoch, WorkerId
from paceline.runtime.wire_internal import fingerprint_to_proto
from paceline.runtime.wire_limits import max_sequence_tokens
from router.views import WorkerView
from tests.factories import BLOCK_SIZE, FINGERPRINT, make_fingerprint, make_spec
from tests.router.cluster import DECODE, PREFILL, ScriptedCluster, scripted_cluster
from tests.router.scripted_workers import ScriptedWorker, decode_that
from tests.worker.bench import until


def _view(cluster: ScriptedCluster, name: str) -> WorkerView:
    views = cluster.registry.views(PREFILL) + cluster.registry.views(DECODE)
    (view,) = (view for view in views if view.key.worker_id == name)
    return view


async def _until_view(cluster: ScriptedCluster, name: str, **facts: object) -> None:
    """Lets the loop run until a worker is seen with these facts."""
    for _ in range(100_000):
        view = _view(cluster, name)
        if all(getattr(view, fact) == value for fact, value in facts.items()):
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{_view(cluster, name)} is not {facts}")


async def test_workers_are_known_by_their_own_words() -> None:
    """Name, life, tier and load come from the worker, the address from the settings."""
    async with scripted_cluster(2, 1) as cluster:
        names = {view.key.worker_id for view in cluster.registry.views(PREFILL)}
        assert names == {"prefill-0", "prefill-1"}
        view = _view(cluster, "decode-0")
        assert (view.key.boot_epoch, view.address) == (1, cluster.decode[0].address)
        assert (view.num_blocks, view.num_free_blocks, view.draining) == (100, 100, False)
        assert {info.worker_id for info in cluster.registry.infos()} == {"prefill-0", "prefill-1", "decode-0"}


async def test_load_reports_are_taken_over() -> None:
    """The last report counts, draining and cooling down included."""
    async with scripted_cluster() as cluster:
        cluster.prefill[0].report(num_free_blocks=3, num_running=2, num_waiting=1, num_pending_tokens=9)
        await _until_view(
            cluster, "prefill-0", num_free_blocks=3, num_running=2, num_waiting=1, num_queued_tokens=9
        )
        cluster.prefill[0].report(draining=True)
        await _until_view(cluster, "prefill-0", draining=True, num_running=0, cooling_down=False)
        cluster.prefill[0].report(cooling_down=True)
        await _until_view(cluster, "prefill-0", draining=False, cooling_down=True)


async def test_a_load_that_is_not_reported_any_more_is_not_known() -> None:
    """After three seconds without a report nobody knows what a worker has to do; its next report says it again."""
    async with scripted_cluster() as cluster:
        clock = cluster.registry.clock = ManualClock(monotonic())
        cluster.prefill[0].report(num_running=1)
        await _until_view(cluster, "prefill-0", num_running=1, is_load_known=True)
        clock.advance(2.9)
        assert _view(cluster, "prefill-0").is_load_known
        clock.advance(0.2)
        assert not _view(cluster, "prefill-0").is_load_known
        cluster.prefill[0].report(num_running=2)
        await _until_view(cluster, "prefill-0", num_running=2, is_load_known=True)


async def test_a_worker_that_dies_is_gone_and_comes_back_as_another() -> None:
    """Its next life has another key; what was known of the old one is forgotten."""
    async with scripted_cluster(1, 2) as cluster:
        old = _view(cluster, "decode-0").key
        await cluster.decode[0].stop()
        await cluster.until_seen(*cluster.prefill, cluster.decode[1])
        assert cluster.registry.link(old) is None
        await cluster.decode[0].restart()
        await cluster.until_seen(*cluster.workers)
        assert _view(cluster, "decode-0").key == WorkerKey(old.worker_id, BootEpoch(2))
        assert cluster.registry.link(old) is None
        assert cluster.registry.link(_view(cluster, "decode-0").key) is not None


async def test_a_decode_worker_whose_stream_broke_is_found_again() -> None:
    """The worker itself is well, and so is its load stream: it is followed anew, in the same life."""
    async with scripted_cluster() as cluster:
        key = _view(cluster, "decode-0").key
        first = cluster.registry.link(key)
        assert first is not None
        cluster.decode[0].break_decode_streams()
        await cluster.until_seen(*cluster.prefill)
        await cluster.until_seen(*cluster.workers)
        again = cluster.registry.link(key)
        assert again is not None
        assert again is not first
        assert not first.is_open


async def test_a_decode_worker_is_not_offered_once_its_stream_has_broken() -> None:
    """In the same moment in which its sequences fail, it is no longer a place for their next attempt."""
    async with scripted_cluster() as cluster:
        cluster.decode[0].decode_scripts.append(decode_that())
        link = cluster.registry.link(_view(cluster, "decode-0").key)
        assert link is not None
        handle = link.submit(make_spec(), None)
        await cluster.decode[0].until(lambda: cluster.decode[0].submits != [])
        cluster.decode[0].break_decode_streams()
        with pytest.raises(Exception, match="decode-0"):
            await anext(handle)
        assert cluster.registry.views(DECODE) == []
        assert cluster.registry.link(WorkerKey(WorkerId("decode-0"), BootEpoch(1))) is None


async def test_a_bug_does_not_end_the_search_for_a_worker() -> None:
    """Where no channel can be made, for one: it is told once, and the address is asked again like any other."""
    nowhere = "unix:\ud800"
    async with scripted_cluster() as cluster:
        with capture_logs() as logs:
            cluster.watch(nowhere, DECODE)
            async with asyncio.timeout(10):
                while cluster.registry.state(nowhere, DECODE) != "away":
                    await cluster.registry.changed.wait()
        assert [entry["event"] for entry in logs] == ["worker_unreachable", "task_failed"]


async def test_a_worker_of_another_tier_is_not_taken() -> None:
    """An address of a decode worker among the prefill workers is a mistake; one of the right tier is taken."""
    async with scripted_cluster() as cluster:
        stranger = ScriptedWorker("stranger", DECODE)
        await _never_seen(cluster, stranger)
        stranger.info.role = PREFILL
        await cluster.until_seen(*cluster.workers, stranger)
        await stranger.stop()


@pytest.mark.parametrize("changed", [make_fingerprint(weights="x"), make_fingerprint(kv_dtype="int8")])
async def test_a_worker_that_serves_something_else_is_not_taken(changed: ModelFingerprint) -> None:
    """One content for all; the same worker is taken once it serves that, also in blocks of another size."""
    async with scripted_cluster() as cluster:
        stranger = ScriptedWorker("stranger", PREFILL)
        stranger.info.fingerprint.CopyFrom(fingerprint_to_proto(changed))
        await _never_seen(cluster, stranger)
        stranger.info.fingerprint.CopyFrom(fingerprint_to_proto(make_fingerprint(block_size=8)))
        await cluster.until_seen(*cluster.workers, stranger)
        await stranger.stop()


async def _never_seen(cluster: ScriptedCluster, worker: ScriptedWorker) -> None:
    """Starts a worker that is asked for its facts twice, and not seen."""
    await worker.start()
    cluster.watch(worker.address, PREFILL)
    await worker.until(lambda: worker.num_asked >= 2)
    assert cluster.seen() == {(w.info.worker_id, w.info.boot_epoch) for w in cluster.workers}


async def test_a_worker_that_falls_silent_is_lost_and_asked_no_more() -> None:
    """Though its connection seems to be well: its next word is another beginning, and the stream on which nothing came is closed."""
    async with scripted_cluster(1, 1) as cluster:
        worker = cluster.prefill[0]
        cluster.registry.silence_s = 0.2
        # From the next report on it counts.
        worker.report(num_steps=1)
        await cluster.until_seen(*cluster.decode)
        await worker.until(lambda: worker.num_asked > 1)
        await until(lambda: worker.num_watches <= 1)


async def test_no_sequence_is_longer_than_a_message() -> None:
    """However long workers say that a request may be: what they are sent has to pass."""
    async with scripted_cluster(1, 1) as cluster:
        cluster.decode[0].info.max_model_tokens = cluster.prefill[0].info.max_model_tokens = 10_000_000
        for worker in cluster.workers:
            await worker.restart()
        await cluster.until_seen(*cluster.workers)
        served = cluster.registry.served
        assert served is not None
        assert served.max_model_tokens == max_sequence_tokens(served.vocab_size, BLOCK_SIZE) < 10_000_000


async def test_what_is_served_is_bounded_by_the_smallest() -> None:
    """The longest request fits every worker; with nobody there nothing is served."""
    cluster = ScriptedCluster(1, 1)
    cluster.decode[0].info.max_model_tokens = 500
    await cluster.start()
    served = cluster.registry.served
    assert served is not None
    assert (served.model_id, served.max_model_tokens, served.fingerprint) == ("scripted", 500, FINGERPRINT)
    for worker in cluster.workers:
        await worker.stop()
    await cluster.until_seen()
    assert cluster.registry.served is None
    await cluster.stop()
