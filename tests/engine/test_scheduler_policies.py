"""What the scheduler's policies promise, on a virtual clock: waste, order, fairness, and what happens under too much load."""

import itertools
import random
from collections import defaultdict

import pytest

from paceline.core.errors import DeadlineError, QueueFullError
from paceline.core.request import Priority, SequenceSpec
from paceline.engine.overload import BatchMode
from paceline.engine.scheduler_stats import SchedulerStats
from paceline.engine.sequence import SequenceRole
from tests.engine.harness import Bench
from tests.engine.timed import Timed, memory_bound_s, percentile
from tests.factories import make_id, make_spec

Arrivals = list[tuple[float, SequenceSpec]]
NO_LANE = 0.0


def _spec(name: str, num_prompt: int, num_output: int, **options: object) -> SequenceSpec:
    """A prompt that shares no block with another one's."""
    own = int.from_bytes(name.encode().rjust(4, b"\0")[-4:], "little") % 2**31
    return make_spec(name, (own, *range(num_prompt - 1)), max_tokens=num_output, ignore_eos=True, **options)  # type: ignore[arg-type] # each has its field's type


def _poisson(
    rate: float,
    num_requests: int,
    name: str = "r",
    prompt: tuple[int, int] = (50, 300),
    output: tuple[int, int] = (20, 400),
    **options: object,
) -> Arrivals:
    """So many requests a second, of lengths drawn evenly."""
    rng, now_s, arrivals = random.Random(1), 0.0, []
    for number in range(num_requests):
        now_s += rng.expovariate(rate)
        arrivals.append(
            (now_s, _spec(f"{name}{number}", rng.randint(*prompt), rng.randint(*output), **options))
        )
    return arrivals


def _ttft_s(timed: Timed, name: str = "") -> list[float]:
    lives = timed.lives.items()
    return [life.ttft_s for each, life in lives if each.request_id.startswith(name) and life.error is None]


def _num_decoding(timed: Timed) -> list[int]:
    return [len(output.scheduled) for output in timed.outputs]


# -- batching


def test_a_static_batch_wastes_the_slots_of_those_that_end_early() -> None:
    """Outputs of 20, 50, 200 and 800 tokens in one batch use a third of its slots; nobody comes in before all are done."""
    timed = Timed(batching="static", max_num_seqs=4, fast_lane_share=NO_LANE)
    outputs = (20, 50, 200, 800)
    timed.serve([(0.0, _spec(f"r{n}", 10, num)) for n, num in enumerate((*outputs, 5))])
    timed.require_all_ended()
    used = _num_decoding(timed)[:800]
    assert sum(used) / (4 * len(used)) == pytest.approx(1070 / 3200)
    assert sum(outputs) / (4 * max(outputs)) == pytest.approx(0.33, abs=0.005)
    assert [item.sequence_id.request_id for item in timed.outputs[800].scheduled] == ["r4"]


def test_continuous_batching_fills_the_slots_again() -> None:
    """The same requests one after the other in a continuous batch of four: a free slot is used in the next step."""
    timed = Timed(max_num_seqs=4, fast_lane_share=NO_LANE)
    timed.serve([(0.0, _spec(f"r{n}", 10, num)) for n, num in enumerate((20, 50, 200, 800) * 3)])
    used = _num_decoding(timed)
    # Up to when nobody waits any more every slot is in use.
    full = used[: used.index(3)]
    assert len(full) > 400
    assert set(full) == {4}


@pytest.mark.parametrize("num_prompt", [600, 4096, 30_000])
def test_a_running_decode_waits_no_longer_than_a_step_of_the_budget(num_prompt: int) -> None:
    """Whatever prompt arrives, the time between two tokens is bounded by max_num_batched_tokens."""
    timed = Timed(max_num_batched_tokens=256)
    steady = [(0.0, _spec(f"steady{n}", 20, 400)) for n in range(8)]
    timed.serve([*steady, (0.3, _spec("long", num_prompt, 5))])
    timed.require_all_ended()
    bound_s = 5e-3 + 8 * 0.3e-3 + (256 - 8) * 0.2e-3
    waits_s = [wait for n, life in timed.lives.items() for wait in life.itl_s if n.request_id != "long"]
    assert max(waits_s) <= bound_s + 1e-9
    assert max(waits_s) > 0.9 * bound_s


