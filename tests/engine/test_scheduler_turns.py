"""Who comes in: no lane, tenant or class makes another one wait without a bound, and none takes more than its part."""

import itertools
import random
from collections import Counter, defaultdict, deque
from dataclasses import dataclass

import pytest

from paceline.core.request import FirstToken, Priority, SequenceId, SequenceSpec
from paceline.engine.events import Reserved, Started
from paceline.engine.sequence import SequenceRole
from tests.engine.harness import Bench
from tests.engine.test_scheduler_policies import NO_LANE, _poisson, _spec
from tests.engine.timed import Life, Timed, percentile
from tests.factories import make_id, make_spec

REALTIME, STANDARD, BATCH = Priority


def _life(timed: Timed, name: str) -> Life:
    (life,) = [life for each, life in timed.lives.items() if each.request_id == name]
    return life


def _tokens(timed: Timed, prefix: str, since_s: float) -> int:
    lives = [life for each, life in timed.lives.items() if each.request_id.startswith(prefix)]
    return sum(token_s > since_s for life in lives for token_s in life.token_s)


# -- what a tenant's counter is lifted to


@pytest.mark.parametrize("what", ["twin", "pinned", "long", "batch"])
def test_a_newcomer_starts_level_with_those_that_wait(what: str) -> None:
    """Whoever has a low counter without waiting in this class, such as a pinned prefix, a long stream or a BATCH request, is no level."""
    timed = Timed(2000, max_num_seqs=4, fast_lane_share=NO_LANE, aging_s=1e6, overload_wait_s=1e6)
    if what == "pinned":
        pin = _spec("pin", 32, 1)
        timed.lives[pin.sequence_id] = Life(0.0)
        timed.scheduler.add(
            pin, SequenceRole.PREFILL_ONLY
        )  # as worker/pinned.py does, and nobody releases it
    others = {
        "long": [(0.0, _spec("other", 20, 6000, tenant="other"))],
        "batch": [(0.2, _spec("other", 20, 30, tenant="other", priority=BATCH))],
    }
    busy = [(0.1, _spec(f"busy{n}", 20, 30, tenant="busy")) for n in range(600)]
    new = [(10.0, _spec(f"new{n}", 20, 30, tenant="new")) for n in range(400)]
    timed.serve([*others.get(what, []), *busy, *new], until_s=14)
    assert 0.7 < _tokens(timed, "busy", 10.5) / _tokens(timed, "new", 10.5) < 1.4


def test_a_tenant_with_one_long_answer_saves_nothing_up() -> None:
    """Until it has more that waits it has not asked for more; then it starts level with those that wait."""
    timed = Timed(2000, max_num_seqs=8, fast_lane_share=NO_LANE)
    busy = [(0.0, _spec(f"busy{n}", 20, 30, tenant="busy")) for n in range(1500)]
    more = [(10.0, _spec(f"idle{n}", 20, 30, tenant="idle")) for n in range(600)]
    timed.serve([(0.0, _spec("idle", 20, 6000, tenant="idle")), *busy, *more], until_s=16)
    gap = 2 * abs(_tokens(timed, "busy", 10.5) - _tokens(timed, "idle", 10.5))
    assert gap <= 2 * max(20, 2 * 8 * 50)


def test_tenants_that_come_and_go_starve_nobody() -> None:
    """However many new tenants come, one that was served more has its turn by age."""
    timed = Timed(400, max_num_seqs=4, fast_lane_share=NO_LANE, aging_s=5.0)
    pin = _spec("pin", 32, 1)
    timed.lives[pin.sequence_id] = Life(0.0)
    timed.scheduler.add(pin, SequenceRole.PREFILL_ONLY)
    mine = [(0.1, _spec(f"m{n}", 20, 100, tenant="mine")) for n in range(40)]
    new = [(10.0 + 0.05 * n, _spec(f"t{n}", 20, 60, tenant=f"new{n}")) for n in range(800)]
    timed.serve([*mine, (12.0, _spec("late", 20, 10, tenant="mine")), *new], until_s=50)
    assert _life(timed, "late").token_s


