"""Simulated clusters: every request ends, the same one always the same way, and time is what the cost model says."""

import itertools
from dataclasses import replace

import pytest

from benchmarks.simulator.cluster import simulate
from benchmarks.simulator.cost import TEXTBOOK, CostModel
from benchmarks.simulator.records import Result
from benchmarks.simulator.spec import ClusterSpec, scheduler_config
from benchmarks.simulator.trace import PrefixPart, Trace, TraceRequest
from benchmarks.simulator.traffic import made_up
from paceline.core.errors import ConfigError
from paceline.launcher.config import Topology

CHAT = made_up("chat:requests=60,rate=20,prompt=40,output=12,system=32,seed=3")
COST = replace(
    TEXTBOOK,
    transfer_latency_s=0.001,
    transfer_bytes_per_s=1e6,
    kv_bytes_per_token=100,
    request_overhead_s=0.002,
)


def run(topology: str, trace: Trace = CHAT, cost: CostModel = COST, **changes: object) -> Result:
    """One run, with the decision log."""
    spec = ClusterSpec(Topology.parse(topology), **changes)  # type: ignore[arg-type] # each is its field's
    return simulate(trace, spec, cost, log_decisions=True)


@pytest.mark.parametrize("topology", ["0P1D", "0P2D", "1P1D", "2P3D"])
@pytest.mark.parametrize("num_kv_tokens", [46_592, 640])
def test_every_request_gets_every_token(topology: str, num_kv_tokens: int) -> None:
    """Also where the cache is so small that many wait for room; and time only goes forward."""
    trace = made_up("poisson:requests=60,rate=40,prompt=60,output=30,seed=3")
    result = run(topology, trace, num_kv_tokens=num_kv_tokens)
    assert len(result.requests) == len(result.finished) == 60
    for record in result.requests:
        times = (record.request.arrival_s, *record.token_times_s)
        assert list(times) == sorted(times)
    for worker in result.workers:
        ends = [(step.start_s, step.end_s) for step in result.steps if step.worker == worker.worker]
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))
        assert all(start_s < end_s for start_s, end_s in ends)
    is_full = any(step.num_present > step.work.num_sequences for step in result.steps)
    assert is_full or num_kv_tokens > 640


def test_the_same_run_twice_is_the_same() -> None:
    """The same trace and settings give the same decisions, times and counts; another seed gives others."""
    assert run("1P2D") == run("1P2D")
    other = made_up(CHAT.name.replace("seed=3", "seed=4"))
    assert run("1P2D").decisions != run("1P2D", other).decisions


def test_a_request_alone_takes_what_its_steps_take() -> None:
    """Queue, prefill and decode steps of a single request add up to the last microsecond."""
    trace = Trace("one", (TraceRequest(1.0, 100, 3),))
    (record,) = run("0P1D", trace, replace(COST, token_overhead_s=0.01)).requests
    first_s = 1.0 + 0.002 + (0.005 + 100 * 0.0002) + 0.01
    assert record.token_times_s == pytest.approx([first_s, first_s + 0.0053, first_s + 0.0106])
    assert record.ttft_s == pytest.approx(first_s - 1.0)
    assert record.mode == "local"


def test_a_hand_over_takes_its_round_trips_and_its_bytes() -> None:
    """The second token comes after both round trips and the blocks that the decode worker did not hold."""
    trace = Trace("one", (TraceRequest(0.0, 100, 2),))
    (record,) = run("1P1D", trace, disaggregate="always").requests
    # Seven blocks of 16 tokens of 100 bytes at 1 MB/s; reserving happens as soon as the one chunk is computed.
    wire_s = 2 * 0.001 + 7 * 16 * 100 / 1e6
    assert record.mode == "disaggregated"
    assert record.itls_s == pytest.approx([wire_s + 0.0053])


def test_blocks_travel_while_later_chunks_are_computed() -> None:
    """Of a prompt in several chunks only the last blocks are still to come when its first token is there."""
    trace = Trace("one", (TraceRequest(0.0, 96, 2),))
    prefill = scheduler_config(max_num_batched_tokens=32)
    (record,) = run("1P1D", trace, disaggregate="always", prefill=prefill).requests
    assert record.itls_s == pytest.approx([2 * 16 * 100 / 1e6 + 0.001 + 0.0053])


