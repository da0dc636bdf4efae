"""Single rules of the scheduler, each on a history so small that it ends otherwise without the rule."""

import pytest

from paceline.core.request import Priority, SequenceId, SequenceSpec
from paceline.engine.overload import BatchMode
from paceline.engine.sequence import SequenceRole
from tests.engine.harness import Bench
from tests.engine.test_scheduler_policies import NO_LANE, _spec
from tests.engine.timed import Timed
from tests.factories import make_id, make_spec

REALTIME, STANDARD, BATCH = Priority


def _bench(num_blocks: int, **config: object) -> Bench:
    """Without a cushion, turns by age, and anything that BATCH gives way to, unless a test asks for them."""
    plain = {"watermark": 0.0, "watermark_rise": 0.0, "aging_s": 1e6, "overload_wait_s": 1e6}
    return Bench(num_blocks, **(plain | config))  # type: ignore[arg-type] # each has its field's type


def _make(
    name: str, letter: int, num_prompt: int, max_tokens: int = 1, priority: Priority = STANDARD
) -> SequenceSpec:
    """Its prompt is of one letter, so that prompts of different letters share nothing."""
    return make_spec(name, (letter,) * num_prompt, max_tokens=max_tokens, priority=priority)


def _firsts(bench: Bench) -> list[str]:
    """Requests in the order of their first tokens."""
    names: list[str] = []
    for step in bench.computed():
        names += [name for name in step if bench.tokens(make_id(name)) and name not in names]
    return names


# -- the bar


def _two_bars(num_blocks: int, names: tuple[str, str]) -> Bench:
    """One in each lane that was passed by as often as may be; then somebody leaves, so that one of them fits, or both."""
    bench = _bench(num_blocks, max_num_batched_tokens=64, max_overtakes=1, fast_lane_prompt_tokens=24)
    bench.add(_make("leaves", 1, 4 * (num_blocks - 7), 60))
    bench.add(_make("stays", 2, 4, 40))
    bench.step()
    specs = {"long": _make("long", 3, 28), "short": _make("short", 4, 24)}
    for name in names:
        bench.add(specs[name])
    bench.step()
    tiny = bench.add(_make("tiny", 5, 1))
    bench.steps(2)
    assert bench.tokens(tiny)
    bench.release(make_id("leaves"))
    return bench


@pytest.mark.parametrize("names", [("long", "short"), ("short", "long")])
@pytest.mark.parametrize("num_blocks", [16, 20])
def test_two_bars_of_a_tenant_do_not_wait_for_each_other(num_blocks: int, names: tuple[str, str]) -> None:
    """One in each lane, both passed by as often as may be: whoever came first comes in first, beside one that goes on for long."""
    bench = _two_bars(num_blocks, names)
    bench.steps(6)
    assert not bench.end(make_id("stays"))
    assert [name for name in _firsts(bench) if name in names] == list(names)


def test_a_bar_of_the_other_lane_is_not_hidden_by_one_whose_turn_is_before_its_own() -> None:
    """In each step one with an earlier deadline heads the normal lane, and fits: the fast lane does not pass the one behind it for ever."""
    bench = _bench(
        32,
        max_num_batched_tokens=64,
        max_overtakes=3,
        policy="edf",
        fast_lane_prompt_tokens=4,
    )
    bench.add(_make("stays", 1, 40, 80))
    bench.step()
    large = bench.add(_make("large", 2, 88))
    bench.step()
    for number in range(12):
        bench.add(_make(f"short{number}", 3, 1))
        bench.add(make_spec(f"soon{number}", (4, number) * 3, max_tokens=1, time_budget_s=5.0))
        bench.step()
    num_short = sum("short" in name for name in _firsts(bench))
    assert not bench.tokens(large)
    assert 0 < num_short <= 3
    assert sum("soon" in name for name in _firsts(bench)) == 12


def test_one_that_lost_its_blocks_bars_its_own_lane_only() -> None:
    """While it waits for room, nobody of its lane passes it, whoever came first, and short requests do: they are served as before."""
    bench = _bench(32, policy="edf", max_num_seqs=2, fast_lane_prompt_tokens=4)
    normal = bench.add(_make("normal", 3, 5))
    back = bench.add(make_spec("back", (1,) * 60, max_tokens=60, time_budget_s=5.0))
    bench.add(_make("grows", 2, 40, 80, REALTIME))
    while not bench.scheduler.stats().num_preemptions:
        bench.step()
    num_before = len(bench.tokens(back))
    short = bench.add(_make("short", 4, 2))
    bench.steps(2)
    assert bench.tokens(short)
    assert not bench.tokens(normal)
    assert len(bench.tokens(back)) == num_before, "it waits"
    bench.release(make_id("grows"))
    bench.run()
    assert bench.tokens(normal)
    assert bench.end(back)


