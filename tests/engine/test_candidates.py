"""Several candidates of one prompt: it is computed once, its blocks are shared, and nobody writes into another's KV."""

import pytest

from paceline.core.errors import DeadlineError
from paceline.core.kv_layout import KVGroup, View
from paceline.core.request import FinishReason, FirstToken, SamplingParams, SequenceSpec
from paceline.engine.events import BlocksReady, Failed, NewTokens, PromptScored, Reserved, Started
from paceline.engine.sequence import SequenceRole
from tests.engine.harness import Bench, oracle, places
from tests.factories import BLOCK_SIZE, GREEDY, make_spec

SEEDED = SamplingParams(seed=7)
# Five blocks, the last of which is half full.
PROMPT = tuple(range(18))
WINDOW = KVGroup(View(6))
GROUPS = {"whole": (KVGroup(),), "a window": (WINDOW,), "both": (KVGroup(), WINDOW, WINDOW)}


def _spec(
    name: str = "family",
    prompt_ids: tuple[int, ...] = PROMPT,
    candidates: tuple[int, ...] = (0, 1, 2),
    **options: object,
) -> SequenceSpec:
    return make_spec(name, prompt_ids, candidates=candidates, **({"sampling": SEEDED} | options))  # type: ignore[arg-type] # each has its field's type


def _num_held(bench: Bench) -> int:
    return bench.pool.num_blocks - bench.pool.num_available


def _require_oracle(bench: Bench, spec: SequenceSpec, groups: tuple[KVGroup, ...] = GROUPS["whole"]) -> None:
    for candidate in spec.candidates:
        expected = oracle(spec, eos=bench.eos, groups=groups, candidate=candidate)
        assert (
            bench.tokens(spec.sequence_id, candidate),
            bench.end(spec.sequence_id, candidate),
        ) == expected
    assert bench.pool.num_available == bench.pool.num_blocks


@pytest.mark.parametrize("layers", GROUPS)
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 16, 18])
def test_each_candidate_is_what_it_would_be_alone(num_prompt: int, layers: str) -> None:
    """Whether or not the prompt fills its last block: the oracle's tokens, and nothing is held in the end."""
    groups, spec = GROUPS[layers], _spec(prompt_ids=PROMPT[:num_prompt])
    bench = Bench(40, groups=groups)
    bench.add(spec)
    bench.run()
    _require_oracle(bench, spec, groups)
    alone = Bench(40, groups=groups)
    for candidate in spec.candidates:
        alone.add(_spec(f"alone {candidate}", PROMPT[:num_prompt], (candidate,)))
        alone.run()
        sequence_id = _spec(f"alone {candidate}").sequence_id
        assert alone.tokens(sequence_id, candidate) == bench.tokens(spec.sequence_id, candidate)


def test_candidates_differ_by_chance_alone() -> None:
    """Where chance counts they say different things; greedy ones all say the same."""
    bench = Bench(40)
    seeded, greedy = _spec("seeded"), _spec("greedy", sampling=GREEDY)
    for spec in (seeded, greedy):
        bench.add(spec)
    bench.run()
    assert len({tuple(bench.tokens(seeded.sequence_id, i)) for i in range(3)}) == 3
    assert len({tuple(bench.tokens(greedy.sequence_id, i)) for i in range(3)}) == 1


