"""Who runs in each step, with the fake runner."""

import itertools
from collections.abc import Sequence

import pytest

from paceline.core.block_hash import BlockHash, chain_root, hash_block, hash_full_blocks
from paceline.core.cache_scope import CacheScope
from paceline.core.errors import DeadlineError
from paceline.core.request import FinishReason, FirstToken, Priority, SamplingParams
from paceline.engine.events import BlocksReady, Failed, NewTokens, Progress, Reserved, Started
from paceline.engine.sequence import SequenceRole
from tests.engine.harness import Bench, oracle
from tests.factories import make_id, make_spec

PROMPT = tuple(range(20, 40))  # 5 blocks


def _finish(bench: Bench, *names: str) -> None:
    bench.run()
    for name in names:
        assert bench.end(make_id(name)) is not None


# -- budget, chunks, mixed batches


def test_one_sequence_gives_the_oracle_s_tokens() -> None:
    """A prompt, then a token a step, until max_tokens; the end says LENGTH and all blocks are free."""
    bench, spec = Bench(), make_spec()
    sequence_id = bench.add(spec)
    assert bench.run() == spec.max_tokens
    assert (bench.tokens(sequence_id), bench.end(sequence_id)) == oracle(spec)
    assert bench.end(sequence_id) is FinishReason.LENGTH
    assert bench.pool.num_available == bench.pool.num_blocks


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 19, 20, 64])
def test_a_long_prompt_is_computed_in_chunks_within_the_budget(chunk: int) -> None:
    """The chunks fill the budget and cover the prompt once; the size of chunks changes no token."""
    bench, spec = Bench(max_num_batched_tokens=chunk), make_spec(prompt_ids=PROMPT)
    sequence_id = bench.add(spec)
    bench.run()
    prefill = [item for output in bench.outputs for item in output.scheduled if item.end <= len(PROMPT)]
    assert [item.start for item in prefill] == list(range(0, len(PROMPT), chunk))
    assert tuple(token_id for item in prefill for token_id in item.token_ids) == PROMPT
    assert [bool(item.samples) for item in prefill] == [False] * (len(prefill) - 1) + [True]
    assert bench.tokens(sequence_id) == oracle(spec)[0]


def test_a_long_prompt_says_how_far_it_is() -> None:
    """After each chunk but the last one, of which the first token tells; a short prompt says nothing, nor does one that others read."""
    bench = Bench(num_blocks=32, max_num_batched_tokens=8)
    long, short = bench.add(make_spec("long", tuple(range(20)))), make_spec("short", (1, 2, 3))
    bench.run()
    assert [event.num_computed_tokens for event in bench.of(long, Progress)] == [8, 16]
    bench.add(short)
    read = bench.add(make_spec("read", tuple(range(20, 40))), SequenceRole.PREFILL_ONLY)
    bench.run()
    assert bench.of(short.sequence_id, Progress) == bench.of(read, Progress) == []


def test_a_preempted_prompt_does_not_go_back() -> None:
    """What is computed again, output included and in chunks, was told before."""
    bench = Bench(num_blocks=6, max_num_batched_tokens=2)
    old = bench.add(make_spec("old", (0, 0, 0), max_tokens=14))
    young = bench.add(make_spec("young", (1, 1, 1), max_tokens=14))
    bench.run()
    assert bench.scheduler.stats().num_preemptions > 0
    told = [event.num_computed_tokens for each in (old, young) for event in bench.of(each, Progress)]
    assert told == [2, 1, 2], told


def test_decodes_come_first_and_a_chunk_takes_what_is_left() -> None:
    """A step is mixed: each running sequence gets its token before a long prompt gets the rest of the budget."""
    bench = Bench(max_num_batched_tokens=8)
    bench.add(make_spec("a", (1, 2, 3)))
    bench.add(make_spec("b", (4, 5, 6)))
    bench.step()
    bench.add(make_spec("long", PROMPT))
    bench.steps(2)
    assert bench.computed() == [{"a": 3, "b": 3}, {"a": 1, "b": 1, "long": 6}, {"a": 1, "b": 1, "long": 6}]
    _finish(bench, "a", "b", "long")


def test_a_running_prompt_comes_before_a_waiting_one() -> None:
    """The chunks of one prompt are finished before the next prompt starts; short remainders share a step."""
    bench = Bench(max_num_batched_tokens=8)
    bench.add(make_spec("first", PROMPT))
    bench.add(make_spec("second", (1, 2, 3)))
    bench.steps(3)
    assert bench.computed() == [{"first": 8}, {"first": 8}, {"first": 4, "second": 3}]