# -- looking again


@pytest.mark.parametrize("num_others", [0, 40])
def test_one_that_does_not_fit_comes_in_with_the_prefix_that_another_one_has_computed(
    num_others: int,
) -> None:
    """The room that it needs has become less, though nothing came free: it has its turn at once, however many do not fit beside it."""
    bench = _bench(16, max_num_batched_tokens=16, fast_lane_output_tokens=12)
    first = bench.add(_make("first", 1, 40, 23))
    bench.step()
    for number in range(num_others // 2):
        bench.add(make_spec(f"before{number}", (2, number) * 20, max_tokens=1))
    second = bench.add(make_spec("second", (1,) * 40 + (3,), max_tokens=1))
    for number in range(num_others // 2):
        bench.add(make_spec(f"behind{number}", (4, number) * 20, max_tokens=1))
    bench.step()
    assert not bench.tokens(second)
    bench.steps(4)
    assert not bench.end(first)
    assert bench.tokens(second)


# -- tenants


def test_a_newcomer_starts_level_with_the_last_one_that_waited() -> None:
    """Where nobody waits when it comes: having been away is no claim to what another tenant was served meanwhile."""
    timed = Timed(400, max_num_seqs=3, fast_lane_share=NO_LANE)
    alone = [
        (0.0, _spec("old", 20, 3000, tenant="old")),
        *[(0.3 * n, _spec(f"old-{n}", 20, 30, tenant="old")) for n in range(14)],
    ]
    new = [(4.0, _spec(f"new{n}", 20, 30, tenant="new")) for n in range(60)]
    old = [(4.0, _spec(f"old{n}", 20, 30, tenant="old")) for n in range(60)]
    timed.serve([*alone, *new, *old], until_s=5.5)
    num_tokens = {
        name: sum(
            token_s > 4.0
            for each, life in timed.lives.items()
            if each.request_id.startswith(name)
            for token_s in life.token_s
        )
        for name in ("old", "new")
    }
    assert 0.7 < num_tokens["old"] / num_tokens["new"] < 1.4


def test_candidates_that_wait_for_a_seat_are_no_tenant_that_has_waited_for_long() -> None:
    """Their request came long ago and has just had its turn: those of a tenant that was served less come before them."""
    bench = _bench(64, max_num_batched_tokens=64, max_num_seqs=2, fast_lane_share=NO_LANE, aging_s=30.0)
    many = bench.add(
        make_spec("many", (1,) * 40, max_tokens=3, candidates=tuple(range(6)), tenant="served more")
    )
    bench.clock.advance(40.0)
    for number in range(12):
        bench.add(make_spec(f"one{number}", (2, number), max_tokens=1, tenant="served less"))
    while not bench.tokens(make_id("one11")):
        bench.step()
    # All have the first one, which comes with the prompt.
    assert sum(len(bench.tokens(many, candidate)) > 1 for candidate in range(6)) == 2


def test_a_tenant_that_comes_after_an_idle_hour_has_not_waited_for_it() -> None:
    """Nobody has a turn by age who has just come: the tenant that was served less comes first."""
    bench = _bench(64, max_num_batched_tokens=64, max_num_seqs=1, fast_lane_share=NO_LANE, aging_s=30.0)
    bench.add(make_spec("held", (1,) * 60, max_tokens=1, tenant="served more"), SequenceRole.PREFILL_ONLY)
    bench.run()
    bench.clock.advance(3600.0)
    bench.add(make_spec("less", (9,), max_tokens=1, tenant="served less"))
    bench.add(make_spec("more", (8,), max_tokens=1, tenant="served more"))
    for number in range(12):
        bench.add(make_spec(f"less{number}", (2, number), max_tokens=1, tenant="served less"))
    bench.run()
    assert _firsts(bench)[-1] == "more"


# -- BATCH


def test_the_next_static_batch_waits_for_one_that_lost_its_blocks() -> None:
    """It has begun, and is not done before it has come back and ended: no other BATCH request comes in beside it."""
    bench = _bench(16, fast_lane_share=NO_LANE, max_num_batched_tokens=64, overload_wait_s=0.5)
    begun = bench.add(_make("begun", 1, 20, 20, BATCH))
    bench.add(_make("grows", 2, 28, 30))
    bench.add(_make("stays", 3, 1, 40, REALTIME))
    while not bench.scheduler.stats().num_preemptions:
        bench.step()
    _have_to_wait(bench)
    fresh = bench.add(_make("fresh", 5, 4, 2, BATCH))
    bench.release(make_id("grows"))
    _is_one_after_the_other(bench, begun, fresh)


def test_the_next_static_batch_waits_for_candidates_that_wait_for_a_seat() -> None:
    """Their request has begun, and is not done while any of them is not."""
    bench = _bench(
        64,
        fast_lane_share=NO_LANE,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        overload_wait_s=0.5,
    )
    begun = bench.add(make_spec("begun", (1,) * 4, max_tokens=8, priority=BATCH, candidates=tuple(range(5))))
    bench.step()
    bench.add(_make("stays", 3, 1, 40, REALTIME))
    bench.release(begun, 0)
    bench.steps(2)
    assert bench.tokens(make_id("stays"))
    _have_to_wait(bench)
    fresh = bench.add(_make("fresh", 5, 4, 2, BATCH))
    while not bench.end(begun, 3):
        bench.step()
    assert not bench.tokens(begun, 4)[1:], "it waits for a seat"
    _is_one_after_the_other(bench, begun, fresh, candidate=4)


def _have_to_wait(bench: Bench) -> None:
    """An urgent one has waited for so long that BATCH requests give way from now on."""
    urgent = bench.add(_make("urgent", 4, 60))
    bench.clock.advance(0.6)
    bench.step()
    assert bench.scheduler.stats().batch_mode is BatchMode.STATIC
    bench.release(urgent)


def _is_one_after_the_other(
    bench: Bench, begun: SequenceId, fresh: SequenceId, *, candidate: int = 0
) -> None:
    """One BATCH request ends before another one begins, and then that one does."""
    while not bench.end(begun, candidate):
        bench.step()
        assert not bench.tokens(fresh)
        assert bench.scheduler.stats().batch_mode is BatchMode.STATIC
    bench.steps(2)
    assert bench.tokens(fresh)
    assert not bench.end(make_id("stays"))


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_where_nobody_is_left_batch_gives_way_to_nobody(is_cancelled: bool) -> None:
    """That is said at once, with no further step: whoever looks sees the mode, and how often it has changed."""
    bench = _bench(16, fast_lane_share=NO_LANE, max_num_batched_tokens=64, overload_wait_s=0.5)
    running = bench.add(_make("running", 1, 20, 4))
    bench.step()
    _have_to_wait(bench)
    if is_cancelled:
        bench.release(running)
    while bench.scheduler.has_work():
        bench.step()
    for _ in range(2):
        stats = bench.scheduler.stats()
        assert (stats.batch_mode, stats.num_batch_switches) == (BatchMode.CONTINUOUS, 2)
        bench.step()


# -- victims


@pytest.mark.parametrize(("waited_s", "victim"), [(0.0, "old"), (6.0, "new")])
def test_one_that_came_long_ago_is_no_easier_victim_than_an_urgent_one(waited_s: float, victim: str) -> None:
    """It came in by its age, and must get somewhere: between it and a realtime one the policy decides, here for the youngest."""
    bench = _bench(12, victim="lifo", fast_lane_share=NO_LANE, aging_s=5.0)
    bench.add(_make("old", 1, 16, 30, BATCH))
    bench.clock.advance(waited_s)
    bench.add(_make("new", 2, 16, 30, REALTIME))
    while not bench.scheduler.stats().num_preemptions:
        bench.step()
    (lost,) = bench.scheduler._admission
    assert lost.sequence_id.request_id == victim
    bench.run()
    assert bench.end(make_id("old"))
    assert bench.end(make_id("new"))


def test_candidates_that_lose_their_blocks_together_give_back_what_they_share() -> None:
    """What only the victims hold comes free too: nobody else loses its blocks for that."""
    bench = _bench(9, victim="most-blocks", fast_lane_share=NO_LANE)
    bench.add(make_spec("pair", (1,) * 8, max_tokens=8, candidates=(0, 1)))
    bench.steps(2)
    many = bench.add(make_spec("many", (2,) * 8, max_tokens=3, candidates=tuple(range(6))))
    bench.step()
    # The six need a block each, and there are three; the two hold one each, and two together.
    bench.step()
    assert bench.scheduler.stats().num_preemptions == 2
    assert all(len(bench.tokens(many, candidate)) == 2 for candidate in range(6))