# -- REALTIME in the fast lane, behind STANDARD of the normal lane


@pytest.mark.parametrize("num_prompt", [120, 140])
def test_short_realtime_requests_are_not_worse_off_than_long_ones(num_prompt: int) -> None:
    """No STANDARD prompt takes a part of a step from REALTIME ones, in whichever lane these are."""
    timed = Timed(4000, max_num_batched_tokens=128, overload_wait_s=1e6, aging_s=1e6)
    urgent = [(0.5 + 0.05 * n, _spec(f"r{n}", num_prompt, 4, priority=REALTIME)) for n in range(400)]
    long = [(0.0, _spec(f"p{n}", 600, 20)) for n in range(400)]
    timed.serve([*urgent, *long], until_s=20)
    lives = [life for each, life in timed.lives.items() if each.request_id[0] == "r" and life.arrival_s < 19]
    ttft_s = [(life.token_s[0] if life.token_s else 99.0) - life.arrival_s for life in lives]
    assert percentile(ttft_s, 0.95) < 0.5


@pytest.mark.parametrize("priority", [STANDARD, REALTIME])
@pytest.mark.parametrize("num_decoding", [12, 13])
def test_the_fast_lane_has_a_turn_where_little_is_left(num_decoding: int, priority: Priority) -> None:
    """Parts of a token are kept for the next step, so that a few tokens a step are shared too."""
    timed = Timed(8000, max_num_batched_tokens=16, max_num_seqs=20, aging_s=5.0, overload_wait_s=1e6)
    decoding = [(0.0, _spec(f"d{n}", 130, 6000)) for n in range(num_decoding)]
    prompts = [(10.0, _spec(f"p{n}", 300, 1)) for n in range(300)]
    timed.serve([*decoding, *prompts, (10.5, _spec("short", 40, 20, priority=priority))], until_s=40)
    assert _life(timed, "short").token_s


# -- the fast lane is passed by, and that is not counted


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_one_of_the_fast_lane_is_overtaken_a_bounded_number_of_times(share: float) -> None:
    """By those of the normal lane too, while it does not fit."""
    timed = Timed(12, aging_s=2.0, max_overtakes=8, overload_wait_s=1e6, fast_lane_share=share)
    stream = [(0.05 * n, _spec(f"n{n}", 2, 30, candidates=(0, 1))) for n in range(600)]
    timed.serve([*stream, (2.0, _spec("fast", 128, 20))], until_s=29)
    assert _life(timed, "fast").token_s


# -- the bar


@pytest.mark.parametrize("is_doomed", [False, True])
def test_a_tenant_whose_requests_expire_hides_no_one_else_s_turn(is_doomed: bool) -> None:
    """Large ones of the least served tenant leave by their deadline, one after the other, and another tenant's has its turn all the same."""
    timed = Timed(100, max_overtakes=8, aging_s=5.0)
    small = [(0.1 * n, _spec(f"c{n}", 100, 100, tenant="c")) for n in range(600)]
    num_b = 100 if is_doomed else 0
    doomed = [(0.5 * n, _spec(f"b{n + 1}", 1400, 10, tenant="b", time_budget_s=1.2)) for n in range(num_b)]
    first = [(0.0, _spec("a0", 400, 10, tenant="a")), (0.0, _spec("b0", 200, 10, tenant="b"))]
    timed.serve([*first, (1.0, _spec("a", 1300, 10, tenant="a")), *doomed, *small], until_s=50)
    assert _life(timed, "a").token_s