def test_sequences_of_one_step_wait_for_no_more_than_max_num_seqs() -> None:
    """No more than max_num_seqs run at once, and a waiting one takes the place of one that ends."""
    bench = Bench(max_num_seqs=2)
    for name, max_tokens in (("a", 1), ("b", 3), ("c", 2)):
        bench.add(make_spec(name, max_tokens=max_tokens))
    bench.steps(2)
    assert [sorted(step) for step in bench.computed()] == [["a", "b"], ["b", "c"]]
    _finish(bench, "a", "b", "c")


def test_sequences_that_fit_are_admitted_in_the_order_in_which_they_came() -> None:
    """First come, first served, where there is room for one after the other."""
    bench = Bench(max_num_seqs=1)
    names = ("first", "second", "third")
    for name in names:
        bench.add(make_spec(name, max_tokens=2))
    bench.run()
    assert [next(iter(step)) for step in bench.computed()[:-1]] == ["first"] * 2 + ["second"] * 2 + [
        "third"
    ] * 2


# -- ends


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_output_ends_at_max_tokens(max_tokens: int) -> None:
    """As many tokens as asked for, and not one computed beyond."""
    bench = Bench()
    sequence_id = bench.add(make_spec(max_tokens=max_tokens))
    assert bench.run() == max_tokens
    assert len(bench.tokens(sequence_id)) == max_tokens
    assert bench.end(sequence_id) is FinishReason.LENGTH


def test_an_eos_token_ends_the_output_unless_it_is_ignored() -> None:
    """The same sequence ends at its third token, or goes past it with ignore_eos."""
    spec = make_spec()
    third = oracle(spec)[0][2]
    assert third not in oracle(spec)[0][:2]
    bench = Bench(eos=[third])
    ends = bench.add(spec)
    goes_on = bench.add(make_spec("other", ignore_eos=True))
    bench.run()
    assert (bench.tokens(ends), bench.end(ends)) == (oracle(spec)[0][:3], FinishReason.EOS)
    assert (bench.tokens(goes_on), bench.end(goes_on)) == (oracle(spec)[0], FinishReason.LENGTH)


def test_a_stop_token_ends_the_output() -> None:
    """A stop token counts also where EOS is ignored, and is named before EOS where it is both."""
    second = oracle(make_spec())[0][1]
    spec = make_spec(stop_token_ids=(second,), ignore_eos=True)
    bench = Bench(eos=[second])
    sequence_id = bench.add(spec)
    bench.run()
    assert (bench.tokens(sequence_id), bench.end(sequence_id)) == (
        oracle(make_spec())[0][:2],
        FinishReason.STOP,
    )


def test_earlier_output_counts_for_limits_and_positions() -> None:
    """A later attempt continues the numbers and stops where the first one would have."""
    whole = oracle(make_spec())[0]
    bench = Bench()
    sequence_id = bench.add(make_spec(attempt=1, output_ids=tuple(whole[:3])))
    bench.run()
    assert bench.of(sequence_id, NewTokens)[0].first_index == 3
    assert bench.tokens(sequence_id) == whole[3:]


def test_sampling_differs_by_seed_and_not_by_neighbours() -> None:
    """Two seeds give two outputs; a seed gives its own output alone and in company."""
    params = [SamplingParams(seed=seed) for seed in (1, 2)]
    specs = [make_spec(f"seed-{p.seed}", sampling=p) for p in params]
    bench = Bench()
    ids = [bench.add(spec) for spec in specs]
    bench.run()
    assert [bench.tokens(sequence_id) for sequence_id in ids] == [oracle(spec)[0] for spec in specs]
    assert bench.tokens(ids[0]) != bench.tokens(ids[1])


# -- the prefix cache


def test_a_second_prompt_computes_only_what_the_first_did_not() -> None:
    """The blocks of a shared prefix are hit, and the sequence says how many tokens came from the cache."""
    bench = Bench()
    first = bench.add(make_spec("first", PROMPT))
    bench.run()
    second = bench.add(make_spec("second", (*PROMPT[:14], 1, 2)))
    bench.step()
    assert bench.computed()[-1] == {"second": 4}
    assert bench.one(first, Started).num_cached_tokens == 0
    assert bench.one(second, Started).num_cached_tokens == 12
    bench.run()
    assert bench.tokens(second) == oracle(make_spec(prompt_ids=(*PROMPT[:14], 1, 2)))[0]


