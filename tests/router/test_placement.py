"""Which workers a request goes to."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import NoEndpointError
from paceline.core.prefix import WorkerKey
from paceline.core.request import BootEpoch, WorkerId
from router.costs import RouteCosts
from router.placement import DisaggregateMode, Route, Rules, Turn, place
from router.policies import POLICIES, PlacementPolicy
from router.views import PromptFacts, WorkerView
from tests.factories import BLOCK_SIZE, make_worker

MODES: list[DisaggregateMode] = ["always", "auto", "never"]
PREFILL = [make_worker("p0"), make_worker("p1")]
DECODE = [make_worker("d0"), make_worker("d1")]
# Nobody was placed before, and nobody is on a ring: equals come in the order of their names.
FIRST = Turn()


def _prompt(num_tokens: int = 40, **held: int) -> PromptFacts:
    """A prompt of which some workers, in their first life, hold some blocks."""
    keys = {WorkerKey(WorkerId(name), BootEpoch(1)): blocks for name, blocks in held.items()}
    return PromptFacts(num_tokens, keys)


def _place(
    prompt: PromptFacts,
    prefill: Sequence[WorkerView] = PREFILL,
    decode: Sequence[WorkerView] = DECODE,
    mode: DisaggregateMode = "always",
    turn: Turn = FIRST,
    policy: PlacementPolicy = "prefix-aware",
) -> tuple[str | None, str]:
    """The names of the prefill and of the decode worker."""
    route = place(prompt, prefill, decode, Rules(mode, policy), turn)
    return route.prefill.key.worker_id if route.prefill else None, route.decode.key.worker_id


# -- whether to disaggregate


def test_always_disaggregates_also_what_is_short() -> None:
    """One token goes to the prefill tier."""
    assert _place(_prompt(1), mode="always") == ("p0", "d0")


def test_never_computes_on_the_decode_worker_also_what_is_long() -> None:
    """A prompt of any length stays there."""
    assert _place(_prompt(5000), mode="never") == (None, "d0")


def _is_local(
    num_uncached: int, *, num_decoding: int = 0, queue_apart: int = 0, queue_here: int = 0, num_held: int = 0
) -> bool:
    """Whether `auto` leaves a prompt to the only decode worker, which holds the rest of it."""
    prompt = _prompt(num_held * BLOCK_SIZE + num_uncached, d0=num_held)
    prefill = [make_worker("p0", num_pending_tokens=queue_apart)]
    decode = [
        make_worker("d0", num_running=num_decoding, num_pending_tokens=queue_here, num_free_blocks=9999)
    ]
    return _place(prompt, prefill, decode, mode="auto")[0] is None


def _break_even(**state: int) -> int:
    """The longest uncached part that is computed on the decode worker."""
    return max((length for length in range(1, 600) if _is_local(length, **state)), default=0)


def test_auto_weighs_what_is_to_be_computed_against_the_hand_over() -> None:
    """On an idle cluster some tens of tokens stay, whatever the decode worker holds before them, and more is handed over."""
    assert _break_even() == 70
    # Pulled blocks of what decode holds are part of what a hand-over costs.
    assert _break_even(num_held=250) > 70
    assert all(_is_local(length) == (length <= 70) for length in range(1, 600))


def test_auto_spares_those_that_decode() -> None:
    """The more sequences would wait for the prompt, the sooner it is computed apart."""
    lengths = [_break_even(num_decoding=number) for number in (0, 1, 3, 8, 64)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[1] >= 32
    assert lengths[-1] == 1


def test_auto_heeds_both_queues() -> None:
    """A prompt does not wait for a busy prefill tier when the decode worker could begin at once, nor the other way round."""
    assert _is_local(400, queue_apart=1000) and not _is_local(400, queue_apart=50)
    assert not _is_local(20, queue_here=200) and _is_local(20, queue_here=10)


def test_a_chats_next_turn_stays_unless_decode_is_busy() -> None:
    """All but some tens of tokens lie on the decode worker: nothing need be sent there and back."""
    assert all(_is_local(40, num_held=250, num_decoding=number) for number in (0, 1, 2))
    assert not _is_local(40, num_held=250, num_decoding=16)


def test_a_dearer_hand_over_keeps_more_on_the_decode_worker() -> None:
    """Its price is a setting."""

    def is_local(handover_tokens: int) -> bool:
        rules = Rules("auto", costs=RouteCosts(handover_tokens))
        return place(_prompt(100), PREFILL, DECODE, rules, FIRST).prefill is None

    assert [is_local(price) for price in (0, 16, 64)] == [False, False, True]


def test_a_prefill_worker_of_unknown_load_is_taken_for_busy() -> None:
    """Where the only one has gone silent the decode worker computes; `always` has nobody else."""
    silent = [make_worker("p0", is_load_known=False)]
    assert _place(_prompt(500), silent, mode="auto") == (None, "d0")
    assert _place(_prompt(500), silent, mode="always") == ("p0", "d0")


def test_auto_does_without_a_prefill_tier_and_always_does_not() -> None:
    """With no prefill worker alive the decode workers compute, unless that is forbidden."""
    assert _place(_prompt(500), prefill=[], mode="auto") == (None, "d0")
    with pytest.raises(NoEndpointError):
        _place(_prompt(), prefill=[], mode="always")


@pytest.mark.parametrize("mode", MODES)
def test_without_a_decode_worker_there_is_no_route(mode: DisaggregateMode) -> None:
    """Nobody else can generate."""
    with pytest.raises(NoEndpointError):
        _place(_prompt(), decode=[], mode=mode)


# -- who takes requests


@pytest.mark.parametrize("mode", MODES)
def test_a_draining_decode_worker_gets_nothing(mode: DisaggregateMode) -> None:
    """However attractive it is; when all drain there is nobody."""
    draining = make_worker("d0", draining=True)
    busy = make_worker("d1", num_running=50, num_free_blocks=0)
    assert _place(_prompt(d0=10), decode=[draining, busy], mode=mode)[1] == "d1"
    with pytest.raises(NoEndpointError):
        _place(_prompt(), decode=[draining], mode=mode)


def test_a_draining_prefill_worker_gets_nothing() -> None:
    """The other one does; when all drain, auto does without and always refuses."""
    draining = make_worker("p0", draining=True)
    assert _place(_prompt(p0=10), prefill=[draining, PREFILL[1]]) == ("p1", "d0")
    assert _place(_prompt(500), prefill=[draining], mode="auto") == (None, "d0")
    with pytest.raises(NoEndpointError):
        _place(_prompt(), prefill=[draining], mode="always")


# -- which prefill worker


def test_a_prefix_attracts() -> None:
    """Of two idle workers the one that holds more of the prompt computes it."""
    assert _place(_prompt(p0=1, p1=5))[0] == "p1"


def test_a_queue_repels_in_tokens() -> None:
    """A worker that holds the prefix is left when its queue is longer than what the hit saves, and not before."""
    for num_pending, chosen in ((19, "p1"), (21, "p0")):
        busy = make_worker("p1", num_pending_tokens=num_pending)
        assert _place(_prompt(p1=5), prefill=[PREFILL[0], busy])[0] == chosen


def test_what_was_sent_counts_before_it_is_reported() -> None:
    """The higher of the report and of what this router has sent there since."""
    sent = make_worker("p0", num_assigned_tokens=30)
    reported = make_worker("p1", num_pending_tokens=20, num_assigned_tokens=10)
    assert (sent.num_queued_tokens, reported.num_queued_tokens) == (30, 20)
    assert _place(_prompt(), prefill=[sent, reported])[0] == "p1"


def test_a_worker_where_the_last_attempt_failed_comes_last() -> None:
    """Whatever it holds and however idle it seems: it is chosen only when there is no other."""
    failed = replace(_prompt(p0=9), failed_on=frozenset({"p0"}))
    assert _place(failed)[0] == "p1"
    assert _place(failed, prefill=[PREFILL[0]])[0] == "p0"
    local = replace(_prompt(d0=9), failed_on=frozenset({"d0"}))
    assert _place(local, mode="never")[1] == "d1"
    assert _place(local, decode=DECODE[:1], mode="never")[1] == "d0"


# -- which decode worker


def test_a_decode_worker_without_room_comes_last() -> None:
    """Room for the missing blocks comes before the length of the batch; held blocks need no room."""
    full = make_worker("d0", num_free_blocks=9)
    busy = make_worker("d1", num_running=20)
    assert _place(_prompt(40), decode=[full, busy])[1] == "d1"
    assert _place(_prompt(40, d0=1), decode=[full, busy])[1] == "d0"


def test_room_to_grow_counts() -> None:
    """The answer needs blocks too, and so does everybody who is there; of a very long one only the usual length is asked for."""
    prompt = replace(_prompt(40), max_tokens=12)
    for num_free_blocks, num_running, chosen in ((13, 0, "d0"), (12, 0, "d1"), (18, 5, "d0"), (17, 5, "d1")):
        tight = make_worker("d0", num_free_blocks=num_free_blocks, num_running=num_running)
        assert _place(prompt, decode=[tight, make_worker("d1", num_running=20)])[1] == chosen
    several = replace(prompt, num_candidates=2)
    for num_free_blocks, chosen in ((16, "d0"), (15, "d1")):
        tight = make_worker("d0", num_free_blocks=num_free_blocks)
        assert _place(several, decode=[tight, make_worker("d1", num_running=20)])[1] == chosen
    long = replace(_prompt(40), max_tokens=100_000)
    roomy = make_worker("d0", num_free_blocks=74)
    assert _place(long, decode=[roomy, make_worker("d1", num_running=5, num_free_blocks=5000)])[1] == "d0"


def test_what_lies_there_is_worth_company_where_it_cannot_be_pulled() -> None:
    """A decode worker that computes is chosen for a long prefix although it has more to do, not for a short one; pulls are cheap."""
    decode = [make_worker("d0", num_running=2, num_free_blocks=999), make_worker("d1", num_free_blocks=999)]
    for num_held, pulls, chosen in ((100, False, "d0"), (10, False, "d1"), (100, True, "d1")):
        rules = Rules("never", costs=RouteCosts(pulls=pulls))
        route = place(_prompt(440, d0=num_held), PREFILL, decode, rules, FIRST)
        assert route.decode.key.worker_id == chosen


def test_the_smaller_batch_is_joined() -> None:
    """Running and waiting sequences both count."""
    workers = [make_worker("d0", num_running=1, num_waiting=2), make_worker("d1", num_running=2)]
    assert _place(_prompt(d0=5), decode=workers)[1] == "d1"


def test_sequences_that_were_sent_count_before_they_are_reported() -> None:
    """The higher of the report and of what this router has sent there since."""
    sent, reported = make_worker("d0", num_assigned_sequences=3), make_worker("d1", num_running=2)
    assert (sent.num_sequences, reported.num_sequences) == (3, 2)
    assert _place(_prompt(), decode=[sent, reported])[1] == "d1"


def test_of_equal_batches_the_one_that_needs_least_to_travel() -> None:
    """Blocks that are there need not be pulled."""
    assert _place(_prompt(d0=2, d1=3))[1] == "d1"


# -- cold prompts


def test_a_cold_prompt_goes_where_the_ring_says() -> None:
    """The first of the key's order that is not too full; once anybody holds any of it, cost decides."""
    turn = Turn(0, ("p1", "p0"), ("d1", "d0"))
    assert _place(_prompt(), turn=turn) == ("p1", "d1")
    # Also where another one would be a little sooner.
    busier = [make_worker("p0", num_pending_tokens=990), make_worker("p1", num_pending_tokens=1000)]
    assert _place(_prompt(), busier, turn=turn)[0] == "p1"
    assert _place(_prompt(p0=1), busier, turn=turn)[0] == "p0"
    assert _place(_prompt(), [PREFILL[0], make_worker("p1", num_assigned_tokens=40)], turn=turn)[0] == "p0"
    assert _place(_prompt(p0=1), turn=turn)[0] == "p0"
    busy = [make_worker("d0"), make_worker("d1", num_running=2)]
    assert _place(_prompt(), decode=busy, turn=turn, mode="never") == (None, "d0")
    assert _place(_prompt(), turn=turn, mode="never") == (None, "d1")