def test_the_budget_is_the_only_size_of_a_batch() -> None:
    """As many sequences run as tokens and seats allow: two hundred decodes in a step, if there are so many."""
    timed = Timed(max_num_seqs=300, max_num_batched_tokens=300, num_blocks=2000)
    timed.serve([(0.0, _spec(f"r{n}", 10, 40)) for n in range(200)])
    assert max(_num_decoding(timed)) == 200


def test_more_decodes_than_the_budget_take_turns() -> None:
    """Nobody waits for the end of another one's output: all advance evenly."""
    timed = Timed(max_num_batched_tokens=4, max_num_seqs=8)
    timed.serve([(0.0, _spec(f"r{n}", 1, 40)) for n in range(8)])
    timed.require_all_ended()
    gaps = [gap for life in timed.lives.values() for gap in life.itl_s[8:-8]]
    assert max(gaps) <= 3 * min(gaps)


# -- memory


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["cost", "lifo", "most-blocks"])
def test_overload_costs_little_recomputation_and_loses_nobody(victim: str) -> None:
    """At 1.2 times the load that fits, without a cushion: under a tenth of all tokens are computed twice, all finish."""
    timed = Timed(600, victim=victim, watermark=0.0, watermark_rise=0.0)
    timed.serve(_poisson(8.6, 300))
    timed.require_all_ended()
    stats = timed.scheduler.stats()
    assert stats.preemptions["recompute"] > 10
    assert 0 < stats.num_recomputed_tokens < 0.1 * timed.num_computed
    assert [len(life.token_s) for life in timed.lives.values()] == [
        spec.max_tokens for _, spec in _poisson(8.6, 300)
    ]


def test_the_cushion_leaves_few_to_preempt() -> None:
    """With the default watermark under 5 % of the requests are ever preempted, at any load; without one many more are."""
    shares = {}
    for name, settings in (("default", {}), ("none", {"watermark": 0.0, "watermark_rise": 0.0})):
        timed = Timed(600, **settings)  # type: ignore[arg-type] # each has its field's type
        timed.serve(_poisson(12, 300))
        shares[name] = sum(life.num_preemptions > 0 for life in timed.lives.values()) / 300
    assert shares["default"] < 0.05 < shares["none"]


def test_admission_counts_growth_and_not_more() -> None:
    """Room that nobody can ever ask for is not kept free: prompts with one output token fill the pool."""
    timed = Timed(100, max_num_batched_tokens=1600, fast_lane_share=NO_LANE)
    timed.serve([(0.0, _spec(f"r{n}", 159, 1)) for n in range(10)])
    assert len(timed.outputs[0].scheduled) == 10
    growing = Timed(100, max_num_batched_tokens=1600, fast_lane_share=NO_LANE)
    growing.serve([(0.0, _spec(f"r{n}", 159, 400)) for n in range(10)])
    assert len(growing.outputs[0].scheduled) == 8


@pytest.mark.thorough
def test_throughput_does_not_collapse_past_saturation() -> None:
    """At twice the load that saturates it, and at four times, at least 95 % of the best throughput is left."""
    throughput = {}
    for rate in (4.0, 8.0, 16.0, 32.0):
        timed = Timed(600)
        timed.serve(_poisson(rate, 300))
        timed.require_all_ended()
        throughput[rate] = timed.num_output_tokens / timed.clock()
    assert min(throughput[16.0], throughput[32.0]) >= 0.95 * max(throughput.values())


def test_preempting_steps_in_a_row_end_in_a_pause() -> None:
    """It admits nobody, says so, runs fewer at once, and comes back by itself."""
    timed = Timed(
        60,
        max_num_seqs=32,
        watermark=0.0,
        watermark_rise=0.0,
        cool_down_after=2,
        cool_down_steps=20,
    )
    seen: list[SchedulerStats] = []

    def watch() -> None:
        """Nobody comes in during a pause, unless nobody is there."""
        stats = timed.scheduler.stats()
        if seen and seen[-1].is_cooling and stats.is_cooling and seen[-1].num_running:
            assert stats.num_waiting >= seen[-1].num_waiting
        seen.append(stats)

    timed.serve(_poisson(1000, 60, prompt=(10, 20), output=(60, 60)), watch=watch)
    timed.require_all_ended()
    assert any(stats.is_cooling for stats in seen)
    assert min(stats.max_seats for stats in seen) < 32
    assert not seen[-1].is_cooling
    timed.serve(_poisson(0.5, 60, name="later"))
    assert timed.scheduler.stats().max_seats == 32