def test_a_full_hit_still_computes_the_last_token() -> None:
    """Even when every block of the prompt is cached, the last block is computed, since a token is sampled from it."""
    bench = Bench(max_num_batched_tokens=32)
    for name in ("first", "second"):
        bench.add(make_spec(name, PROMPT))
        bench.run()
    assert bench.one(make_id("second"), Started).num_cached_tokens == len(PROMPT) - 4
    assert (
        bench.tokens(make_id("second")) == bench.tokens(make_id("first")) == oracle(make_spec("x", PROMPT))[0]
    )


def test_a_prompt_one_longer_than_its_blocks_hits_all_of_them() -> None:
    """The twin of the full hit: with one more token the last block needs no computing."""
    bench = Bench(max_num_batched_tokens=32)
    bench.add(make_spec("first", PROMPT))
    bench.run()
    sequence_id = bench.add(make_spec("second", (*PROMPT, 7)))
    bench.step()
    assert bench.one(sequence_id, Started).num_cached_tokens == len(PROMPT)
    assert bench.computed()[-1] == {"second": 1}


def test_output_is_cached_like_a_prompt() -> None:
    """The next turn of a chat computes only what is new: the blocks of the first answer are hit too."""
    bench = Bench(max_num_batched_tokens=64)
    first = make_spec("first", PROMPT[:6], max_tokens=8)
    bench.add(first)
    bench.run()
    known = (*first.prompt_ids, *oracle(first)[0])  # 14 tokens, of which 13 have KV
    sequence_id = bench.add(make_spec("second", (*known, 1, 2, 3)))
    bench.step()
    assert bench.one(sequence_id, Started).num_cached_tokens == 12


def test_scopes_do_not_share_the_cache() -> None:
    """Another scope misses and the same scope hits."""
    bench = Bench()
    cached = []
    for name, scope in (("a", "tenant"), ("b", "other"), ("c", "tenant")):
        sequence_id = bench.add(make_spec(name, PROMPT, cache_scope=scope))
        bench.run()
        cached.append(bench.one(sequence_id, Started).num_cached_tokens)
    assert cached == [0, 0, 16]


def test_scopes_share_what_is_public_in_both() -> None:
    """Another tenant hits the public blocks and computes the others; the same tenant hits both; tokens are the oracle's."""
    bench = Bench()
    cached = []
    for name, scope in (
        ("a", CacheScope("anne", 8)),
        ("b", CacheScope("bert", 8)),
        ("c", CacheScope("anne", 8)),
        ("d", CacheScope("bert")),
        ("e", CacheScope()),
    ):
        sequence_id = bench.add(make_spec(name, PROMPT, cache_scope=str(scope)))
        bench.run()
        cached.append(bench.one(sequence_id, Started).num_cached_tokens)
        assert bench.tokens(sequence_id) == oracle(make_spec(prompt_ids=PROMPT))[0]
    assert cached == [0, 8, 16, 0, 8]
    bench.pool.check_invariants([])


def test_the_blocks_of_a_scope_have_the_names_that_the_router_asks_for() -> None:
    """Engine and router hash alike, also behind what is public."""
    bench, scope = Bench(), str(CacheScope("anne", 8))
    bench.add(make_spec("a", PROMPT, cache_scope=scope))
    bench.run()
    published = {entry.block_hash for entry in bench.pool.take_changes().published}
    assert set(hash_full_blocks(chain_root(b"model", scope), PROMPT, 4, scope)) <= published


def test_bypass_neither_reads_nor_fills_the_cache() -> None:
    """A bypassing request leaves nothing behind and takes nothing; an ordinary one does both."""
    bench = Bench()
    cached = []
    for name, bypass in (("a", True), ("b", False), ("c", True), ("d", False)):
        sequence_id = bench.add(make_spec(name, PROMPT, bypass_cache=bypass))
        bench.run()
        cached.append(bench.one(sequence_id, Started).num_cached_tokens)
        assert bench.tokens(sequence_id) == oracle(make_spec(prompt_ids=PROMPT))[0]
    assert cached == [0, 0, 0, 16]


def test_a_block_is_published_after_it_is_computed() -> None:
    """What is scheduled but not computed cannot be hit; what is computed can."""
    bench = Bench(max_num_batched_tokens=8)
    bench.add(make_spec("first", PROMPT))
    hashes = hash_full_blocks(chain_root(b"model", ""), PROMPT, 4)
    output = bench.scheduler.schedule()
    assert bench.pool.take_changes().published == ()
    bench.scheduler.update(output, bench.runner.execute(output))
    assert tuple(entry.block_hash for entry in bench.pool.take_changes().published) == hashes[:2]