# -- who says nothing


@pytest.mark.parametrize("policy", POLICIES)
def test_unknown_load_reads_as_high(policy: PlacementPolicy) -> None:
    """Whoever has not reported of late is idle to nobody: those that have come first, of either tier."""
    prefill = [make_worker("p0", is_load_known=False), make_worker("p1", num_pending_tokens=5000)]
    decode = [
        make_worker("d0", is_load_known=False),
        make_worker("d1", num_running=40, num_free_blocks=0),
    ]
    for number in range(3):
        chosen = _place(_prompt(p0=9, d0=9), prefill, decode, turn=Turn(number), policy=policy)
        assert chosen == ("p1", "d1")
    assert _place(_prompt(), prefill[:1], decode[:1], policy=policy) == ("p0", "d0")


# -- who asks for less work


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cooling_worker_comes_after_the_others(policy: PlacementPolicy) -> None:
    """However short its batch or queue and whatever it holds, of either tier; without cooling it would be chosen."""
    for is_cooling, chosen in ((False, ("p0", "d0")), (True, ("p1", "d1"))):
        prefill = [
            make_worker("p0", cooling_down=is_cooling),
            make_worker("p1", num_pending_tokens=500),
        ]
        decode = [
            make_worker("d0", cooling_down=is_cooling),
            make_worker("d1", num_running=20, num_free_blocks=0),
        ]
        assert _place(_prompt(p0=9, d0=9), prefill, decode, policy=policy) == chosen