# -- the head of the line


@pytest.mark.parametrize("max_overtakes", [0, 1])
def test_nobody_may_pass_where_that_is_asked_for(max_overtakes: int) -> None:
    """Zero is zero, and one is one."""
    timed = Timed(100, fast_lane_share=NO_LANE, max_overtakes=max_overtakes)
    _waits_for_room(timed, 5)
    starts = {str(each.request_id): life.token_s[0] for each, life in timed.lives.items()}
    passed = [name for name, start_s in starts.items() if "small" in name and start_s < starts["large"]]
    assert len(passed) == max_overtakes


def _waits_for_room(timed: Timed, num_small: int) -> None:
    """Something holds half of the pool, a large prompt does not fit, and small ones come behind it."""
    timed.serve(
        [
            (0.0, _spec("holder", 800, 200)),
            (0.2, _spec("large", 900, 4)),
            *[(0.3 + n / 1000, _spec(f"small{n}", 20, 4)) for n in range(num_small)],
        ]
    )
    timed.require_all_ended()


def test_a_head_that_does_not_fit_is_overtaken_by_those_that_do() -> None:
    """They start while it waits, and it starts once there is room."""
    timed = Timed(100, fast_lane_share=NO_LANE)
    _waits_for_room(timed, 20)
    (large,) = _ttft_s(timed, "large")
    assert large > 1.0
    assert max(_ttft_s(timed, "small")) < 0.5


def test_it_is_overtaken_a_bounded_number_of_times() -> None:
    """After that nobody passes: those behind it wait for it."""
    timed = Timed(100, fast_lane_share=NO_LANE, max_overtakes=5)
    _waits_for_room(timed, 20)
    starts = {str(each.request_id): life.token_s[0] for each, life in timed.lives.items()}
    passed = [name for name, start_s in starts.items() if "small" in name and start_s < starts["large"]]
    assert len(passed) == 5


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["fcfs", "edf"])
def test_a_stream_of_small_ones_does_not_starve_a_large_one(policy: str) -> None:
    """However many come, the large one has its turn, under each policy, with and without the fast lane."""
    for share in (NO_LANE, 0.3):
        timed = Timed(100, policy=policy, max_overtakes=20, fast_lane_share=share)
        small = _poisson(25, 300, name="s", prompt=(100, 200), output=(10, 60))
        timed.serve([*small, (1.0, _spec("large", 1200, 4))], until_s=12)
        assert _first_s(timed, "large") < 11
        assert len(timed.scheduler._admission) > 0, "the stream goes on"


def test_one_long_prompt_among_fifty_short_ones() -> None:
    """4,096 tokens in the middle of them, too many to fit: their p95 TTFT is under 1.5 times that without it, and it finishes."""
    short = [(0.001 * n, _spec(f"s{n}", 30 + 14 * n % 90, 10 + n)) for n in range(1, 51)]
    p95 = []
    for more in ([], [(0.0255, _spec("long", 4096, 32))]):
        timed = Timed(280)
        timed.serve([*more, *short])
        timed.require_all_ended()
        p95.append(percentile(_ttft_s(timed, "s"), 0.95))
    assert p95[1] < 1.5 * p95[0]


# -- the fast lane


def _lane_p99(rate: float, share: float) -> float:
    timed = Timed(2000, fast_lane_share=share)
    normal = _poisson(rate, int(40 * rate), name="n", prompt=(400, 1200), output=(50, 200))
    timed.serve([*_poisson(3, 120, name="s", prompt=(30, 100), output=(10, 40)), *normal])
    timed.require_all_ended()
    return percentile(_ttft_s(timed, "s"), 0.99)