def test_two_copies_of_one_prompt_side_by_side_are_no_collision() -> None:
    """Both compute, the first publishes; the tokens are the same."""
    bench = Bench(max_num_batched_tokens=64)
    ids = [bench.add(make_spec(name, PROMPT)) for name in ("a", "b")]
    bench.run()
    assert bench.tokens(ids[0]) == bench.tokens(ids[1]) == oracle(make_spec("x", PROMPT))[0]
    assert bench.pool.stats().num_collisions == 0


# -- prefill for somebody else


def test_a_prefill_gives_one_token_and_holds_its_blocks_until_released() -> None:
    """Its end is not the end of its blocks: those are promised to a receiver."""
    bench, spec = Bench(), make_spec(prompt_ids=PROMPT)
    sequence_id = bench.add(spec, SequenceRole.PREFILL_ONLY)
    bench.run()
    assert bench.tokens(sequence_id) == oracle(spec)[0][:1]
    assert bench.pool.num_available == bench.pool.num_blocks - 5
    bench.release(sequence_id)
    assert bench.pool.num_available == bench.pool.num_blocks


def test_a_prefill_names_all_blocks_at_its_start_and_tells_when_each_is_ready() -> None:
    """Started counts the blocks; then each chunk adds those that it fills, in order, up to the partial last one."""
    bench, spec = Bench(max_num_batched_tokens=7), make_spec(prompt_ids=PROMPT[:18])
    sequence_id = bench.add(spec, SequenceRole.PREFILL_ONLY)
    bench.step()
    started = bench.one(sequence_id, Started)
    assert started.num_blocks == 5
    assert started.block_hashes == hash_full_blocks(chain_root(b"model", ""), PROMPT[:18], 4)
    bench.run()
    ready = bench.of(sequence_id, BlocksReady)
    assert [(event.num_computed_tokens, len(event.blocks)) for event in ready] == [
        (7, 1),
        (14, 2),
        (18, 2),
    ]
    blocks = [block for event in ready for block in event.blocks]
    assert len({block.block_id for block in blocks}) == 5
    assert all(block.checksum == bench.runner.memory.checksum(block.block_id) for block in blocks)
    assert bench.tokens(sequence_id)


def test_cached_blocks_of_a_prefill_are_ready_at_once() -> None:
    """The checksums of hits come with the first chunk, as they were when the block was computed."""
    bench = Bench(max_num_batched_tokens=4)
    bench.add(make_spec("first", PROMPT))
    bench.run()
    sequence_id = bench.add(make_spec("second", PROMPT), SequenceRole.PREFILL_ONLY)
    bench.step()
    blocks = bench.of(sequence_id, BlocksReady)[0].blocks
    assert len(blocks) == 5
    assert all(block.checksum == bench.runner.memory.checksum(block.block_id) for block in blocks)


def test_a_prefill_is_never_a_victim() -> None:
    """Under pressure the generating sequences lose their blocks; a prefill computes on, and so it does when held."""
    bench = Bench(num_blocks=8, max_num_batched_tokens=6)
    old = bench.add(make_spec("old", (1, 2, 3), max_tokens=16))
    bench.step()
    prefill = bench.add(make_spec("prefill", PROMPT, max_tokens=4), SequenceRole.PREFILL_ONLY)
    bench.steps(20)
    assert bench.tokens(prefill) == oracle(make_spec("x", PROMPT))[0][:1]
    assert bench.end(old) is None
    assert bench.scheduler.stats().num_preemptions > 0
    bench.release(prefill)
    bench.run()
    assert bench.tokens(old) == oracle(make_spec("old", (1, 2, 3), max_tokens=16))[0]


# -- KV from outside


def test_a_reservation_is_all_or_nothing() -> None:
    """Without room for the whole prompt nothing is held and nothing is said; with room all blocks are."""
    bench = Bench(num_blocks=8)
    first = bench.add(make_spec("first", PROMPT[:16]), SequenceRole.PREFILL_ONLY)
    bench.run()
    waits = bench.add(make_spec("waits", (*PROMPT[4:], 1)), SequenceRole.AWAIT_KV)
    bench.step()
    assert bench.of(waits, Reserved) == []
    assert bench.pool.num_available == 4
    bench.release(first)
    bench.step()
    assert len(bench.one(waits, Reserved).block_ids) == 5
    assert bench.pool.num_available == 3