@pytest.mark.parametrize("mode", MODES)
def test_when_all_cool_the_choice_is_what_it_was(mode: DisaggregateMode) -> None:
    """Nobody is refused for it."""
    prefill = [make_worker("p0", num_pending_tokens=60), make_worker("p1")]
    decode = [make_worker("d0", num_running=9), make_worker("d1", num_running=2)]
    cool_prefill, cool_decode = (
        [replace(worker, cooling_down=True) for worker in tier] for tier in (prefill, decode)
    )
    chosen = _place(_prompt(), cool_prefill, cool_decode, mode)
    assert chosen == _place(_prompt(), prefill, decode, mode)
    assert chosen[1] == "d1"


# -- hints are only hints


@pytest.mark.parametrize("mode", MODES)
def test_what_unknown_workers_hold_changes_nothing(mode: DisaggregateMode) -> None:
    """An entry of a worker that is not there, or of an earlier life of one that is, counts as nothing."""
    gone = PromptFacts(
        40,
        {WorkerKey(WorkerId(name), BootEpoch(7)): 10 for name in ("p1", "d1", "nobody")},
    )
    assert _place(gone, mode=mode) == _place(_prompt(), mode=mode)
    assert _place(_prompt(p1=10, d1=10), mode="always") == ("p1", "d1")


