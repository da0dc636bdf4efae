"""Remote prefix hits: what another worker has is asked for, when a sequence begins or comes back; the rest is computed."""

import pytest

from paceline.core.errors import DeadlineError
from paceline.core.kv_layout import KVGroup, View
from paceline.core.request import FirstToken, SequenceSpec
from paceline.engine.costs import PreemptionKind
from paceline.engine.events import BlocksReady, Failed, NewTokens, Recall, Reserved, Started
from paceline.engine.sequence import SequenceRole
from tests.engine.harness import Bench, oracle
from tests.factories import make_id, make_spec

# Five full blocks and a half; nine by the end of the output.
MOVED = make_spec("moved", tuple(range(20, 42)), max_tokens=14)
# Takes the whole pool in the end, and with it what is cached.
OLD = make_spec("old", (1, 2, 3), max_tokens=46)
NUM_BLOCKS = 12


def _bench(num_blocks: int = NUM_BLOCKS, **options: object) -> Bench:
    """A pool that does not hold both, where pulling again costs nothing."""
    bench = Bench(num_blocks, **{"prefix_pull": "auto", **options})  # type: ignore[arg-type] # each has its field's type
    bench.scheduler.costs.remote_pull_s = bench.scheduler.costs.remote_block_s = 1e-6
    bench.scheduler.costs.remote_hit_share = 1.0
    return bench


def _hand_over(bench: Bench, spec: SequenceSpec = MOVED) -> None:
    bench.add(spec, SequenceRole.AWAIT_KV)
    while not bench.of(spec.sequence_id, Reserved):
        bench.step()
    bench.commit(spec, *(FirstToken(oracle(spec, candidate=i)[0][0], None, None, i) for i in spec.candidates))


def _recalled(bench: Bench, spec: SequenceSpec = MOVED) -> Recall:
    """Steps until the sequence, which has lost its blocks meanwhile, waits for them."""
    for _ in range(300):
        if recalls := bench.of(spec.sequence_id, Recall):
            return recalls[-1]
        bench.step()
    raise AssertionError(f"nothing is recalled: {bench.scheduler.stats()}")


def _under_pressure(**options: object) -> tuple[Bench, Recall]:
    """A sequence that was handed over, lost its blocks, and waits for its prompt again."""
    bench = _bench(**options)  # type: ignore[arg-type] # num_blocks is not among them
    bench.add(OLD)
    bench.steps(2)
    _hand_over(bench)
    return bench, _recalled(bench)


def _require_outputs(bench: Bench, *specs: SequenceSpec) -> None:
    for spec in specs:
        begin = 1 if spec.sequence_id == MOVED.sequence_id else 0
        whole, reason = oracle(spec)
        assert bench.tokens(spec.sequence_id) == whole[begin:]
        assert bench.end(spec.sequence_id) is reason
    assert bench.pool.num_available == bench.pool.num_blocks


@pytest.mark.parametrize("num_blocks", range(6))
def test_the_output_is_the_same_however_much_comes(num_blocks: int) -> None:
    """A hit, a part of it, a miss: what has come is not computed again, and everything else is."""
    bench, recall = _under_pressure()
    assert (len(recall.block_ids), recall.num_held) == (5, 0)
    assert recall.token_ids == MOVED.prompt_ids[:20]
    num_steps = len(bench.outputs)
    num_before = bench.scheduler.stats().num_recomputed_tokens
    num_known = len(MOVED.prompt_ids) + 1 + len(bench.tokens(MOVED.sequence_id))
    bench.resume(recall, num_blocks)
    bench.run()
    _require_outputs(bench, MOVED, OLD)
    computed = sum(step.get("moved", 0) for step in bench.computed()[num_steps:])
    num_left = len(MOVED.prompt_ids) + MOVED.max_tokens - 1 - num_known
    assert computed == num_known - 4 * num_blocks + num_left
    assert bench.scheduler.stats().num_recomputed_tokens - num_before == num_known - 4 * num_blocks - 1
    assert bench.scheduler.stats().preemptions == {"recompute": 0, "swap": 0, "remote": 1}