def test_a_committed_sequence_goes_on_from_the_first_token() -> None:
    """What came from outside is not computed again: one token a step, and the output is the oracle's."""
    bench, spec = Bench(), make_spec(prompt_ids=PROMPT)
    whole, reason = oracle(spec)
    sequence_id = bench.add(spec, SequenceRole.AWAIT_KV)
    bench.step()
    assert not bench.scheduler.has_work()
    bench.commit(spec, FirstToken(whole[0]))
    bench.run()
    assert {sum(step.values()) for step in bench.computed()} == {0, 1}
    assert bench.of(sequence_id, NewTokens)[0].first_index == 1
    assert (bench.tokens(sequence_id), bench.end(sequence_id)) == (whole[1:], reason)
    assert bench.of(sequence_id, Started) == []
    assert bench.pool.num_available == bench.pool.num_blocks


def test_a_first_token_that_ends_the_sequence_is_its_last_word() -> None:
    """Nothing is emitted for it, and its blocks are free at once."""
    bench, spec = Bench(), make_spec(prompt_ids=PROMPT, max_tokens=1)
    sequence_id = bench.add(spec, SequenceRole.AWAIT_KV)
    bench.step()
    bench.commit(spec, FirstToken(oracle(spec)[0][0], FinishReason.LENGTH))
    assert bench.pool.num_available == bench.pool.num_blocks
    bench.run()
    assert bench.of(sequence_id, NewTokens) == []


def test_received_blocks_are_cached_and_named_as_held_the_next_time() -> None:
    """No block crosses the wire twice: the second hand-over of a prefix holds it already, to the last full block."""
    bench = Bench(max_num_batched_tokens=64, num_blocks=32)
    for name in ("first", "second"):
        spec = make_spec(name, PROMPT)
        bench.add(spec, SequenceRole.AWAIT_KV)
        bench.step()
        bench.commit(spec, FirstToken(oracle(spec)[0][0]))
        bench.run()
        assert bench.tokens(make_id(name)) == oracle(spec)[0][1:]
    assert [bench.one(make_id(name), Reserved).num_held for name in ("first", "second")] == [0, 5]


def test_blocks_in_flight_are_not_cached() -> None:
    """What is reserved but not committed cannot be hit by anybody."""
    bench = Bench()
    bench.add(make_spec("parked", PROMPT), SequenceRole.AWAIT_KV)
    bench.step()
    other = bench.add(make_spec("other", PROMPT))
    bench.run()
    assert bench.one(other, Started).num_cached_tokens == 0
    assert bench.tokens(other) == oracle(make_spec("x", PROMPT))[0]


def test_a_preempted_committed_sequence_is_local() -> None:
    """KV that was handed over once is not asked for again: it is computed here, and the tokens are the same."""
    bench = Bench(num_blocks=8, max_num_seqs=4)
    old = bench.add(make_spec("old", (1, 2, 3), max_tokens=20))
    bench.step()
    spec = make_spec("moved", PROMPT[:8], max_tokens=12)
    moved = bench.add(spec, SequenceRole.AWAIT_KV)
    bench.step()
    bench.commit(spec, FirstToken(oracle(spec)[0][0]))
    bench.run()
    assert bench.scheduler.stats().num_preemptions > 0
    assert bench.tokens(moved) == oracle(spec)[0][1:]
    assert bench.tokens(old) == oracle(make_spec("old", (1, 2, 3), max_tokens=20))[0]
    assert len(bench.of(moved, Reserved)) == 1


@pytest.mark.parametrize("role", [SequenceRole.GENERATE, SequenceRole.PREFILL_ONLY])
def test_only_a_parked_sequence_can_be_committed(role: SequenceRole) -> None:
    """A commit of one that computes for itself, or is unknown, or again, is ignored."""
    bench, spec = Bench(), make_spec(prompt_ids=PROMPT)
    sequence_id = bench.add(spec, role)
    bench.scheduler.commit(sequence_id, [FirstToken(1)])
    bench.step()
    bench.scheduler.commit(sequence_id, [FirstToken(1)])
    bench.scheduler.commit(make_id("unknown"), [FirstToken(1)])
    bench.run()
    num_tokens = len(bench.tokens(sequence_id))
    assert bench.tokens(sequence_id) == oracle(spec)[0][:num_tokens]


