"""Gates that hold requests back: none of them waits for another one, every wait has a bound, and every mode ends."""

import itertools
import random

import pytest

from paceline.core.request import Priority, SequenceSpec
from paceline.engine.events import NewTokens
from paceline.engine.overload import BatchMode
from paceline.engine.sequence import SequenceRole
from tests.engine.harness import Bench
from tests.engine.test_scheduler_policies import NO_LANE, Arrivals, _first_s, _poisson, _spec
from tests.engine.timed import Life, Timed
from tests.factories import make_spec

REALTIME, STANDARD, BATCH = Priority


def _has_begun(timed: Timed, name: str) -> bool:
    (life,) = [life for each, life in timed.lives.items() if each.request_id == name]
    return bool(life.token_s)


def _every(
    period_s: float,
    until_s: float,
    name: str,
    priority: Priority = STANDARD,
    lengths: tuple[int, int] = (60, 120),
) -> Arrivals:
    """Equal requests in equal distances."""
    num = int(until_s / period_s)
    return [(n * period_s, _spec(f"{name}{n}", *lengths, priority=priority)) for n in range(num)]


# -- 1. a pause that never ends


def test_a_pause_ends_where_nobody_is_left_to_compute() -> None:
    """A worker that has become idle does not ask routers for ever to go elsewhere."""
    bench = Bench(12, watermark=0.0, watermark_rise=0.0, cool_down_after=1, cool_down_steps=16)
    for number, name in enumerate(("a", "b", "c", "d")):
        bench.add(make_spec(name, (number,) * 3, max_tokens=12))
    was_cooling = False
    while bench.scheduler.has_work():
        bench.step()
        was_cooling |= bench.scheduler.stats().is_cooling
    assert was_cooling
    bench.clock.advance(3600)
    assert not bench.scheduler.stats().is_cooling


# -- 2. whoever was preempted starves


@pytest.mark.parametrize("victim", ["cost", "most-blocks"])
def test_who_was_preempted_is_not_starved_by_the_fast_lane(victim: str) -> None:
    """With default bounds and a little overload: it has its turn again, as the document says, before all others."""
    timed = Timed(100, victim=victim, aging_s=5.0)
    fast = _poisson(12, 800, name="s", prompt=(60, 120), output=(60, 120))
    timed.serve([*fast, (0.0, _spec("large", 700, 800))], until_s=60)
    (life,) = [life for each, life in timed.lives.items() if each.request_id == "large"]
    assert life.has_ended


# -- 3. one that may not be passed by stands for all of them


@pytest.mark.parametrize("priority", [None, STANDARD, BATCH])
def test_a_realtime_request_is_not_overtaken_for_ever_while_a_less_urgent_one_is_held_up(
    priority: Priority | None,
) -> None:
    """The bound on overtaking is one for each request: who is held up already does not take it from a more urgent one."""
    timed = Timed(100, max_overtakes=5, overload_wait_s=1e6, aging_s=5.0)
    first = [] if priority is None else [(1.5, _spec("first", 1540, 4, priority=priority))]
    large = (12.0, _spec("large", 1200, 4, priority=REALTIME))
    timed.serve([*_every(0.15, 60, "s", REALTIME), *first, large], until_s=58)
    assert _has_begun(timed, "large")


@pytest.mark.parametrize("priority", [STANDARD, BATCH])
def test_a_realtime_request_that_fits_does_not_wait_for_a_less_urgent_one_that_does_not(
    priority: Priority,
) -> None:
    """Nobody of the class of the one that is held up, or of a later one, comes in; those of earlier classes do."""
    timed = Timed(100, max_overtakes=5, overload_wait_s=1e6)
    small = [(0.4 + n / 10, _spec(f"p{n}", 140, 4, priority=priority)) for n in range(6)]
    first = (0.3, _spec("first", 1200, 4, priority=priority))
    timed.serve(
        [(0.0, _spec("holder", 600, 900)), first, *small, (2.0, _spec("now", 140, 4, priority=REALTIME))]
    )
    assert _first_s(timed, "now") < 2.2


def test_a_large_standard_request_has_its_turn_while_short_realtime_ones_are_there() -> None:
    """Realtime requests that use half of the worker, one after the other for ever, let one in that needs most of it."""
    timed = Timed(100, max_overtakes=8, aging_s=5.0)
    timed.serve([*_every(0.15, 80, "s", REALTIME), (4.0, _spec("large", 1100, 4))], until_s=78)
    assert _has_begun(timed, "large")


# -- 4. age


@pytest.mark.parametrize(("urgent", "patient"), [(REALTIME, STANDARD), (STANDARD, BATCH), (REALTIME, BATCH)])
def test_age_counts_also_where_the_more_urgent_have_waited_as_long(
    urgent: Priority, patient: Priority
) -> None:
    """One admission in eight is for the oldest of those that have waited for aging_s, whatever its class."""
    timed = Timed(2000, max_num_seqs=8, aging_s=5.0, fast_lane_share=NO_LANE, overload_wait_s=1e6)
    stream = _poisson(20, 1800, name="t", prompt=(100, 200), output=(20, 60), priority=urgent)
    timed.serve([*stream, (20.0, _spec("patient", 40, 20, priority=patient))], until_s=80)
    assert _has_begun(timed, "patient")


