"""A sequence's block tables: a group with a window holds its window, whatever else is held, cached or pledged."""

import pytest

from paceline.core.block_hash import chain_root, hash_full_blocks
from paceline.core.kv_layout import KVGroup, View
from paceline.core.request import FirstToken
from paceline.engine.block_pool import BlockPool
from paceline.engine.cached_prefix import TokenChain, find_prefix
from paceline.engine.events import BlocksReady, NewTokens, Reserved, Started
from paceline.engine.sequence import SequenceRole
from tests.engine.harness import Bench, oracle, places
from tests.factories import BLOCK_SIZE, GREEDY, make_spec

WINDOW = KVGroup(View(6))
GROUPS = (KVGroup(), WINDOW, WINDOW)
PROMPT = tuple(range(40))
ROOT = chain_root(b"model", "")


def test_a_window_costs_only_its_window() -> None:
    """A text three times as long as all memory is computed and generated where every layer has a window."""
    bench, spec = Bench(num_blocks=7, groups=(WINDOW,)), make_spec(prompt_ids=PROMPT, max_tokens=50)
    sequence_id = bench.add(spec)
    bench.run()
    assert bench.tokens(sequence_id) == oracle(spec, groups=(WINDOW,))[0]
    assert bench.scheduler.stats().num_preemptions == 0


def test_what_fell_out_of_the_window_serves_others_at_once() -> None:
    """While a sequence decodes, its groups with windows hold two or three blocks each and the other one all."""
    bench = Bench(num_blocks=40, groups=GROUPS, max_num_batched_tokens=8)
    bench.add(make_spec(prompt_ids=PROMPT, max_tokens=20))
    bench.steps(7)
    num_held = [bench.pool.num_blocks - bench.pool.num_available]
    for _ in range(8):
        bench.step()
        num_held.append(bench.pool.num_blocks - bench.pool.num_available)
    assert set(num_held) <= set(range(10 + 4, 13 + 7))
    assert max(num_held) < 10 + 2 * 3 + 3


def test_a_hand_over_moves_the_window_and_no_more() -> None:
    """The owner counts, and the receiver reserves, all blocks of the whole group and of the others what is seen next."""
    prefill, decode = Bench(40, groups=GROUPS), Bench(40, groups=GROUPS)
    spec = make_spec(prompt_ids=PROMPT[:38], max_tokens=9)
    sequence_id = prefill.add(spec, SequenceRole.PREFILL_ONLY)
    prefill.run()
    decode.add(spec, SequenceRole.AWAIT_KV)
    decode.step()
    reserved = decode.one(sequence_id, Reserved)
    # Position 38 sees from 33 on, in block 8; there are 10 blocks.
    assert len(places(GROUPS, 38)) == 10 + 2 + 2
    assert prefill.one(sequence_id, Started).num_blocks == len(reserved.block_ids) == 14
    ready = [block for event in prefill.of(sequence_id, BlocksReady) for block in event.blocks]
    for theirs, ours in zip(ready, reserved.block_ids, strict=True):
        decode.runner.memory.write(ours, 0, bytes(prefill.runner.memory.read(theirs.block_id)))
    decode.scheduler.commit(sequence_id, [FirstToken(prefill.one(sequence_id, NewTokens).token_ids[0])])
    decode.run()
    assert decode.tokens(sequence_id) == oracle(spec, groups=GROUPS)[0][1:]


def test_a_received_prompt_is_cached_in_every_group() -> None:
    """Its next turn finds it, although the groups with windows never had its beginning."""
    bench, spec = Bench(60, groups=GROUPS), make_spec("first", PROMPT, max_tokens=2)
    bench.add(spec, SequenceRole.AWAIT_KV)
    bench.step()
    output = oracle(spec, groups=GROUPS)[0]
    bench.commit(spec, FirstToken(output[0]))
    bench.run()
    later = make_spec("second", (*PROMPT, *output, 1, 2))
    sequence_id = bench.add(later)
    bench.run()
    assert bench.one(sequence_id, Started).num_cached_tokens == 40
    assert bench.tokens(sequence_id) == oracle(later, groups=GROUPS)[0]


@pytest.mark.parametrize(("num_evicted", "num_cached"), [(0, 40), (17, 0)])
def test_a_prefix_is_a_hit_only_where_every_group_has_what_is_seen(num_evicted: int, num_cached: int) -> None:
    """Nine of ten blocks are there in the whole group; where the windows have lost theirs that is worth nothing."""
    bench = Bench(60, groups=GROUPS, max_num_batched_tokens=64)
    bench.add(make_spec("first", PROMPT, max_tokens=1))
    bench.run()
    # First those that never were cached; then eight of each window, which were let go early; then the last whole one.
    num_never_cached = 60 - bench.pool.stats().num_cached
    bench.pool.release(bench.pool.allocate(num_never_cached + num_evicted))
    chain = TokenChain(ROOT, hash_full_blocks(ROOT, PROMPT, BLOCK_SIZE), PROMPT)
    assert len(bench.pool.lookup(ROOT, chain.block_hashes, PROMPT)) == 10 - min(num_evicted, 1)
    assert find_prefix(bench.pool, chain, 10).num_blocks * BLOCK_SIZE == num_cached


def test_pledged_room_is_nobody_else_s() -> None:
    """What is pledged is not available, before it is held, while it is, and when it is shared."""
    pool = BlockPool(10, BLOCK_SIZE, (KVGroup(), WINDOW))
    pool.pledge(4)
    assert pool.num_available == 6
    held = pool.allocate(3, group=1)
    assert pool.num_available == 6
    others = pool.allocate(6, group=0)
    assert pool.num_available == 0
    pool.check_invariants([held, others], num_pledged=4)
    pool.release(held)
    assert pool.num_available == 0
    pool.pledge(-4)
    assert pool.num_available == 4
    with pytest.raises(AssertionError):
        pool.pledge(5)


def test_a_greedy_neighbour_never_takes_a_window_s_next_block() -> None:
    """Prefills of long prompts, which are never preempted, run to their ends in a full pool without a wait."""
    bench = Bench(num_blocks=16, groups=(WINDOW,), max_num_batched_tokens=8, max_num_seqs=8)
    specs = [make_spec(f"r{n}", tuple(range(n, n + 60)), max_tokens=1, sampling=GREEDY) for n in range(6)]
    for spec in specs:
        bench.add(spec, SequenceRole.PREFILL_ONLY)
    for _ in range(200):
        bench.step()
        for spec in specs:
            if bench.of(spec.sequence_id, NewTokens):
                bench.release(spec.sequence_id)
    assert all(bench.tokens(spec.sequence_id) == oracle(spec, groups=(WINDOW,))[0][:1] for spec in specs)