@pytest.mark.thorough
def test_the_fast_lane_stays_flat_while_the_normal_lane_is_saturated() -> None:
    """From the load that fills it to twice as much the lane's p99 TTFT grows by under a half; without it, it explodes."""
    assert _lane_p99(8.0, 0.3) < 1.5 * _lane_p99(4.0, 0.3)
    assert _lane_p99(8.0, NO_LANE) > 5 * _lane_p99(4.0, NO_LANE)


@pytest.mark.parametrize("priority", [Priority.REALTIME, Priority.STANDARD])
def test_the_fast_lane_starves_nobody(priority: Priority) -> None:
    """Short requests above what the worker can serve, for ever: one of the normal lane has its turn, a realtime one at once."""
    timed = Timed(400, max_num_seqs=8)
    short = _poisson(40, 800, name="s", prompt=(20, 100), output=(20, 100))
    timed.serve([*short, (2.0, _spec("long", 400, 20, priority=priority))], until_s=20)
    assert len(timed.scheduler._admission.fast) > 0, "the stream is too much for it"
    assert _first_s(timed, "long") < (3 if priority is Priority.REALTIME else 8)


def test_what_the_fast_lane_does_not_use_goes_back() -> None:
    """Long prompts alone get the whole budget of every step, and short ones alone do too."""
    for num_prompt in (2000, 100):
        timed = Timed(max_num_batched_tokens=500)
        timed.serve([(0.0, _spec(f"r{n}", num_prompt, 1)) for n in range(20)])
        sizes = [sum(len(item.token_ids) for item in output.scheduled) for output in timed.outputs]
        assert set(sizes[:-1]) == {500}


def test_the_fast_lane_takes_no_more_than_its_part_while_others_wait() -> None:
    """A flood of short prompts leaves the rest of each step to a long one."""
    timed = Timed(max_num_batched_tokens=500, fast_lane_share=0.3)
    timed.serve([(0.0, _spec("long", 2000, 1)), *[(0.0, _spec(f"s{n}", 100, 1)) for n in range(60)]])
    first = timed.outputs[0].scheduled
    assert sum(len(item.token_ids) for item in first if item.sequence_id.request_id != "long") == 150


# -- classes and policies


def _order(timed: Timed) -> list[str]:
    """Requests by their first token."""
    return sorted((each.request_id for each in timed.lives), key=lambda name: _first_s(timed, name))


def _first_s(timed: Timed, name: str) -> float:
    (life,) = [life for each, life in timed.lives.items() if each.request_id == name]
    return life.token_s[0]


def _one_at_a_time(**config: object) -> Timed:
    return Timed(max_num_seqs=1, fast_lane_share=NO_LANE, **config)  # type: ignore[arg-type] # each has its field's type


def test_realtime_comes_before_standard_before_batch() -> None:
    """However they arrive, within a class in the order of arrival."""
    timed = _one_at_a_time()
    classes = [Priority.BATCH, Priority.STANDARD, Priority.REALTIME, Priority.BATCH, Priority.REALTIME]
    arrivals = [(n / 1e4, _spec(f"{p.name}{n}", 20, 20, priority=p)) for n, p in enumerate(classes, 1)]
    timed.serve([(0.0, _spec("a", 20, 20)), *arrivals])
    assert _order(timed) == ["a", "REALTIME3", "REALTIME5", "STANDARD2", "BATCH1", "BATCH4"]


def test_a_waiting_prompt_of_a_higher_class_comes_before_a_running_one_of_a_lower_class() -> None:
    """A long prompt under way gives its chunks to a realtime one that has just come."""
    timed = Timed(fast_lane_share=NO_LANE)
    timed.serve([(0.0, _spec("long", 4000, 1)), (0.15, _spec("now", 500, 1, priority=Priority.REALTIME))])
    assert _first_s(timed, "now") < 0.45 < _first_s(timed, "long")


def test_who_waits_long_moves_up() -> None:
    """Under a stream of realtime requests that fills the engine a batch request starts once it has waited for aging_s."""
    timed = _one_at_a_time(aging_s=5.0, overload_wait_s=1e6)
    realtime = [(n / 5, _spec(f"r{n}", 20, 40, priority=Priority.REALTIME)) for n in range(300)]
    timed.serve([*realtime, (0.1, _spec("batch", 20, 1, priority=Priority.BATCH))])
    assert 5 < _first_s(timed, "batch") < 8 < timed.clock()