def test_what_was_computed_before_is_not_sent_again() -> None:
    """A second request with the same prefix hits the caches of both tiers, and its hand-over is shorter."""
    shared = (PrefixPart("system", 80),)
    trace = Trace("two", (TraceRequest(0.0, 100, 2, shared), TraceRequest(1.0, 100, 2, shared)))
    first, second = run("1P1D", trace, disaggregate="always").requests
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 80)
    assert first.itls_s[0] - second.itls_s[0] == pytest.approx(5 * 16 * 100 / 1e6)


def test_placement_is_the_routers() -> None:
    """`auto` keeps a short prompt on the decode worker, and what would have to wait; `never` keeps all; load is spread."""
    trace = Trace("two", (TraceRequest(0.0, 10, 4), TraceRequest(0.0, 100, 4), TraceRequest(0.0, 100, 4)))
    assert [record.mode for record in run("1P1D", trace).requests] == [
        "local",
        "disaggregated",
        "local",
    ]
    never = run("1P2D", trace, disaggregate="never").requests
    assert [record.mode for record in never] == ["local"] * 3
    assert {record.decode_worker for record in never} == {"decode-0", "decode-1"}


def test_the_door_is_the_routers() -> None:
    """More requests under way than `max_requests` are refused, and so is one that no worker has room for."""
    burst = Trace("burst", tuple(TraceRequest(0.0, 20, 5) for _ in range(4)))
    modes = [(record.mode, record.reason) for record in run("0P1D", burst, max_requests=3).requests]
    assert modes == [("local", "")] * 3 + [("refused", "QUEUE_FULL")]
    (large,) = run("0P1D", Trace("large", (TraceRequest(0.0, 1000, 25),)), num_kv_tokens=1024).requests
    assert (large.mode, large.reason) == ("refused", "PROMPT_TOO_LONG")


def test_a_prompt_whose_first_token_is_its_last_is_not_handed_over() -> None:
    """Nothing is committed, and both workers are left empty for those that follow."""
    trace = Trace("short", tuple(TraceRequest(0.1 * index, 600, 1) for index in range(20)))
    result = run("1P1D", trace, num_kv_tokens=1024, disaggregate="always")
    assert len(result.finished) == 20
    assert {step.worker for step in result.steps} == {"prefill-0"}


def test_nothing_is_computed_for_a_client_that_waits_no_longer() -> None:
    """A request whose time is over fails where it is, and those behind it get their tokens."""
    impatient = [TraceRequest(0.01 * index, 400, 8, time_budget_s=0.3) for index in range(12)]
    patient = TraceRequest(0.2, 400, 8)
    for topology in ("0P1D", "1P1D"):
        result = run(topology, Trace("t", (*impatient, patient)), num_kv_tokens=1024)
        late = [record for record in result.requests if record.mode == "failed"]
        assert late and {record.reason for record in late} == {"DEADLINE_EXCEEDED"}
        assert result.requests[-1].is_finished
        assert len(late) + len(result.finished) == 13


def test_a_hand_over_does_not_give_a_client_more_time() -> None:
    """The decode worker has what is left of it: the request fails a step after its time is over, wherever it is by then."""
    trace = Trace("one", (TraceRequest(0.0, 100, 400, time_budget_s=0.5),))
    (record,) = run("1P1D", trace, disaggregate="always").requests
    assert (record.mode, record.reason) == ("failed", "DEADLINE_EXCEEDED")
    assert 0.4 < record.token_times_s[-1] < 0.5 + 0.01


def test_impossible_clusters_are_refused() -> None:
    """A setting that the scheduler does not have, a tier that is not there, a cache without room."""
    with pytest.raises(ConfigError, match="no setting 'gears'"):
        scheduler_config(gears=3)
    with pytest.raises(ConfigError, match="always needs a prefill worker"):
        ClusterSpec(Topology.parse("0P1D"), disaggregate="always")
    with pytest.raises(ConfigError, match="too few"):
        ClusterSpec(num_kv_tokens=16)