def test_a_short_request_has_its_turn_by_age_while_realtime_ones_wait_in_the_normal_lane() -> None:
    """As a long one has, which waits in the same lane as they."""
    timed = Timed(2000, max_num_seqs=8, aging_s=5.0)
    lengths = {"prompt": (200, 300), "output": (20, 60)}
    realtime = _poisson(30, 1800, name="t", priority=REALTIME, time_budget_s=2.0, **lengths)
    timed.serve([*realtime, (2.0, _spec("short", 40, 20)), (2.0, _spec("long", 400, 20))], until_s=50)
    assert _has_begun(timed, "long")
    assert _has_begun(timed, "short")


@pytest.mark.parametrize("num_tenants", [2, 12, 20])
def test_an_old_backlog_gives_a_tenant_no_more_than_its_part(num_tenants: int) -> None:
    """However many tenants wait, and however old the backlog of one is, the gap of service stays within the bound."""
    timed, rng, number = (
        Timed(400, max_num_seqs=4, fast_lane_share=NO_LANE, aging_s=10.0),
        random.Random(2),
        itertools.count(),
    )
    quiet = [f"quiet{n}" for n in range(num_tenants - 1)]
    gaps: list[float] = []

    def spec(tenant: str) -> SequenceSpec:
        return _spec(f"{next(number)}", rng.randint(20, 200), rng.randint(20, 100), tenant=tenant)

    def watch() -> None:
        """Each quiet tenant always has one that waits."""
        waiting = {each.spec.tenant for each in timed.scheduler._admission}
        for tenant in quiet:
            if tenant not in waiting:
                new = spec(tenant)
                timed.lives[new.sequence_id] = Life(timed.clock())
                timed.scheduler.add(new, SequenceRole.GENERATE)
        services = timed.scheduler.accounts.services()
        gaps.extend(services["noisy"] - services[tenant] for tenant in quiet if tenant in services)

    timed.serve([(0.0, spec("noisy")) for _ in range(600)], until_s=100, watch=watch)
    assert max(gaps) <= 2 * max(1.0 * 200, 2.0 * min(400 * 16, 4 * 300))


def test_many_candidates_give_a_tenant_no_more_than_its_part() -> None:
    """Requests for more candidates than there are seats are served as one tenant's work, a seat at a time."""
    timed = Timed(400, max_num_seqs=4, fast_lane_share=NO_LANE)
    many = [(0.0, _spec(f"noisy{n}", 50, 100, tenant="noisy", candidates=range(16))) for n in range(12)]
    few = [(0.0, _spec(f"quiet{n}", 50, 100, tenant="quiet")) for n in range(200)]
    gaps: list[float] = []

    def watch() -> None:
        """How far one is ahead, while both wait."""
        if {each.spec.tenant for each in timed.scheduler._admission} == {"noisy", "quiet"}:
            services = timed.scheduler.accounts.services()
            gaps.append(abs(services["noisy"] - services["quiet"]))

    timed.serve([*many, *few], until_s=200, watch=watch)
    assert len(gaps) > 200
    assert max(gaps) <= 2 * max(1.0 * 50, 2.0 * 4 * 150)


def test_one_that_waits_for_the_turn_of_its_tenant_does_not_starve_those_before_it() -> None:
    """Two that need all seats and have been passed by, and others for ever: the tenant that was served less comes first, and then the other."""
    timed = Timed(400, max_num_seqs=4, fast_lane_share=NO_LANE, aging_s=1e6)
    small = [(0.1 * n, _spec(f"c{n}", 20, 40, tenant="c")) for n in range(1500)]
    timed.serve(
        [
            (0.0, _spec("a-long", 50, 1500, tenant="a")),
            (0.0, _spec("a-all", 50, 20, tenant="a", candidates=range(4))),
            (8.0, _spec("b-all", 50, 20, tenant="b", candidates=range(4))),
            *small,
        ],
        until_s=120,
    )
    assert _has_begun(timed, "b-all")
    assert _has_begun(timed, "a-all")


# -- 5. the fast lane takes more than its part


def test_the_fast_lane_leaves_something_where_decodes_fill_most_of_a_step() -> None:
    """As many seats as tokens in a step, and short requests for ever: one of the normal lane has its turn."""
    timed = Timed(2000, max_num_batched_tokens=64, aging_s=5.0)
    fast = _poisson(30, 2400, name="s", prompt=(20, 40), output=(100, 128))
    timed.serve([*fast, (2.0, _spec("long", 400, 20))], until_s=70)
    assert _has_begun(timed, "long")