def test_shortest_job_first_halves_the_mean_wait() -> None:
    """Jobs of many sizes that wait together: the short ones first, and nobody later than the bound."""
    jobs = [(0.001 * n, _spec(f"j{n}", 20, 200 - 6 * n)) for n in range(30)]
    waits = {}
    for policy in ("fcfs", "sjf"):
        timed = _one_at_a_time(policy=policy)
        timed.serve(jobs)
        waits[policy] = sum(_ttft_s(timed)) / len(jobs)
    assert waits["sjf"] < 0.75 * waits["fcfs"]


@pytest.mark.thorough
def test_shortest_job_first_starves_nobody() -> None:
    """A long job is passed by short ones for TURN_BOUND_S seconds at most."""
    timed = _one_at_a_time(policy="sjf")
    short = [(n / 8, _spec(f"s{n}", 20, 20)) for n in range(800)]
    timed.serve([*short, (0.5, _spec("long", 1000, 1000))], until_s=60)
    assert _first_s(timed, "long") < 45


def test_earliest_deadline_first() -> None:
    """By deadline, and without one by arrival, half a minute late."""
    timed = _one_at_a_time(policy="edf")
    budgets: dict[str, float | None] = {"none": None, "late": 20.0, "soon": 8.0, "between": 10.0}
    arrivals = [
        (n / 1e4, _spec(name, 20, 20, time_budget_s=budget))
        for n, (name, budget) in enumerate(budgets.items(), 1)
    ]
    timed.serve([(0.0, _spec("a", 20, 20)), *arrivals])
    assert _order(timed) == ["a", "soon", "between", "late", "none"]


# -- overload


def test_batch_gives_way_under_overload_and_comes_back() -> None:
    """Realtime keeps its TTFT; batch falls back to static batches, then is refused; both switches can be seen, and the return."""
    timed = Timed(400, max_num_seqs=16, overload_wait_s=0.5, fast_lane_share=NO_LANE)
    batch = [(n / 2, _spec(f"b{n}", 200, 100, priority=Priority.BATCH)) for n in range(80)]
    rush = [
        (10 + when_s, spec)
        for when_s, spec in _poisson(14, 140, name="s", prompt=(50, 200), output=(30, 120))
    ]
    realtime = _poisson(1, 40, name="t", prompt=(20, 60), output=(10, 30), priority=Priority.REALTIME)
    modes: list[BatchMode] = []
    timed.serve([*batch, *rush, *realtime], watch=lambda: modes.append(timed.scheduler.stats().batch_mode))
    timed.require_all_ended()
    assert {BatchMode.CONTINUOUS, BatchMode.STATIC, BatchMode.REFUSED} == set(modes)
    refused = [life.error for life in timed.lives.values() if life.error is not None]
    assert refused
    assert all(isinstance(error, QueueFullError) and error.retry_after_s > 0 for error in refused)
    assert timed.scheduler.stats().num_batch_refused == len(refused)
    assert timed.scheduler.stats().num_batch_switches >= 4
    assert percentile(_ttft_s(timed, "t"), 0.95) < 0.5


@pytest.mark.thorough
def test_realtime_keeps_its_slo_however_long_the_overload_lasts() -> None:
    """Standard requests that have waited for long do not pass it, but for one in eight."""
    timed = Timed(600, fast_lane_share=NO_LANE)
    standard = _poisson(14, 1100, name="s")
    realtime = _poisson(1, 70, name="t", prompt=(20, 60), output=(10, 30), priority=Priority.REALTIME)
    timed.serve([*standard, *realtime], until_s=70)
    waits = [
        life.ttft_s for each, life in timed.lives.items() if each.request_id.startswith("t") and life.token_s
    ]
    assert len(waits) >= len(timed.lives) - 1100 - 3
    assert len(waits) > 60
    assert percentile(waits, 0.95) < 0.5


