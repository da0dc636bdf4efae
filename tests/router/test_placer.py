"""What placement remembers, and how little that is."""

import gc
import tracemalloc
from collections import Counter

import pytest

from paceline.core.errors import NoEndpointError
from router.hash_ring import prompt_key
from router.placement import Rules
from router.placer import Placer
from router.views import PromptFacts
from tests.factories import make_worker

PREFILL = [make_worker(f"prefill-{number}") for number in range(4)]
DECODE = [make_worker(f"decode-{number}") for number in range(3)]


def cold(number: int) -> PromptFacts:
    """A long prompt that nobody has seen."""
    return PromptFacts(1000, {}, ring_key=prompt_key((number,), ""))


def prefill_of(placer: Placer, number: int, workers: list[int]) -> str:
    """Where prompt `number` is computed when these workers are there."""
    route = placer.place(cold(number), [PREFILL[index] for index in workers], DECODE)
    assert route.prefill is not None
    return str(route.prefill.key.worker_id)


def test_routers_agree_on_where_a_cold_prompt_goes() -> None:
    """Whatever each of them has placed before, and in whatever order it has found the workers."""
    one, other = Placer(Rules("always")), Placer(Rules("always"))
    for number in range(20):
        prefill_of(one, number, [0, 1])
    for number in range(20):
        assert prefill_of(one, number, [0, 1, 2, 3]) == prefill_of(other, number, [3, 1, 0, 2])


def test_a_worker_that_goes_moves_only_its_own_prompts_and_gets_them_back() -> None:
    """A worker that starts again is where it was, in its next life too."""
    placer, numbers = Placer(Rules("always")), range(60)
    before = [prefill_of(placer, number, [0, 1, 2, 3]) for number in numbers]
    without = [prefill_of(placer, number, [0, 1, 3]) for number in numbers]
    assert Counter(before)["prefill-2"] > 0
    assert all(a == b for a, b in zip(before, without, strict=True) if a != "prefill-2")
    again = [*PREFILL[:2], make_worker("prefill-2", epoch=2), PREFILL[3]]
    routes = [placer.place(cold(number), again, DECODE) for number in numbers]
    assert [route.computing.key.worker_id for route in routes] == before


def test_turns_go_round_and_a_request_that_is_not_placed_takes_none() -> None:
    """Each placed request is one turn."""
    placer = Placer(Rules("always", "round-robin"))
    with pytest.raises(NoEndpointError):
        placer.place(cold(0), [], DECODE)
    placed = [prefill_of(placer, 0, [0, 1, 2]) for _ in range(6)]
    assert placed == ["prefill-0", "prefill-1", "prefill-2"] * 2
    assert placer.stats().num_placed == 6


@pytest.mark.parametrize("num_prompts", [3000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_distinct_prompts_leave_nothing_behind(num_prompts: int) -> None:
    """Memory is flat over many of them: rings have points for workers, not for keys."""
    placer = Placer(Rules())
    prefill_of(placer, 0, [0, 1, 2, 3])
    tracemalloc.start()
    try:
        for number in range(100):
            placer.place(cold(number), PREFILL, DECODE)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for number in range(100, num_prompts):
            placer.place(cold(number), PREFILL, DECODE)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 4096
    assert placer.stats().num_ring_members == 7