@pytest.mark.parametrize("is_large", [False, True])
def test_nobody_is_barred_on_a_worker_where_nobody_computes(is_large: bool) -> None:
    """A lease holds most blocks, one that may not be passed by waits for it, and a small one that fits comes in since all is idle."""
    bench = Bench(16, fast_lane_share=NO_LANE, max_num_batched_tokens=64, max_overtakes=3, aging_s=5.0)
    bench.add(make_spec("leased", (1,) * 40), SequenceRole.PREFILL_ONLY)
    bench.step()
    if is_large:
        bench.add(make_spec("large", (2,) * 30))
    for number in range(20):
        bench.add(make_spec(f"s{number}", (3, number), max_tokens=2))
        bench.steps(4)
    bench.clock.advance(6.0)
    small = bench.add(make_spec("small", (4, 6), max_tokens=2))
    bench.steps(50)
    assert bench.tokens(small)


def test_a_bar_does_not_come_in_before_realtime_ones() -> None:
    """Standard families that were passed by before a burst of realtime requests take no seat in the midst of it."""
    timed = Timed(
        4000, max_num_seqs=4, max_overtakes=8, aging_s=1e6, fast_lane_share=NO_LANE, overload_wait_s=1e6
    )
    small = [(0.05 * n, _spec(f"a{n}", 20, 20 + n % 7)) for n in range(100)]
    families = [(0.5, _spec(f"s{n}", 20, 50, candidates=range(3))) for n in range(12)]
    burst = [(3.0 + 0.0001 * n, _spec(f"r{n}", 20, 50, priority=REALTIME)) for n in range(100)]
    timed.serve([*small, *burst, *families])
    last_s = max(life.token_s[0] for each, life in timed.lives.items() if each.request_id[0] == "r")
    # A family that was admitted before the burst has its first token by 3.2 s.
    begun = [life.token_s[0] for each, life in timed.lives.items() if each.request_id[0] == "s"]
    assert not [first_s for first_s in begun if 3.2 < first_s < last_s]


def test_the_oldest_that_does_not_fit_is_not_passed_by_others_that_are_old() -> None:
    """A large request, and short ones that have waited for long too: once they have passed it as often as may be, it comes in first."""
    timed = Timed(100, aging_s=5.0, max_overtakes=8, overload_wait_s=1e6)
    urgent = _poisson(20, 350, name="r", prompt=(100, 100), output=(30, 60), priority=REALTIME)
    short = _poisson(20, 350, name="f", prompt=(40, 60), output=(10, 20))
    timed.serve([*urgent, *short, (3.0, _spec("large", 1100, 4))], until_s=17)
    assert _life(timed, "large").token_s


@pytest.mark.parametrize("priority", [STANDARD, REALTIME])
def test_one_that_lost_its_blocks_is_not_starved_by_tenants_that_come_and_go(priority: Priority) -> None:
    """Its turn is before those of the other lane, whatever its tenant was served: what has begun goes on."""
    timed = Timed(100, aging_s=5.0, max_overtakes=8, overload_wait_s=1e6)
    large = _spec("large", 700, 800, tenant="large", priority=priority)
    new = [
        (1.0 + 0.05 * n, _spec(f"s{n}", 100, 100, tenant=f"t{n}", priority=priority, time_budget_s=8.0))
        for n in range(180)
    ]
    timed.serve([(0.0, large), *new], until_s=10)
    life = _life(timed, "large")
    assert life.has_ended
    assert life.num_preemptions > 0


def test_an_old_one_that_lost_its_blocks_is_passed_by_realtime_ones_as_often_as_any_other() -> None:
    """Its turn by age holds nobody of a more urgent class up before it was passed by as often as may be."""
    bench = Bench(32, fast_lane_share=NO_LANE, watermark=0.0, watermark_rise=0.0, aging_s=5.0)
    bench.add(make_spec("large", (2,) * 60, max_tokens=60))
    bench.add(make_spec("holder", (1,) * 40, max_tokens=80, priority=REALTIME))
    while not bench.scheduler.stats().num_preemptions:
        bench.step()
    bench.clock.advance(6.0)
    for number in range(20):
        small = bench.add(make_spec(f"r{number}", (3, number), max_tokens=2, priority=REALTIME))
        bench.steps(2)
        assert bench.tokens(small)
    assert not bench.end(make_id("holder"))