def _worker(name: str) -> st.SearchStrategy[WorkerView]:
    """A worker in any state."""
    numbers = st.integers(0, 40)
    return st.builds(
        make_worker,
        st.just(name),
        num_free_blocks=numbers,
        num_running=numbers,
        num_waiting=numbers,
        num_pending_tokens=numbers,
        num_assigned_tokens=numbers,
        draining=st.booleans(),
        cooling_down=st.booleans(),
        is_load_known=st.booleans(),
    )


def _workers(tier: str) -> st.SearchStrategy[list[WorkerView]]:
    """Up to four of them."""
    names = st.lists(st.sampled_from([f"{tier}{i}" for i in range(4)]), unique=True)
    return names.flatmap(lambda names: st.tuples(*map(_worker, names)).map(list))


Turns = st.builds(
    Turn,
    st.integers(0, 100),
    *(st.permutations([f"{tier}{i}" for i in range(4)]).map(tuple) for tier in "pd"),
)
Held = st.dictionaries(
    st.sampled_from([WorkerKey(WorkerId(f"{tier}{i}"), BootEpoch(1)) for tier in "pd" for i in range(4)]),
    st.integers(0, 10),
)


@pytest.mark.parametrize("policy", POLICIES)
@given(
    num_tokens=st.integers(1, 60),
    held=Held,
    prefill=_workers("p"),
    decode=_workers("d"),
    mode=st.sampled_from(MODES),
    turn=Turns,
)
def test_a_route_depends_on_the_workers_and_not_on_their_order(
    policy: PlacementPolicy,
    num_tokens: int,
    held: dict[WorkerKey, int],
    prefill: list[WorkerView],
    decode: list[WorkerView],
    mode: DisaggregateMode,
    turn: Turn,
) -> None:
    """The same state gives the same route every time, nobody who drains is chosen, unknown load is high, the mode is obeyed."""
    facts, rules = PromptFacts(num_tokens, held), Rules(mode, policy)
    try:
        route: Route | None = place(facts, prefill, decode, rules, turn)
    except NoEndpointError:
        route = None
    takes_prefill = [worker for worker in prefill if not worker.draining]
    takes_decode = [worker for worker in decode if not worker.draining]
    assert (route is None) == (not takes_decode or (mode == "always" and not takes_prefill))
    if route is None:
        return
    assert route.decode in takes_decode
    assert route.prefill is None or route.prefill in takes_prefill
    assert (route.prefill is None) >= (mode == "never")
    assert (route.prefill is not None) >= (mode == "always")
    assert route.decode.is_load_known or not any(worker.is_load_known for worker in takes_decode)
    if route.prefill is not None:
        assert route.prefill.is_load_known or not any(worker.is_load_known for worker in takes_prefill)
    assert 1 <= route.num_tokens <= num_tokens
    assert place(facts, prefill[::-1], decode[::-1], rules, turn) == route