def test_a_reservation_that_is_given_up_leaves_nothing() -> None:
    """Released before commit: the blocks are free, and a late commit is ignored."""
    bench, spec = Bench(), make_spec(prompt_ids=PROMPT)
    sequence_id = bench.add(spec, SequenceRole.AWAIT_KV)
    bench.step()
    bench.release(sequence_id)
    assert bench.pool.num_available == bench.pool.num_blocks
    bench.scheduler.commit(sequence_id, [FirstToken(1)])
    assert not bench.scheduler.has_work()


# -- pressure


def test_the_youngest_is_preempted_and_resumes_with_the_same_tokens() -> None:
    """When memory runs out the last to come loses its blocks, is computed again, and says the same."""
    bench = Bench(num_blocks=6)
    specs = [make_spec(name, (n, n, n), max_tokens=14) for n, name in enumerate(("old", "young"))]
    ids = [bench.add(spec) for spec in specs]
    bench.run()
    assert [bench.tokens(sequence_id) for sequence_id in ids] == [oracle(spec)[0] for spec in specs]
    last = [bench.of(sequence_id, NewTokens)[-1].num_preemptions for sequence_id in ids]
    assert last[0] == 0
    assert last[1] > 0
    assert all(len(bench.of(sequence_id, Started)) == 1 for sequence_id in ids)


def test_of_many_the_youngest_is_the_victim_and_the_oldest_never() -> None:
    """Whoever came first is never computed again, and who came last is the first to lose its blocks."""
    bench = Bench(num_blocks=9)
    names = ("first", "second", "third")
    specs = [make_spec(name, (n, n, n), max_tokens=14) for n, name in enumerate(names)]
    for spec in specs:
        bench.add(spec)
    while bench.scheduler.stats().num_preemptions == 0:
        bench.step()
    assert "third" not in bench.computed()[-1]
    assert {"first", "second"} <= set(bench.computed()[-1])
    bench.run()
    preempted = [bench.of(make_id(name), NewTokens)[-1].num_preemptions for name in names]
    assert preempted[0] == 0
    assert preempted[2] >= preempted[1]
    assert [bench.tokens(make_id(name)) for name in names] == [oracle(spec)[0] for spec in specs]


def test_a_preempted_sequence_comes_back_before_those_that_have_not_started() -> None:
    """It keeps its place at the head of the queue."""
    bench = Bench(num_blocks=6)
    bench.add(make_spec("old", (0, 0, 0), max_tokens=14))
    bench.add(make_spec("young", (1, 1, 1), max_tokens=14))
    while bench.pool.num_available:
        bench.step()
    bench.add(make_spec("new", (2,), max_tokens=14))
    while bench.scheduler.stats().num_preemptions == 0:
        bench.step()
    num_steps = len(bench.outputs)
    while not bench.of(make_id("new"), Started):
        bench.step()
    assert any(max(step.get("young", 0), step.get("old", 0)) > 1 for step in bench.computed()[num_steps:])
    _finish(bench, "old", "young", "new")