def test_a_large_hand_over_is_not_starved_by_small_ones_whose_kv_is_on_its_way() -> None:
    """Small hand-overs with one or two tokens to compute are mostly waiting for KV: where nobody computes, no more of them pass it."""
    bench = Bench(16, fast_lane_share=NO_LANE, max_num_batched_tokens=64, max_overtakes=3, aging_s=1e6)
    parked: deque[SequenceSpec] = deque()
    large = make_spec("large", (2,) * 40, max_tokens=2)
    for step in range(200):
        small = make_spec(f"s{step}", (3, step), max_tokens=2)
        bench.add(small, SequenceRole.AWAIT_KV)
        parked.append(small)
        if step == 10:
            bench.add(large, SequenceRole.AWAIT_KV)
        bench.step()
        # Pulls take some steps.
        if step % 2 and step > 6 and bench.of(parked[0].sequence_id, Reserved):
            bench.commit(parked.popleft(), FirstToken(1, None, None, 0))
    assert bench.of(large.sequence_id, Reserved)


# -- gaps of service


@pytest.mark.parametrize("max_overtakes", [0, 64])
def test_overtaking_gives_a_tenant_no_more_than_its_part(max_overtakes: int) -> None:
    """Both always wait, one with small requests and one with large ones that seldom fit: the gap of service stays within the bound."""
    timed = Timed(100, fast_lane_share=NO_LANE, max_overtakes=max_overtakes)
    scheduler, number, gaps = timed.scheduler, itertools.count(), []

    def watch() -> None:
        waiting = [each.spec.tenant for each in scheduler._admission]
        for tenant, lengths, depth in (("small", (50, 100), 4), ("large", (1000, 10), 2)):
            for _ in range(depth - waiting.count(tenant)):
                new = _spec(f"{tenant[0]}{next(number)}", *lengths, tenant=tenant)
                timed.lives[new.sequence_id] = Life(timed.clock())
                scheduler.add(new, SequenceRole.GENERATE)
        services = scheduler.accounts.services()
        gaps.append(services["small"] - services["large"])

    first = [(0.0, _spec(tenant[0], 50, 100, tenant=tenant)) for tenant in ("small", "large")]
    timed.serve(first, until_s=40, watch=watch)
    assert max(gaps) - min(gaps) <= 2 * max(1000, 2 * 100 * 16)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_the_fast_lane_gives_a_tenant_no_more_than_its_part(share: float) -> None:
    """Where seats are short and one sends short requests only, the other one long ones: the gap of service stays within the bound."""
    timed = Timed(800, max_num_seqs=4, fast_lane_share=share)
    noisy = [(0.0, _spec(f"n{n}", 50, 100, tenant="noisy")) for n in range(600)]
    quiet = [(0.0, _spec(f"q{n}", 150, 150, tenant="quiet")) for n in range(200)]
    gaps: list[float] = []

    def watch() -> None:
        if {each.spec.tenant for each in timed.scheduler._admission} == {"noisy", "quiet"}:
            services = timed.scheduler.accounts.services()
            gaps.append(services["noisy"] - services["quiet"])

    timed.serve([*noisy, *quiet], until_s=25, watch=watch)
    assert max(map(abs, gaps)) <= 2 * max(150, 2 * 4 * 300)


# -- one lane gives way to REALTIME, the other does not