# -- who may lend the beginning


def _hint(
    prompt: PromptFacts,
    prefill: Sequence[WorkerView] = PREFILL,
    decode: Sequence[WorkerView] = DECODE,
    mode: DisaggregateMode = "always",
) -> tuple[str, int] | None:
    """Who is named to whoever computes the prompt, and for how many tokens."""
    hint = place(prompt, prefill, decode, Rules(mode), FIRST).hint
    return (hint.owner.worker_id, hint.num_tokens) if hint else None


def test_whoever_computes_hears_of_one_that_has_more() -> None:
    """A decode worker that generated the last turn; a prefill worker, for a decode worker that computes; never itself."""
    assert _hint(_prompt(d0=5), PREFILL[:1]) == ("d0", 20)
    assert _hint(_prompt(p0=2, d0=5), PREFILL[:1]) == ("d0", 20)
    assert _hint(_prompt(p0=5, d0=5), PREFILL[:1]) is None
    assert _hint(_prompt(p0=7, d0=5), PREFILL[:1]) is None
    assert _hint(_prompt(p1=7), decode=DECODE[:1], mode="never") == ("p1", 28)
    assert _hint(_prompt()) is None


def test_of_several_that_have_most_the_least_busy_is_named_also_if_it_drains() -> None:
    """Lending is nothing new to compute."""
    decode = [make_worker("d0", num_running=3), make_worker("d1", draining=True), make_worker("d2")]
    assert _hint(_prompt(d0=5, d1=5), PREFILL[:1], decode) == ("d1", 20)
    assert _hint(_prompt(d0=6, d1=5), PREFILL[:1], decode) == ("d0", 24)


def test_a_worker_with_other_blocks_is_chosen_by_tokens_and_lends_nothing() -> None:
    """Its blocks are counted in its own size; whoever cuts blocks in another way could not use them."""
    prefill = [
        make_worker("p0", fingerprint=b"8", block_size=8),
        make_worker("p1", fingerprint=b"8", block_size=8),
    ]
    assert _place(_prompt(p1=2, d0=4), prefill, DECODE[:1]) == ("p1", "d0")
    assert _hint(_prompt(d0=5), prefill[:1], DECODE[:1]) is None
    assert _hint(
        _prompt(p1=2, p0=1), [replace(prefill[0], cooling_down=False), replace(prefill[1], draining=True)]
    ) == (
        "p1",
        16,
    )