def test_a_sequence_that_waits_for_its_prompt_holds_its_room_and_does_not_run() -> None:
    """It is parked with room for all of its tokens: nothing is scheduled, nobody else gets it, and it counts as waiting."""
    bench, _ = _under_pressure()
    bench.steps(3)
    assert not bench.scheduler.has_work()
    assert (bench.scheduler.stats().num_running, bench.scheduler.stats().num_waiting) == (0, 1)
    late = bench.add(make_spec("late", tuple(range(60, 60 + 4 * NUM_BLOCKS - 8))))
    bench.steps(3)
    assert bench.of(late, NewTokens) == []
    bench.release(late)
    bench.release(MOVED.sequence_id)
    assert bench.pool.num_available == NUM_BLOCKS


def test_what_has_come_is_published() -> None:
    """The next sequence with this prompt finds it here."""
    bench, recall = _under_pressure()
    bench.resume(recall, 5)
    bench.step()
    again = bench.add(make_spec("again", MOVED.prompt_ids))
    num_hits = bench.pool.stats().num_hits
    bench.run()
    assert bench.pool.stats().num_hits - num_hits == 5
    assert bench.tokens(again) == oracle(make_spec("again", MOVED.prompt_ids))[0]


def test_what_is_here_is_not_asked_for() -> None:
    """The beginning that is still cached is held; if all of the prompt's blocks are, nobody is asked."""
    bench = _bench()
    bench.add(OLD)
    bench.steps(2)
    _hand_over(bench)
    while bench.scheduler.stats().num_preemptions == 0:
        bench.step()
    bench.release(OLD.sequence_id)
    bench.run()
    assert bench.of(MOVED.sequence_id, Recall) == []
    assert bench.scheduler.stats().preemptions["remote"] == 1
    assert bench.tokens(MOVED.sequence_id) == oracle(MOVED)[0][1:]


def test_the_beginning_that_is_here_is_kept_whatever_comes() -> None:
    """Another sequence holds the first two blocks: they are not asked for, and a miss leaves them."""
    bench = _bench()
    bench.add(make_spec("old", (1, 2, 3), max_tokens=38))
    bench.steps(2)
    _hand_over(bench)
    keeper = make_spec("keeper", MOVED.prompt_ids[:9], max_tokens=3)
    while bench.scheduler.stats().num_preemptions == 0:
        bench.step()
    bench.add(keeper, SequenceRole.PREFILL_ONLY)
    recall = _recalled(bench)
    assert (len(recall.block_ids), recall.num_held) == (5, 2)
    bench.resume(recall, 2)
    bench.release(keeper.sequence_id)
    bench.run()
    assert bench.tokens(MOVED.sequence_id) == oracle(MOVED)[0][1:]


# -- the choice


def _preempted_as(bench: Bench) -> set[str]:
    bench.add(OLD)
    bench.steps(2)
    _hand_over(bench)
    while bench.scheduler.stats().num_preemptions == 0:
        bench.step()
    preemptions = bench.scheduler.stats().preemptions
    return {kind for kind, count in preemptions.items() if count}


def test_the_cheapest_kind_is_taken() -> None:
    """Pulling again where that is cheap; computing where pulls miss; copying where that is cheapest of all."""
    assert _preempted_as(_bench()) == {"remote"}
    misses = _bench()
    misses.scheduler.costs.remote_hit_share = 0.0
    assert _preempted_as(misses) == {"recompute"}
    swaps = _bench(num_swap_blocks=50)
    swaps.scheduler.costs.swap_block_s = 1e-9
    assert _preempted_as(swaps) == {"swap"}


def test_nothing_is_recalled_where_nobody_answers() -> None:
    """Without prefix_pull a sequence that was handed over is computed again."""
    assert _preempted_as(_bench(prefix_pull="never")) == {"recompute"}


def test_what_bypasses_the_cache_is_not_recalled() -> None:
    """It is in nobody's cache, so there is nobody to ask."""
    bench = _bench()
    bench.add(OLD)
    bench.steps(2)
    _hand_over(bench, make_spec("moved", MOVED.prompt_ids, max_tokens=14, bypass_cache=True))
    bench.run()
    assert bench.scheduler.stats().preemptions["remote"] == 0
    _require_outputs(bench, MOVED)


