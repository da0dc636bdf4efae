"""Preempted sequences whose KV waits in host memory: nothing is computed twice, and nothing is changed."""

from collections.abc import Sequence

import pytest

from paceline.core.kv_layout import KVGroup, View
from paceline.engine.conformance.architectures import build_tiny
from paceline.engine.kv_cache import KVCache
from paceline.engine.model_loader import use_paged_attention
from paceline.engine.model_runner import ModelRunner
from tests.engine.harness import Bench, oracle
from tests.factories import BLOCK_SIZE, make_id, make_layout, make_spec

GROUPS = {"whole": (KVGroup(),), "a window": (KVGroup(View(6)),), "both": (KVGroup(), KVGroup(View(6)))}
NAMES = ("a", "b", "c")


def _pressed(
    num_swap_blocks: int, groups: Sequence[KVGroup] = GROUPS["whole"], *, num_blocks: int = 9
) -> Bench:
    """Three sequences in too few blocks; copying costs nothing, so that whoever can be swapped out is."""
    bench = Bench(num_blocks, groups=groups, num_swap_blocks=num_swap_blocks)
    bench.scheduler.costs.swap_block_s = 0.0
    for number, name in enumerate(NAMES):
        bench.add(make_spec(name, (number, number, number), max_tokens=14, bypass_cache=True))
    return bench


@pytest.mark.parametrize("layers", GROUPS)
def test_what_was_swapped_out_goes_on_with_the_same_tokens(layers: str) -> None:
    """No token is computed twice, the output is the oracle's, and host memory is empty in the end."""
    groups = GROUPS[layers]
    bench = _pressed(100, groups, num_blocks=9 * len(groups) - (layers != "whole"))
    bench.run()
    stats = bench.scheduler.stats()
    assert stats.preemptions["swap"] > 0
    assert (stats.preemptions["recompute"], stats.num_recomputed_tokens) == (0, 0)
    assert sum(sum(step.values()) for step in bench.computed()) == 3 * (3 + 13)
    for number, name in enumerate(NAMES):
        spec = make_spec(name, (number, number, number), max_tokens=14, bypass_cache=True)
        assert bench.tokens(make_id(name)) == oracle(spec, groups=groups)[0]
    assert bench.scheduler._members._swap.num_free == 100


def test_without_host_memory_it_is_computed_again() -> None:
    """The twin: the same pressure, other counts, the same tokens."""
    bench = _pressed(0)
    bench.run()
    stats = bench.scheduler.stats()
    assert stats.preemptions["swap"] == 0
    assert min(stats.preemptions["recompute"], stats.num_recomputed_tokens) > 0
    assert bench.tokens(make_id("b")) == oracle(make_spec("b", (1, 1, 1), max_tokens=14))[0]


def test_host_memory_that_is_full_takes_nobody() -> None:
    """One fits and the next does not: both kinds are counted."""
    bench = Bench(12, num_swap_blocks=3)
    bench.scheduler.costs.swap_block_s = 0.0
    for number in range(6):
        bench.add(make_spec(f"r{number}", (number,) * 3, max_tokens=20))
    bench.run(max_steps=2000)
    preemptions = bench.scheduler.stats().preemptions
    assert min(preemptions["swap"], preemptions["recompute"]) > 0
    for number in range(6):
        spec = make_spec(f"r{number}", (number,) * 3, max_tokens=20)
        assert bench.tokens(make_id(f"r{number}")) == oracle(spec)[0]


def test_a_swapped_sequence_that_is_given_up_gives_its_host_memory_back() -> None:
    """Whether it was swapped out or not, nothing of it is left."""
    bench = _pressed(100)
    while not bench.scheduler.stats().preemptions["swap"]:
        bench.step()
    for name in NAMES:
        bench.release(make_id(name))
    assert bench.scheduler._members._swap.num_free == 100
    assert bench.pool.num_available == bench.pool.num_blocks


def test_a_real_cache_gives_back_the_bytes_it_saved() -> None:
    """What is saved is a copy: the block may be overwritten meanwhile, and another one may take it back."""
    cache = KVCache(make_layout(), 3)
    content = bytes(range(256)) * (cache.block_bytes // 256)
    cache.write(0, 0, content)  # type: ignore[arg-type] # a BlockId
    saved = cache.save(0)  # type: ignore[arg-type] # the same
    cache.write(0, 0, bytes(cache.block_bytes))  # type: ignore[arg-type] # the same
    cache.restore(saved, 2)  # type: ignore[arg-type] # the same
    assert bytes(cache.read(2)) == content  # type: ignore[arg-type] # the same


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_real_model_says_the_same_whether_it_was_swapped_or_never_preempted(name: str) -> None:
    """The tokens of sequences that were swapped out are those that they have with plenty of room."""
    tokens = []
    for num_blocks in (14, 60):
        model = build_tiny(name)
        layout = use_paged_attention(model, "float32", BLOCK_SIZE)
        bench = Bench(
            num_blocks,
            runner=ModelRunner(model, layout, num_blocks),
            groups=layout.groups,
            num_swap_blocks=100,
        )
        bench.scheduler.costs.swap_block_s = 0.0
        for number in range(3):
            bench.add(make_spec(f"r{number}", (5 + number, 7, 9), max_tokens=20))
        bench.run()
        assert (bench.scheduler.stats().preemptions["swap"] > 0) == (num_blocks == 14)
        tokens.append([bench.tokens(make_id(f"r{number}")) for number in range(3)])
    assert tokens[0] == tokens[1]