def test_batch_does_not_wait_for_ever_where_there_is_never_any_slack() -> None:
    """Overload that lasts without getting worse: after aging_s a batch request is refused, and told when to come again."""
    timed = Timed(max_num_seqs=2, overload_wait_s=0.5, aging_s=6.0, fast_lane_share=NO_LANE)
    urgent = [(n * 0.28, _spec(f"u{n}", 20, 100)) for n in range(60)]
    backlog = [(0.0, _spec(f"x{n}", 20, 100)) for n in range(5)]
    timed.serve([*backlog, *urgent, (1.5, _spec("batch", 20, 20, priority=Priority.BATCH))], until_s=16)
    (error,) = [life.error for life in timed.lives.values() if life.error]
    assert isinstance(error, QueueFullError)
    assert timed.scheduler.stats().batch_mode is BatchMode.STATIC


def test_a_pause_ends_while_all_that_run_wait_for_kv() -> None:
    """It is counted in steps that compute: where nobody does, those that come are let in."""
    bench = Bench(12, watermark=0.0, watermark_rise=0.0, cool_down_after=1, cool_down_steps=1000)
    names = ("a", "b", "c", "d")
    for number, name in enumerate(names):
        bench.add(make_spec(name, (number,) * 3, max_tokens=24))
    while not bench.scheduler.stats().is_cooling:
        bench.step()
    for name in names:
        bench.release(make_id(name))
    bench.add(make_spec("parked", (1,) * 8), SequenceRole.AWAIT_KV)
    bench.step()
    new = bench.add(make_spec("new", (2, 3)))
    bench.steps(2)
    assert bench.tokens(new)


def test_a_batch_request_that_was_passed_by_holds_nobody_up_while_it_gives_way() -> None:
    """It may not be passed by any more, and may not begin: the urgent ones that wait come in, and then it does."""
    bench = Bench(16, overload_wait_s=0.5, max_overtakes=0, fast_lane_share=NO_LANE, aging_s=1e6)
    bench.add(make_spec("first", (1,) * 20, max_tokens=20))
    bench.step()
    big = bench.add(make_spec("big", (2,) * 50, priority=Priority.BATCH))
    bench.step()
    urgent = bench.add(make_spec("urgent", (3,) * 50))
    bench.clock.advance(1.0)
    bench.step()
    assert bench.scheduler.stats().batch_mode is BatchMode.STATIC
    bench.release(make_id("first"))
    bench.run()
    assert bench.tokens(urgent)
    assert bench.tokens(big)


def test_static_batches_of_batch_requests_run_in_the_slack() -> None:
    """While the others had to wait, batch requests come in a few at a time, when nobody else waits, and all of them end first."""
    timed = Timed(
        400, max_num_seqs=8, overload_wait_s=0.4, static_batch_size=2, fast_lane_share=NO_LANE, aging_s=1e6
    )
    standard = [(n * 0.23, _spec(f"s{n}", 60, 60)) for n in range(100)]
    burst = [(5.0, _spec(f"x{n}", 100, 100)) for n in range(12)]
    # Of two that come in together one ends long before the other.
    batch = [(5.1, _spec(f"b{n}", 60, 10 + 30 * (n % 2), priority=Priority.BATCH)) for n in range(8)]
    together: list[frozenset[str]] = []

    def watch() -> None:
        """Which batch requests run beside each other."""
        if timed.scheduler.stats().batch_mode is BatchMode.STATIC:
            running = [item.sequence_id.request_id for item in timed.outputs[-1].scheduled]
            together.append(frozenset(name for name in running if name.startswith("b")))

    timed.serve([*standard, *burst, *batch], watch=watch)
    groups = [group for group, _ in itertools.groupby(together)]
    assert max(map(len, groups)) == 2
    for before, after in itertools.pairwise(groups):
        assert not after - before or not before & after, "newcomers joined a batch of which some still ran"


# -- fairness