def test_a_prompt_that_was_computed_here_is_not_recalled() -> None:
    """Only what was handed over has another place to come from."""
    bench = _bench()
    bench.add(OLD)
    bench.add(MOVED)
    bench.run()
    stats = bench.scheduler.stats()
    assert stats.num_preemptions == stats.preemptions["recompute"] > 0


def test_a_model_with_windows_recalls_nothing() -> None:
    """Of a group with a window other blocks are needed than the owner would lend."""
    bench = _bench(16, groups=(KVGroup(), KVGroup(View(6))))
    bench.add(OLD)
    bench.steps(2)
    _hand_over(bench)
    bench.run()
    assert bench.scheduler.stats().num_preemptions > 0
    assert bench.scheduler.stats().preemptions["remote"] == 0


def test_how_it_went_is_counted_for_the_next_choice() -> None:
    """Share and time of what came; after enough misses a sequence is computed again without asking."""
    bench, recall = _under_pressure()
    bench.clock.advance(10.0)
    bench.resume(recall, 5)
    assert bench.scheduler.costs.remote_hit_share == pytest.approx(1.0)
    assert bench.scheduler.costs.pull_s(5) > 5.0
    bench, recall = _under_pressure()
    bench.resume(recall, 0)
    assert bench.scheduler.costs.remote_hit_share == pytest.approx(0.9)
    assert bench.scheduler.costs.pull_s(5) < 1e-4


def test_what_might_have_been_pulled_and_was_computed_is_noted() -> None:
    """So that pulls are tried again some time after misses; not for what was computed here from the beginning."""
    bench = _bench(victim="lifo")
    bench.scheduler.costs.remote_hit_share = 0.0
    _preempted_as(bench)
    bench.run()
    assert 0 < bench.scheduler.costs.remote_hit_share < 0.02
    local = _bench()
    local.scheduler.costs.remote_hit_share = 0.0
    local.add(OLD)
    local.add(MOVED)
    local.run()
    assert local.scheduler.stats().num_preemptions > 0
    assert local.scheduler.costs.remote_hit_share == 0


# -- ends


def test_a_release_while_it_waits_frees_everything() -> None:
    """Nothing is left of it, and a late answer is ignored."""
    bench, recall = _under_pressure()
    bench.release(MOVED.sequence_id)
    assert bench.pool.num_available == NUM_BLOCKS
    bench.scheduler.resume(recall.sequence_id, recall.candidate, 5)
    bench.scheduler.check_invariants()
    assert not bench.scheduler.has_work()


def test_only_what_waits_for_it_is_resumed() -> None:
    """An unknown sequence, another candidate, one that awaits its first KV, and a second answer change nothing."""
    bench, recall = _under_pressure()
    bench.scheduler.resume(make_id("unknown"), 0, 5)
    bench.scheduler.resume(recall.sequence_id, 7, 5)
    bench.scheduler.commit(recall.sequence_id, [FirstToken(9)])
    assert not bench.scheduler.has_work()
    bench.resume(recall, 5)
    bench.scheduler.resume(recall.sequence_id, recall.candidate, 0)
    parked = make_spec("parked", (50, 51, 52))
    bench.add(parked, SequenceRole.AWAIT_KV)
    bench.step()
    bench.scheduler.resume(parked.sequence_id, 0, 0)
    bench.run()
    assert bench.tokens(MOVED.sequence_id) == oracle(MOVED)[0][1:]
    assert bench.of(parked.sequence_id, NewTokens) == []


def test_a_deadline_that_passes_meanwhile_is_found_afterwards() -> None:
    """Somebody may still write: only once it is resumed it ends, in phase decode, without another token."""
    spec = make_spec("moved", MOVED.prompt_ids, max_tokens=14, time_budget_s=50.0)
    bench = _bench()
    bench.add(OLD)
    bench.steps(2)
    _hand_over(bench, spec)
    recall = _recalled(bench)
    num_tokens = len(bench.tokens(spec.sequence_id))
    bench.clock.advance(60.0)
    bench.steps(2)
    assert bench.end(spec.sequence_id) is None
    bench.resume(recall, 5)
    bench.step()
    error = bench.end(spec.sequence_id)
    assert isinstance(error, DeadlineError)
    assert error.phase == "decode"
    assert len(bench.tokens(spec.sequence_id)) == num_tokens
    assert bench.pool.num_available == NUM_BLOCKS