def test_nothing_is_published_behind_a_collision() -> None:
    """A block whose hash is another's is not cached, and neither is what follows it: it could not be found."""

    def second_collides(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
        """The same hash for every block of fours."""
        return BlockHash(b"four") if token_ids[0] == 4 else hash_block(parent, token_ids)

    bench = Bench(hash_block=second_collides)
    published = []
    for name, start in (("a", 1), ("b", 2)):
        bench.add(make_spec(name, (start,) * 4 + (4,) * 4 + (5,) * 4, max_tokens=1))
        bench.run()
        published.append(len(bench.pool.take_changes().published))
    assert published == [3, 1]
    assert bench.pool.stats().num_collisions == 1


@pytest.mark.parametrize("priority", Priority)
def test_nobody_is_admitted_in_the_step_that_preempts(priority: Priority) -> None:
    """What was taken from one running sequence is not given to a newcomer before the next step, however urgent that is."""
    bench = Bench(num_blocks=6)
    bench.add(make_spec("old", (0, 0, 0), max_tokens=14))
    bench.add(make_spec("young", (1, 1, 1), max_tokens=14))
    while bench.pool.num_available:
        bench.step()
    bench.add(make_spec("new", (2,), max_tokens=1, priority=priority))
    while bench.scheduler.stats().num_preemptions == 0:
        bench.step()
    assert bench.pool.num_available > 1
    assert bench.of(make_id("new"), Started) == []
    _finish(bench, "old", "young", "new")


def test_a_sequence_alone_may_fill_the_whole_pool() -> None:
    """The longest request that the pool can hold finishes, without preempting itself."""
    bench = Bench(num_blocks=8)
    spec = make_spec(prompt_ids=PROMPT, max_tokens=13)  # the KV of 32 tokens is needed
    sequence_id = bench.add(spec)
    bench.run()
    assert bench.tokens(sequence_id) == oracle(spec)[0]
    assert bench.scheduler.stats().num_preemptions == 0


def test_running_sequences_keep_a_block_for_their_growth() -> None:
    """A newcomer that would leave a running sequence no room to grow waits; with one more block it starts."""
    started = []
    for num_blocks in (7, 8):
        bench = Bench(num_blocks=num_blocks)
        bench.add(make_spec("running", (1, 2, 3, 4), max_tokens=4))
        bench.step()
        sequence_id = bench.add(make_spec("new", PROMPT))
        bench.step()
        started.append(bool(bench.of(sequence_id, Started)))
        bench.run()
        assert bench.tokens(sequence_id) == oracle(make_spec("x", PROMPT))[0]
    assert started == [False, True]


# -- messages that come twice, late, or for nobody


def test_a_repeated_add_is_ignored() -> None:
    """The same id twice is one sequence, whatever the second message says."""
    bench, spec = Bench(), make_spec()
    sequence_id = bench.add(spec)
    bench.add(make_spec(prompt_ids=PROMPT))
    bench.step()
    bench.add(make_spec(prompt_ids=PROMPT))
    bench.run()
    assert bench.tokens(sequence_id) == oracle(spec)[0]


def test_attempts_of_one_request_are_different_sequences() -> None:
    """Releasing an old attempt leaves the new one alone."""
    bench = Bench()
    old, new = bench.add(make_spec()), bench.add(make_spec(attempt=1))
    bench.step()
    bench.release(old)
    bench.run()
    assert bench.tokens(new) == oracle(make_spec())[0]
    assert bench.end(old) is None


def test_releasing_the_unknown_is_harmless() -> None:
    """Unknown ids, and a release that comes twice, change nothing."""
    bench = Bench()
    sequence_id = bench.add(make_spec())
    bench.release(make_id("unknown"))
    bench.step()
    bench.release(sequence_id)
    bench.release(sequence_id)
    assert bench.pool.num_available == bench.pool.num_blocks
    assert not bench.scheduler.has_work()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 6])
@pytest.mark.parametrize("role", [role for role in SequenceRole if role is not SequenceRole.LEND])
def test_a_release_in_any_state_frees_everything_at_once(role: SequenceRole, num_steps: int) -> None:
    """Waiting, parked, in the middle of its prompt, decoding, held: after the release the pool is as before."""
    bench = Bench(max_num_batched_tokens=8)
    other = bench.add(make_spec("other", (9,), max_tokens=3))
    bench.run()
    baseline = bench.pool.num_available
    sequence_id = bench.add(make_spec(prompt_ids=PROMPT), role)
    bench.steps(num_steps)
    assert (bench.pool.num_available < baseline) == (num_steps > 0)
    bench.release(sequence_id)
    assert bench.pool.num_available == baseline
    assert not bench.scheduler.has_work()
    assert bench.end(other) is FinishReason.LENGTH


def test_a_release_while_preempted_frees_everything() -> None:
    """A sequence that lost its blocks and waits to be computed again can be given up too."""
    bench = Bench(num_blocks=6)
    old = bench.add(make_spec("old", (0, 0, 0), max_tokens=14))
    young = bench.add(make_spec("young", (1, 1, 1), max_tokens=14))
    while bench.scheduler.stats().num_preemptions == 0:
        bench.step()
    bench.release(young)
    bench.run()
    assert bench.tokens(old) == oracle(make_spec("old", (0, 0, 0), max_tokens=14))[0]
    assert bench.pool.num_available == bench.pool.num_blocks


# -- deadlines


def _failed_phase(bench: Bench, spec_name: str) -> str:
    error = bench.end(make_id(spec_name))
    assert isinstance(error, DeadlineError)
    return error.phase


def test_a_deadline_that_passes_in_the_queue_is_not_computed() -> None:
    """It fails with phase queued, without a token computed; one in time is computed."""
    bench = Bench()
    bench.add(make_spec("late", time_budget_s=5.0))
    bench.add(make_spec("in time", time_budget_s=50.0))
    bench.clock.advance(5.0)
    bench.run()
    assert _failed_phase(bench, "late") == "queued"
    assert all("late" not in step for step in bench.computed())
    assert bench.end(make_id("in time")) is FinishReason.LENGTH


