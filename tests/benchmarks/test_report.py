"""Reports: percentiles, goodput, shares; and what is printed of them."""

import json
import math
from dataclasses import replace

import pytest

from benchmarks.simulator.cluster import simulate
from benchmarks.simulator.cost import TEXTBOOK, StepWork
from benchmarks.simulator.records import RequestRecord, Result, StepRecord, WorkerRecord
from benchmarks.simulator.report import as_json, report, table
from benchmarks.simulator.slo import Slo, percentile
from benchmarks.simulator.spec import ClusterSpec, scheduler_config
from benchmarks.simulator.trace import Trace, TraceRequest
from paceline.core.errors import ConfigError

SLO = Slo(ttft_s=1.0, itl_s=0.1)


def make_record(number: int = 0, *times: float, num_preemptions: int = 0) -> RequestRecord:
    """A request that arrived at 0 s, with these tokens."""
    return RequestRecord(number, TraceRequest(0.0, 10, len(times)), "local", times, 5, num_preemptions)


def make_result(*requests: RequestRecord) -> Result:
    """Requests on one worker, whose two seats were half used for 3 s and unused for 1 s."""
    work = StepWork(1, 10, 0, 0, 0)
    steps = (StepRecord("decode-0", 0.0, 1.0, work, 1), StepRecord("decode-0", 1.0, 3.0, work, 5))
    return Result(requests, steps, (WorkerRecord("decode-0", 2, 100, 2, 3, 0),))


def test_percentiles_are_values_that_were_there() -> None:
    """The smallest one that so large a share does not exceed; of nothing, none."""
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values[::-1], share) for share in (0.0, 0.5, 0.95, 0.99, 1.0)] == [1, 50, 95, 99, 100]
    assert percentile([7.0], 0.5) == 7.0
    assert math.isnan(percentile([], 0.5))


def test_a_promise_is_kept_by_both_of_its_parts() -> None:
    """A late first token breaks it, slow ones do, and so does a request without an end."""
    assert SLO.is_met_by(make_record(0, 1.0, 1.1, 1.2))
    assert not SLO.is_met_by(make_record(0, 1.01, 1.1, 1.2))
    assert not SLO.is_met_by(make_record(0, 0.5, 0.7))
    assert not SLO.is_met_by(replace(make_record(0, 0.5), mode="refused", token_times_s=()))


@pytest.mark.parametrize(
    "text", ["", "ttft=1s", "ttft=1s,itl=fast", "ttft=1s,itl=0ms", "ttft=1s,itl=1ms,x=1s", "ttft=1,itl=1ms"]
)
def test_a_promise_that_says_nothing_is_refused(text: str) -> None:
    """Both bounds are named, with their units."""
    with pytest.raises(ConfigError):
        Slo.parse(text)


def test_a_promise_is_read_as_it_is_shown() -> None:
    """Milliseconds and seconds."""
    assert Slo.parse("ttft=800ms,itl=0.1s") == Slo(0.8, 0.1)
    assert Slo.parse(str(SLO)) == SLO


def test_a_result_is_added_up() -> None:
    """Latencies are of finished requests, shares of all; time counts in what the seats were used for."""
    late = make_record(1, 2.0, 2.05, num_preemptions=1)
    refused = replace(make_record(2, 9.0), mode="refused", token_times_s=())
    numbers = report(make_result(make_record(0, 0.5, 0.55, 0.6), late, refused), SLO)
    assert (numbers.num_requests, numbers.num_finished, numbers.num_refused) == (3, 2, 1)
    assert (numbers.ttft_s.p50, numbers.ttft_s.p95) == (0.5, 2.0)
    assert numbers.itl_s.p99 == pytest.approx(0.05)
    assert numbers.duration_s == 2.05
    assert numbers.goodput == pytest.approx(1 / 2.05)
    assert numbers.slo_share == pytest.approx(1 / 3)
    assert numbers.output_tokens_per_s == pytest.approx(5 / 2.05)
    assert numbers.preempted_request_share == pytest.approx(1 / 3)
    assert numbers.cache_hit_share == 0.5
    assert numbers.slot_use == pytest.approx((1 + 2) / (1 + 2 * 2))
    assert numbers.mode_shares == pytest.approx({"local": 2 / 3, "refused": 1 / 3})
    assert not numbers.meets(SLO)


def test_what_is_computed_twice_is_counted() -> None:
    """Without preemptions nothing is; where there are some, something is."""
    trace = Trace("t", tuple(TraceRequest(0.0, 40, 60) for _ in range(6)))
    roomy = report(simulate(trace, ClusterSpec(), TEXTBOOK))
    assert (roomy.num_preemptions, roomy.recomputed_share) == (0, 0.0)
    config = scheduler_config(max_num_seqs=6)
    tight = report(simulate(trace, ClusterSpec(decode=config, num_kv_tokens=416), TEXTBOOK))
    assert (tight.num_preemptions > 0) == (tight.recomputed_share > 0)


def test_a_report_is_printed_and_written() -> None:
    """The table has the promise in it, and what is no number becomes null for programs."""
    numbers = report(make_result(make_record(0, 0.5)), SLO)
    shown = table(numbers, SLO)
    assert "TTFT" in shown and str(SLO) in shown and "500.0 ms" in shown
    assert "goodput" not in table(report(make_result(make_record(0, 0.5))), None)
    written = json.loads(json.dumps(as_json(numbers)))
    assert written["itl_s"] == {"p50": None, "p95": None, "p99": None}
    assert written["ttft_s"]["p50"] == 0.5