def test_candidates_are_recalled_each_for_itself() -> None:
    """Each is asked for, resumed and cancelled alone; nobody's deadline is forgotten with another one."""
    spec = make_spec(
        "moved", MOVED.prompt_ids, max_tokens=14, candidates=(0, 1), time_budget_s=50.0, ignore_eos=True
    )
    bench = _bench(victim="lifo")
    bench.add(OLD)
    bench.steps(2)
    _hand_over(bench, spec)
    first = _recalled(bench, spec)
    # The other one lost only what it did not share, and waits for its turn.
    assert bench.scheduler.stats().preemptions == {"recompute": 1, "swap": 0, "remote": 1}
    bench.clock.advance(60.0)
    bench.step()
    assert bench.end(spec.sequence_id, first.candidate) is None
    bench.release(spec.sequence_id, first.candidate)
    bench.step()
    assert isinstance(bench.end(spec.sequence_id, 1 - first.candidate), DeadlineError)
    bench.run()
    assert bench.pool.num_available == NUM_BLOCKS


def test_every_kind_has_a_count() -> None:
    """Stats name all three."""
    assert set(_bench().scheduler.stats().preemptions) == {kind.value for kind in PreemptionKind}


# -- newcomers


def _hinted(bench: Bench, num_remote_tokens: int, **options: object) -> SequenceSpec:
    """One whose beginning another worker has, as far as anybody knows; after its first step."""
    spec = make_spec("hinted", tuple(range(20, 42)), **options)  # type: ignore[arg-type] # each has its field's type
    bench.add(spec, num_remote_tokens=num_remote_tokens)
    bench.step()
    return spec


@pytest.mark.parametrize("num_blocks", range(6))
def test_a_newcomer_gets_what_another_worker_has(num_blocks: int) -> None:
    """It is asked for before anything is computed; what comes counts as cached, and only the rest is computed."""
    bench = _bench(prefix_pull="always")
    spec = _hinted(bench, 20)
    (recall,) = bench.of(spec.sequence_id, Recall)
    assert (len(recall.block_ids), recall.num_held, recall.token_ids) == (5, 0, spec.prompt_ids[:20])
    bench.resume(recall, num_blocks)
    bench.run()
    assert bench.tokens(spec.sequence_id) == oracle(spec)[0]
    started = bench.one(spec.sequence_id, Started)
    assert (started.num_cached_tokens, started.num_pulled_blocks) == (4 * num_blocks, num_blocks)
    assert bench.computed()[1] == {"hinted": min(16, 22 - 4 * num_blocks)}


def test_a_prompt_that_another_worker_has_whole_keeps_a_token_to_compute() -> None:
    """What comes after the prompt is sampled from its last token's output, so the block of that one is not asked for."""
    bench = _bench(prefix_pull="always")
    spec = make_spec("hinted", tuple(range(20, 40)))
    bench.add(spec, SequenceRole.PREFILL_ONLY, num_remote_tokens=20)
    bench.step()
    recall = bench.one(spec.sequence_id, Recall)
    assert len(recall.block_ids) == 4
    bench.resume(recall, 4)
    bench.run()
    assert bench.tokens(spec.sequence_id) == oracle(spec)[0][:1]
    assert sum(len(event.blocks) for event in bench.of(spec.sequence_id, BlocksReady)) == 5


def test_only_what_is_not_here_is_asked_for() -> None:
    """The beginning that is cached here is held; where all is, or as much as elsewhere, nobody is asked."""
    bench = _bench(prefix_pull="always")
    bench.add(make_spec("first", tuple(range(20, 30)), max_tokens=1))
    bench.run()
    spec = _hinted(bench, 20)
    recall = bench.one(spec.sequence_id, Recall)
    assert (len(recall.block_ids), recall.num_held) == (5, 2)
    bench.resume(recall, 5)
    bench.run()
    again = make_spec("again", spec.prompt_ids)
    bench.add(again, num_remote_tokens=20)
    bench.run()
    assert bench.of(again.sequence_id, Recall) == []
    assert bench.tokens(again.sequence_id) == oracle(again)[0]