def test_a_deadline_that_passes_while_computing_names_the_phase() -> None:
    """In the middle of the prompt it is prefill; after the first token decode; the blocks come back."""
    bench = Bench(max_num_batched_tokens=8, num_blocks=32)
    bench.add(make_spec("short", (1, 2), time_budget_s=5.0))
    bench.add(make_spec("long", PROMPT, time_budget_s=5.0))
    bench.steps(2)
    bench.clock.advance(5.0)
    bench.run()
    assert _failed_phase(bench, "short") == "decode"
    assert _failed_phase(bench, "long") == "prefill"
    assert bench.pool.num_available == bench.pool.num_blocks


def test_a_deadline_that_passes_before_a_reservation_names_the_transfer() -> None:
    """A sequence that waits for KV and never got its blocks fails in phase transfer."""
    bench = Bench(num_blocks=4)
    bench.add(make_spec("holds", PROMPT[:12]), SequenceRole.PREFILL_ONLY)
    bench.add(make_spec("waits", PROMPT[8:], time_budget_s=5.0), SequenceRole.AWAIT_KV)
    bench.step()
    bench.clock.advance(5.0)
    bench.step()
    assert _failed_phase(bench, "waits") == "transfer"


def test_a_deadline_of_a_preempted_sequence_names_decode() -> None:
    """It has given tokens already, so its deadline passes in phase decode."""
    bench = Bench(num_blocks=6)
    bench.add(make_spec("old", (0, 0, 0), max_tokens=14))
    bench.add(make_spec("young", (1, 1, 1), max_tokens=14, time_budget_s=5.0))
    while bench.scheduler.stats().num_preemptions == 0:
        bench.step()
    bench.clock.advance(5.0)
    bench.step()
    assert _failed_phase(bench, "young") == "decode"


def test_a_late_prefill_keeps_its_blocks_until_nobody_reads_them() -> None:
    """A receiver may be reading what a late prefill has computed: the failure is told, the blocks wait for release."""
    bench = Bench(max_num_batched_tokens=8)
    sequence_id = bench.add(make_spec("late", PROMPT, time_budget_s=5.0), SequenceRole.PREFILL_ONLY)
    bench.step()
    bench.clock.advance(5.0)
    bench.run()
    assert _failed_phase(bench, "late") == "prefill"
    assert bench.pool.num_available == bench.pool.num_blocks - 5
    bench.release(sequence_id)
    assert bench.pool.num_available == bench.pool.num_blocks


def test_a_late_prefill_that_nobody_reads_is_gone_at_once() -> None:
    """Before its start no ticket names its blocks, and it has none."""
    bench = Bench()
    bench.add(make_spec("late", PROMPT, time_budget_s=5.0), SequenceRole.PREFILL_ONLY)
    bench.clock.advance(5.0)
    bench.step()
    assert isinstance(bench.one(make_id("late"), Failed).error, DeadlineError)
    bench.scheduler.add(make_spec("late"), SequenceRole.GENERATE)
    bench.run()
    assert bench.tokens(make_id("late")) == oracle(make_spec())[0]


# -- stats


def test_stats_count_queues_and_what_is_left_to_compute() -> None:
    """Running, waiting and parked sequences are counted, and the tokens they still have to compute."""
    bench = Bench(max_num_batched_tokens=8, max_num_seqs=1)
    bench.add(make_spec("running", PROMPT))
    bench.add(make_spec("waiting", (1, 2, 3)))
    bench.step()
    stats = bench.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pending_tokens) == (1, 1, 12 + 3)


def test_nobody_loses_its_blocks_twice_running() -> None:
    """Whom the policy would choose again and again is passed over once each time."""
    bench = Bench(
        num_blocks=14, victim="most-blocks", watermark=0.0, watermark_rise=0.0, cool_down_after=1000
    )
    bench.add(make_spec("big", tuple(range(16)), max_tokens=40))
    for number in range(7):
        bench.add(make_spec(f"small{number}", (40 + number,), max_tokens=40))
    victims: list[str] = []
    lost: dict[str, int] = {}
    while bench.scheduler.has_work():
        running = [*bench.scheduler._running.decoding, *bench.scheduler._running.prefilling]
        bench.step()
        for sequence in running:
            name = sequence.sequence_id.request_id
            if sequence.num_preemptions > lost.get(name, 0):
                lost[name] = sequence.num_preemptions
                victims.append(name)
    assert victims.count("big") > 2
    assert all(before != after for before, after in itertools.pairwise(victims))