@pytest.mark.parametrize(("num_prompt", "num_copies"), [(16, 0), (18, 2)])
def test_the_prompt_is_computed_once_and_only_a_partial_block_is_copied(
    num_prompt: int, num_copies: int
) -> None:
    """Three candidates hold the prompt's blocks once, and two more where the last one is not full."""
    bench, spec = Bench(40, max_num_batched_tokens=8), _spec(prompt_ids=PROMPT[:num_prompt])
    sequence_id = bench.add(spec)
    while not bench.of(sequence_id, NewTokens):
        bench.step()
    assert _num_held(bench) == -(-num_prompt // BLOCK_SIZE) + num_copies
    bench.run()
    num_computed = sum(len(item.token_ids) for output in bench.outputs for item in output.scheduled)
    assert num_computed == num_prompt + 3 * (spec.max_tokens - 1)
    assert bench.scheduler.stats().num_preemptions == 0


def test_one_candidate_s_cancel_frees_what_only_it_held() -> None:
    """The others go on undisturbed, and the prompt's blocks stay."""
    bench, spec = Bench(40), _spec(max_tokens=12)
    sequence_id = bench.add(spec)
    bench.steps(3)
    num_held = _num_held(bench)
    bench.release(sequence_id, 1)
    assert _num_held(bench) == num_held - 1
    bench.run()
    for candidate in (0, 2):
        assert bench.tokens(sequence_id, candidate) == oracle(spec, candidate=candidate)[0]
    assert bench.end(sequence_id, 1) is None
    assert bench.pool.num_available == bench.pool.num_blocks


def test_candidates_cancelled_before_the_prompt_is_computed_never_begin() -> None:
    """The family goes on with the others; with the last one it is over."""
    bench, spec = Bench(40, max_num_batched_tokens=4), _spec()
    sequence_id = bench.add(spec)
    bench.step()
    bench.release(sequence_id, 0)
    bench.run()
    assert {event.candidate for event in bench.of(sequence_id, NewTokens)} == {1, 2}
    bench.add(_spec("next"))
    bench.step()
    for candidate in range(3):
        bench.release(_spec("next").sequence_id, candidate)
    assert not bench.scheduler.has_work()
    assert bench.pool.num_available == bench.pool.num_blocks


def test_a_cancel_of_the_sequence_ends_all_candidates() -> None:
    """Whatever each of them holds is free at once."""
    bench = Bench(40)
    sequence_id = bench.add(_spec())
    bench.steps(3)
    bench.release(sequence_id)
    assert bench.pool.num_available == bench.pool.num_blocks
    assert not bench.scheduler.has_work()


def test_a_deadline_is_one_failure_of_the_whole_family() -> None:
    """Those that have ended by then keep their end."""
    bench, ends_soon = Bench(40), oracle(_spec(max_tokens=20), candidate=1)[0][2]
    sequence_id = bench.add(_spec(time_budget_s=1.0, max_tokens=20, stop_token_ids=(ends_soon,)))
    bench.steps(6)
    bench.clock.advance(1.0)
    bench.step()
    assert isinstance(bench.one(sequence_id, Failed).error, DeadlineError)
    assert bench.end(sequence_id, 1) is FinishReason.STOP
    assert bench.pool.num_available == bench.pool.num_blocks


def test_an_end_at_the_first_token_makes_no_sequence() -> None:
    """A candidate whose first token ends it is not forked; with max_tokens 1 none is."""
    first = oracle(_spec(), candidate=1)[0][0]
    bench = Bench(40, eos=(first,))
    spec = _spec("eos first")
    sequence_id = bench.add(spec)
    while not bench.of(sequence_id, NewTokens):
        bench.step()
    assert bench.end(sequence_id, 1) is FinishReason.EOS
    assert _num_held(bench) == 5 + 1
    bench.run()
    _require_oracle(bench, spec)
    one = _spec("one token", (5, 6, 7), max_tokens=1)
    bench.add(one)
    bench.run()
    _require_oracle(bench, one)


def test_without_room_for_the_copies_candidates_wait_and_are_computed_again() -> None:
    """A pool that holds one of them at a time gives the same tokens, one after the other."""
    spec = _spec(max_tokens=6)
    bench = Bench(num_blocks=6)
    bench.add(spec)
    bench.run()
    _require_oracle(bench, spec)
    assert bench.scheduler.stats().num_preemptions > 0


def test_a_preempted_candidate_comes_back_by_itself() -> None:
    """Where the pool is too small for all of them to grow, each ends as if it had been alone."""
    spec = _spec(max_tokens=20, candidates=(0, 1, 2, 3))
    bench = Bench(num_blocks=16)
    bench.add(spec)
    bench.run()
    _require_oracle(bench, spec)
    assert bench.scheduler.stats().num_preemptions > 0


def test_more_candidates_than_seats_take_turns() -> None:
    """A family may be larger than max_num_seqs: no step runs more, and all candidates end."""
    spec = _spec(candidates=tuple(range(5)))
    bench = Bench(40, max_num_seqs=2)
    bench.add(spec)
    bench.run()
    _require_oracle(bench, spec)
    assert max(len(output.scheduled) for output in bench.outputs) == 2


def test_candidates_take_seats_before_they_part() -> None:
    """A family of three leaves one of four seats to others while its prompt is computed."""
    bench = Bench(40, max_num_seqs=4, max_num_batched_tokens=64, fast_lane_share=0.0)
    bench.add(_spec())
    for name in ("first", "second"):
        bench.add(make_spec(name))
    bench.step()
    assert bench.computed() == [{"family": 18, "first": 5}]


def test_a_prefill_gives_a_token_to_each_candidate_and_holds_its_blocks_once() -> None:
    """One set of blocks to pull, the prompt's scores once, and three first tokens."""
    bench, spec = Bench(40), _spec(prompt_logprobs=True)
    sequence_id = bench.add(spec, SequenceRole.PREFILL_ONLY)
    bench.run()
    new = bench.of(sequence_id, NewTokens)
    assert [event.candidate for event in new] == [0, 1, 2]
    assert [event.token_ids[0] for event in new] == [oracle(spec, candidate=i)[0][0] for i in range(3)]
    assert bench.one(sequence_id, Started).num_blocks == 5
    assert sum(len(event.blocks) for event in bench.of(sequence_id, BlocksReady)) == 5
    assert sum(len(event.logprobs) for event in bench.of(sequence_id, PromptScored)) == 17
    assert _num_held(bench) == 5
    bench.release(sequence_id)
    assert bench.pool.num_available == bench.pool.num_blocks


@pytest.mark.parametrize("layers", GROUPS)
def test_one_hand_over_begins_all_candidates(layers: str) -> None:
    """Blocks are reserved once; the commit forks those that go on, and says nothing of those that do not."""
    groups = GROUPS[layers]
    spec = _spec(candidates=(0, 1, 2, 5))
    outputs = {i: oracle(spec, groups=groups, candidate=i)[0] for i in spec.candidates}
    bench = Bench(60, groups=groups)
    sequence_id = bench.add(spec, SequenceRole.AWAIT_KV)
    bench.step()
    num_moved = len(bench.one(sequence_id, Reserved).block_ids)
    assert num_moved == len(places(groups, len(PROMPT)))
    bench.commit(
        spec,
        FirstToken(outputs[0][0], candidate=0),
        FirstToken(outputs[1][0], FinishReason.EOS, candidate=1),
        FirstToken(outputs[5][0], candidate=5),
    )
    bench.run()
    for candidate in (0, 5):
        assert bench.tokens(sequence_id, candidate) == outputs[candidate][1:]
    assert {event.candidate for event in bench.of(sequence_id, NewTokens)} == {0, 5}
    assert bench.pool.num_available == bench.pool.num_blocks


def test_a_commit_with_nobody_left_frees_the_blocks() -> None:
    """All first tokens were the last ones."""
    bench, spec = Bench(40), _spec()
    bench.add(spec, SequenceRole.AWAIT_KV)
    bench.step()
    bench.commit(spec, *(FirstToken(1, FinishReason.EOS, candidate=i) for i in range(3)))
    assert bench.pool.num_available == bench.pool.num_blocks
    assert not bench.scheduler.has_work()


def test_what_a_candidate_generates_is_cached_under_its_own_tokens() -> None:
    """A next turn on one candidate's answer finds the prompt and that answer."""
    bench, spec = Bench(60), _spec(max_tokens=11)
    sequence_id = bench.add(spec)
    bench.run()
    for candidate in range(3):
        answer = tuple(bench.tokens(sequence_id, candidate))
        later = bench.add(make_spec(f"turn {candidate}", (*PROMPT, *answer, 1)))
        bench.run()
        assert bench.one(later, Started).num_cached_tokens == 28