@pytest.mark.parametrize("is_doomed", [False, True])
def test_short_standard_requests_are_not_held_up_by_what_does_not_hold_up_long_ones(is_doomed: bool) -> None:
    """Realtime requests that do not fit, and expire: standard ones of both lanes pass them."""
    timed = Timed(60, overload_wait_s=1e6)
    long = [(0.05 * n, _spec(f"n{n}", 130, 60)) for n in range(1500)]
    num_urgent = 60 if is_doomed else 0
    urgent = [
        (1 + 0.5 * n, _spec(f"r{n}", 700, 10, priority=REALTIME, time_budget_s=1.0))
        for n in range(num_urgent)
    ]
    short = [(3 + 0.2 * n, _spec(f"f{n}", 20, 20)) for n in range(100)]
    timed.serve([*long, *urgent, *short], until_s=28)
    num_long = _tokens(timed, "n", 3.0) / 60
    assert num_long > 100
    assert _tokens(timed, "f", 3.0)


# -- random mixes


@dataclass(frozen=True)
class _Tenant:
    """What one tenant sends: lengths up to these, and so many that always wait."""

    name: str
    num_prompt: int
    num_output: int
    weight: int
    num_candidates: int
    num_waiting: int


class _Mix:
    """Tenants that always wait in one class, with default settings, beside others that come and go with deadlines."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.num_slots = 16 * rng.choice((40, 80, 160, 400, 1000))
        self.max_num_seqs = rng.choice((2, 4, 8, 16, 64))
        self.timed = Timed(
            self.num_slots // 16,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=rng.choice((16, 64, 512)),
            policy=rng.choice(("fcfs", "sjf", "edf")),
        )
        self.priority = rng.choice((STANDARD, STANDARD, REALTIME))
        self.tenants = [self._tenant(f"t{number}") for number in range(rng.randint(2, 5))]
        self.has_strangers = rng.random() < 0.5
        self.num_sent = 0
        # How far the first of two is ahead of the second one, after each step.
        self.leads: defaultdict[tuple[str, str], list[float]] = defaultdict(list)

    def run(self, until_s: float) -> None:
        """Every step must do something while anybody waits; see Timed.step."""
        first = [(0.0, self._request(tenant)) for tenant in self.tenants]
        self.timed.serve(first, until_s=until_s, watch=self._watch)

    @property
    def bound(self) -> float:
        """Theorem 4.4: twice the larger of a longest prompt and, weighted, all tokens that a running batch can hold."""
        longest = max(tenant.num_prompt + tenant.num_output for tenant in self.tenants)
        num_begun = self.max_num_seqs * longest
        # Those that were preempted go on before others begin: then more is under way than the pool holds.
        if not self.timed.scheduler.stats().num_preemptions:
            num_begun = min(num_begun, self.num_slots)
        return 2 * max(longest, 2 * num_begun)

    def _tenant(self, name: str) -> _Tenant:
        rng = self.rng
        num_prompt = min(rng.choice((20, 100, 300, 1000)), int(0.6 * self.num_slots))
        num_output = min(rng.choice((5, 60, 128, 400)), int(0.3 * self.num_slots))
        most = min(4, self.max_num_seqs) if 4 * num_prompt < self.num_slots else 1
        return _Tenant(
            name,
            num_prompt,
            num_output,
            rng.choice((1, 1, 3)),
            rng.choice((1, 1, most)),
            rng.choice((1, 3, 20)),
        )

    def _request(self, tenant: _Tenant) -> SequenceSpec:
        return self._spec(
            tenant.name,
            self.rng.randint(-(-tenant.num_prompt // 2), tenant.num_prompt),
            self.rng.randint(-(-tenant.num_output // 2), tenant.num_output),
            tenant_weight=tenant.weight,
            candidates=range(tenant.num_candidates),
            priority=self.priority,
        )

    def _spec(self, tenant: str, num_prompt: int, num_output: int, **options: object) -> SequenceSpec:
        self.num_sent += 1
        return _spec(f"{tenant}-{self.num_sent}", num_prompt, num_output, tenant=tenant, **options)

    def _send(self, spec: SequenceSpec) -> None:
        self.timed.lives[spec.sequence_id] = Life(self.timed.clock())
        self.timed.scheduler.add(spec, SequenceRole.GENERATE)

    def _watch(self) -> None:
        self.timed.scheduler.check_invariants()
        num_waiting = Counter(each.spec.tenant for each in self.timed.scheduler._admission)
        for tenant in self.tenants:
            for _ in range(tenant.num_waiting - num_waiting[tenant.name]):
                self._send(self._request(tenant))
        if self.has_strangers and self.rng.random() < 0.05:
            lengths = self.rng.randint(1, min(600, self.num_slots // 3)), self.rng.randint(1, 60)
            priority, budget_s = self.rng.choice(list(Priority)), self.rng.choice((1.0, 5.0))
            stranger = f"stranger{self.num_sent}"
            self._send(self._spec(stranger, *lengths, priority=priority, time_budget_s=budget_s))
        services = self.timed.scheduler.accounts.services()
        for one, other in itertools.combinations([tenant.name for tenant in self.tenants], 2):
            self.leads[one, other].append(services[one] - services[other])


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_tenants_is_served_evenly_and_without_a_stall(seed: int) -> None:
    """Whatever they send, no two of them that always wait drift apart by more than the bound of the VTC paper."""
    mix = _Mix(seed)
    mix.run(12)
    assert max(max(leads) - min(leads) for leads in mix.leads.values()) <= mix.bound


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_mixes_of_tenants_are_served_evenly_and_without_a_stall(seed: int) -> None:
    """The same, longer and more often."""
    mix = _Mix(seed)
    mix.run(60)
    assert max(max(leads) - min(leads) for leads in mix.leads.values()) <= mix.bound


@pytest.mark.parametrize("priority", [Priority.STANDARD, Priority.REALTIME])
def test_a_large_prompt_is_not_starved_while_leases_come_and_go(priority: Priority) -> None:
    """On a prefill worker nothing is computed between two prompts; what leases hold comes back soon, and then the large one comes in, however urgent the small ones are."""
    bench = Bench(16, fast_lane_share=NO_LANE, max_num_batched_tokens=64, max_overtakes=3, aging_s=1.0)
    leases = deque[SequenceId]()
    large = make_spec("large", (2,) * 40, max_tokens=1, tenant="large", tenant_weight=3)
    for step in range(400):
        small = make_spec(f"small{step}", (3, step) * 5, max_tokens=1, tenant="small", priority=priority)
        leases.append(bench.add(small, SequenceRole.PREFILL_ONLY))
        if step == 10:
            bench.add(large, SequenceRole.PREFILL_ONLY)
        bench.step()
        bench.clock.advance(0.05)
        while len(leases) > 4 and bench.of(leases[0], Started):
            bench.release(leases.popleft())
    assert bench.of(large.sequence_id, Started)


def test_a_lease_without_an_end_costs_a_ninth_of_the_time_at_most() -> None:
    """What a large prompt waits for may never come back: the others are held up for a second in nine."""
    bench = Bench(16, fast_lane_share=NO_LANE, max_num_batched_tokens=64, max_overtakes=1, aging_s=1.0)
    bench.add(make_spec("held", (1,) * 40, max_tokens=1), SequenceRole.PREFILL_ONLY)
    bench.step()
    bench.add(make_spec("large", (2,) * 40, max_tokens=1), SequenceRole.PREFILL_ONLY)
    num_steps, num_computed = 0, 0
    waiting = set[SequenceId]()
    while bench.clock() < 190.0:
        if not waiting:
            small = make_spec(f"small{num_steps}", (3, num_steps), max_tokens=1)
            waiting.add(bench.add(small, SequenceRole.PREFILL_ONLY))
        num_computed += bool(bench.step().scheduled)
        num_steps += 1
        bench.clock.advance(0.2)
        for started in [each for each in waiting if bench.of(each, Started)]:
            bench.release(started)
            waiting.remove(started)
    assert 0.85 * num_steps < num_computed < 0.95 * num_steps