@pytest.mark.thorough
@pytest.mark.parametrize("max_num_seqs", [4, 16])
def test_a_noisy_tenant_takes_nothing_from_a_quiet_one(max_num_seqs: int) -> None:
    """Ten times the requests give no more service while both wait: the gap stays within the bound of the VTC paper."""
    timed = Timed(400, max_num_seqs=max_num_seqs, fast_lane_share=NO_LANE)
    rng = random.Random(2)
    arrivals: Arrivals = []
    for tenant, num_requests in (("noisy", 400), ("quiet", 40)):
        for number in range(num_requests):
            spec = _spec(f"{tenant}{number}", rng.randint(20, 200), rng.randint(20, 100), tenant=tenant)
            arrivals.append((0.0, spec))
    gaps: list[float] = []

    def watch() -> None:
        """How far one is ahead, while both wait."""
        if {each.spec.tenant for each in timed.scheduler._admission} == {"noisy", "quiet"}:
            services = timed.scheduler.accounts.services()
            gaps.append(abs(services["noisy"] - services["quiet"]))

    timed.serve(arrivals, watch=watch)
    # Theorem 4.4: twice the larger of a longest prompt and, weighted, all tokens that a running batch can hold.
    bound = 2 * max(1.0 * 200, 2.0 * min(400 * 16, max_num_seqs * 300))
    assert len(gaps) > 200
    assert max(gaps) <= bound
    assert max(gaps) > 0


def test_service_is_charged_in_tokens() -> None:
    """A token of a prompt counts one, and each of output two, the first one too; whoever else is here."""
    timed = Timed()
    timed.serve([(0.0, _spec("a", 30, 10, tenant="a")), (0.0, _spec("b", 20, 40, tenant="b"))], until_s=0.2)
    services = timed.scheduler.accounts.services()
    given = {str(each.request_id): len(life.token_s) for each, life in timed.lives.items()}
    assert given["a"] == 10
    assert given["b"] > 10
    assert services["b"] == 20 + 2 * given["b"]


@pytest.mark.parametrize("weight", [1, 3])
def test_service_goes_by_weight(weight: int) -> None:
    """While both wait, a tenant of weight 3 gets three times the tokens of one of weight 1."""
    timed = Timed(400, max_num_seqs=4, fast_lane_share=NO_LANE)
    heavy = [(0.0, _spec(f"h{n}", 20, 30, tenant="h", tenant_weight=weight)) for n in range(400)]
    light = [(0.0, _spec(f"l{n}", 20, 30, tenant="l")) for n in range(400)]
    timed.serve([*light, *heavy], until_s=20)
    counted: defaultdict[str, int] = defaultdict(int)
    for each, life in timed.lives.items():
        counted[each.request_id[0]] += len(life.token_s)
    assert {each.spec.tenant for each in timed.scheduler._admission} == {"h", "l"}
    assert counted["h"] / counted["l"] == pytest.approx(weight, rel=0.1)


def test_an_idle_tenant_comes_back_without_a_bank() -> None:
    """Its counter is lifted to the level of those that were busy: it does not take everything for a while."""
    timed = Timed(400, max_num_seqs=2, fast_lane_share=NO_LANE)
    busy = [(0.0, _spec(f"busy{n}", 20, 30, tenant="busy")) for n in range(400)]
    idle = [(20.0, _spec(f"idle{n}", 20, 30, tenant="idle")) for n in range(100)]
    timed.serve([*busy, *idle], until_s=26)
    counted: defaultdict[str, int] = defaultdict(int)
    for each, life in timed.lives.items():
        counted[each.request_id[:4]] += sum(token_s > 20.5 for token_s in life.token_s)
    assert 0.7 < counted["busy"] / counted["idle"] < 1.4


# -- deadlines


def test_nothing_is_computed_after_its_deadline() -> None:
    """Under overload with short deadlines: whatever is late ends at the next step, and its blocks are back."""
    timed = Timed(200, max_num_seqs=16)
    arrivals = _poisson(40, 200, time_budget_s=2.0)
    late_s = {spec.sequence_id: when_s + 2.0 for when_s, spec in arrivals}
    timed.serve(arrivals)
    timed.require_all_ended()
    ends = [life.error for life in timed.lives.values() if life.error]
    assert {error.phase for error in ends if isinstance(error, DeadlineError)} >= {"queued", "decode"}
    longest_step_s = max(memory_bound_s(output) for output in timed.outputs)
    for each, life in timed.lives.items():
        # The step under way when it passes is the last one.
        # and it came, for the scheduler, at the end of another one.
        assert all(token_s <= late_s[each] + 2 * longest_step_s for token_s in life.token_s)