@pytest.mark.parametrize("budget", [16, 64, 512])
def test_all_of_the_fast_lane_that_pass_are_counted(budget: int) -> None:
    """Also those that come in by what the normal lane has left of a step."""
    timed = Timed(100, max_num_batched_tokens=budget, max_overtakes=5)
    small = [(0.6 + n / 500, _spec(f"small{n}", 100, 4)) for n in range(60)]
    timed.serve([(0.0, _spec("holder", 800, 600)), (0.5, _spec("large", 900, 4)), *small])
    large_s = _first_s(timed, "large")
    passed = [
        each for each, life in timed.lives.items() if "small" in each.request_id and life.token_s[0] < large_s
    ]
    # One step's may come in before they are counted.
    assert len(passed) <= 5 + 4


# -- 6. overload that is over, loans, candidates


def test_an_idle_worker_refuses_no_batch_request() -> None:
    """When those that waited are gone, nothing is overloaded an hour later."""
    bench = Bench(16, overload_wait_s=0.5, fast_lane_share=NO_LANE, max_num_seqs=1)
    bench.add(make_spec("first", (1,) * 20, max_tokens=30, time_budget_s=4.0))
    bench.step()
    bench.add(make_spec("urgent", (3,) * 30, time_budget_s=4.0))
    bench.clock.advance(3.0)
    bench.step()
    assert bench.scheduler.stats().batch_mode is BatchMode.REFUSED
    bench.clock.advance(2.0)
    bench.step()
    assert not bench.scheduler.has_work()
    bench.clock.advance(3600.0)
    batch = bench.add(make_spec("batch", (5,) * 4, priority=BATCH))
    bench.run()
    assert bench.tokens(batch), bench.end(batch)


@pytest.mark.parametrize(("priority", "mode"), [(BATCH, BatchMode.CONTINUOUS), (STANDARD, BatchMode.REFUSED)])
def test_batch_requests_that_were_handed_over_are_not_what_batch_gives_way_to(
    priority: Priority, mode: BatchMode
) -> None:
    """However long they wait for room: they are in the class of what has begun, and still not urgent."""
    bench = Bench(16, overload_wait_s=0.5, fast_lane_share=NO_LANE, max_num_seqs=1)
    bench.add(make_spec("first", (1,) * 20, max_tokens=30))
    bench.step()
    bench.add(make_spec("handed over", (3,) * 30, priority=priority), SequenceRole.AWAIT_KV)
    bench.clock.advance(3.0)
    bench.step()
    assert bench.scheduler.stats().batch_mode is mode


def test_candidates_that_wait_for_a_seat_are_not_what_batch_gives_way_to() -> None:
    """Their request has had its turn; an hour later nobody urgent has waited."""
    bench = Bench(32, overload_wait_s=0.5, fast_lane_share=NO_LANE, max_num_seqs=2)
    many = bench.add(make_spec("many", (1,) * 20, max_tokens=8, candidates=tuple(range(6))))
    while not bench.of(many, NewTokens):
        bench.step()
    bench.clock.advance(3600.0)
    bench.step()
    assert bench.scheduler.stats().num_waiting == 4
    assert bench.scheduler.stats().batch_mode is BatchMode.CONTINUOUS


def test_readers_of_one_prefix_do_not_starve_one_that_waits_for_room() -> None:
    """While somebody waits for room nothing is lent, also in steps in which it is not asked for again."""
    bench = Bench(
        16,
        max_num_seqs=4,
        watermark=0.0,
        watermark_rise=0.0,
        fast_lane_share=NO_LANE,
        max_num_batched_tokens=64,
    )
    bench.add(make_spec("done", (9,) * 20, max_tokens=1))
    bench.run()
    bench.add(make_spec("r", (3, 0), max_tokens=6, ignore_eos=True))
    bench.step()
    loan, num_loans = bench.add(make_spec("loan", (9,) * 20), SequenceRole.LEND), 1
    large = bench.add(make_spec("large", (2,) * 48, max_tokens=2))
    for step in range(200):
        if step % 4 == 0:
            bench.add(make_spec(f"r{step}", (3, step), max_tokens=6, priority=REALTIME, ignore_eos=True))
        bench.step()
        # One reader ends, at once when it is asked to, and the next one comes.
        if step % 6 == 5 or bench.end(loan) is not None:
            bench.release(loan)
            num_loans += 1
            loan = bench.add(make_spec(f"loan{num_loans}", (9,) * 20), SequenceRole.LEND)
    assert bench.of(large, NewTokens)


@pytest.mark.parametrize("num_large", [7, 40])
def test_an_idle_worker_lets_in_who_fits_however_many_before_it_do_not(num_large: int) -> None:
    """Leases hold most blocks, and nobody computes: after a moment a small request, which has room, has its turn."""
    bench = Bench(16, fast_lane_share=NO_LANE, max_num_batched_tokens=64)
    bench.add(make_spec("leased", (1,) * 48), SequenceRole.PREFILL_ONLY)
    bench.step()
    for number in range(num_large):
        bench.add(make_spec(f"large{number}", (2, number) * 10))
    small = bench.add(make_spec("small", (3,), max_tokens=2))
    for _ in range(100):
        bench.step()
        bench.clock.advance(0.1)
    assert bench.tokens(small)