@pytest.mark.parametrize(
    ("options", "policies"),
    [
        ({"bypass_cache": True}, {}),
        ({"prompt_logprobs": True, "num_top_logprobs": 0}, {}),
        ({}, {"prefix_pull": "never"}),
        ({}, {"groups": (KVGroup(), KVGroup(View(6)))}),
    ],
    ids=["bypass", "prompt_logprobs", "never", "windows"],
)
def test_what_must_not_or_cannot_be_pulled_is_computed(
    options: dict[str, object], policies: dict[str, object]
) -> None:
    """The hint is left alone then; without such a reason it is followed."""
    bench = _bench(32, **{"prefix_pull": "always", **policies})
    spec = _hinted(bench, 20, **options)
    bench.run()
    assert bench.of(spec.sequence_id, Recall) == []
    followed = _bench(32, prefix_pull="always")
    assert len(followed.of(_hinted(followed, 20).sequence_id, Recall)) == 1


def test_a_pull_that_costs_more_than_it_saves_is_not_made() -> None:
    """And what might have been pulled is noted, so that it is tried again some time."""
    bench = _bench()
    bench.scheduler.costs.remote_pull_s = 10.0
    bench.scheduler.costs.remote_hit_share = 0.0
    spec = _hinted(bench, 20)
    bench.run()
    assert bench.of(spec.sequence_id, Recall) == []
    assert bench.scheduler.costs.remote_hit_share > 0


def test_whoever_pulls_is_charged_for_what_it_computes() -> None:
    """A tenant pays for the tokens of its prompt that were left to compute, not for those that came."""
    bench = _bench(prefix_pull="always")
    spec = _hinted(bench, 20, max_tokens=1, tenant="a")
    bench.add(make_spec("other", max_tokens=40, tenant="b"))
    bench.resume(bench.one(spec.sequence_id, Recall), 5)
    (sequence,) = bench.scheduler._members.families[spec.sequence_id]
    assert sequence.account.service == 2.0


@pytest.mark.parametrize("answer", ["resumed", "cancelled"])
def test_while_one_candidate_waits_for_its_prompt_the_others_end_with_the_deadline(answer: str) -> None:
    """Nothing is computed after it; the request ends as soon as nobody fills its blocks any more."""
    spec = make_spec("both", MOVED.prompt_ids, max_tokens=14, candidates=(0, 1), time_budget_s=50.0)
    held = make_spec("held", tuple(range(100, 132)))
    bench = _bench(NUM_BLOCKS + 9, victim="lifo")
    bench.add(held, SequenceRole.PREFILL_ONLY)
    bench.steps(4)
    bench.add(OLD)
    bench.steps(2)
    _hand_over(bench, spec)
    recall = _recalled(bench, spec)
    for each in (held, OLD):
        bench.release(each.sequence_id)
    bench.steps(4)
    assert _num_decoding(bench, spec) == 1
    bench.clock.advance(60.0)
    num_tokens = len(bench.of(spec.sequence_id, NewTokens))
    bench.steps(3)
    assert _num_decoding(bench, spec) == 0
    assert bench.of(spec.sequence_id, Failed) == []
    if answer == "resumed":
        bench.resume(recall, 5)
    else:
        bench.release(spec.sequence_id, recall.candidate)
    assert bench.scheduler.has_work()
    bench.run()
    (failed,) = bench.of(spec.sequence_id, Failed)
    assert isinstance(failed.error, DeadlineError)
    assert len(bench.of(spec.sequence_id, NewTokens)) == num_tokens
    assert bench.pool.num_available == bench.pool.num_blocks


def _num_decoding(bench: Bench, spec: SequenceSpec) -> int:
    return sum(each.sequence_id == spec.sequence_id for each in bench.scheduler._running.decoding)
