"""Which workers a request goes to."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import NoEndpointError
from paceline.core.prefix import WorkerKey
from paceline.core.request import BootEpoch, WorkerId
from router.placement import DisaggregateMode, PromptFacts, Route, WorkerView, place
from tests.factories import make_worker

MODES: list[DisaggregateMode] = ["always", "auto", "never"]
PREFILL = [make_worker("p0"), make_worker("p1")]
DECODE = [make_worker("d0"), make_worker("d1")]


def _prompt(num_tokens: int = 40, **held: int) -> PromptFacts:
    """A prompt of which some workers, in their first life, hold some blocks."""
    keys = {WorkerKey(WorkerId(name), BootEpoch(1)): blocks for name, blocks in held.items()}
    return PromptFacts(num_tokens, keys)


def _place(
    prompt: PromptFacts,
    prefill: Sequence[WorkerView] = PREFILL,
    decode: Sequence[WorkerView] = DECODE,
    mode: DisaggregateMode = "always",
    local_prefill_tokens: int = 16,
) -> tuple[str | None, str]:
    """The names of the prefill and of the decode worker."""
    route = place(prompt, prefill, decode, mode, local_prefill_tokens)
    return route.prefill.key.worker_id if route.prefill else None, route.decode.key.worker_id


# -- whether to disaggregate


def test_always_disaggregates_also_what_is_short() -> None:
    """One token goes to the prefill tier."""
    assert _place(_prompt(1), mode="always") == ("p0", "d0")


def test_never_computes_on_the_decode_worker_also_what_is_long() -> None:
    """A prompt of any length stays there."""
    assert _place(_prompt(5000), mode="never") == (None, "d0")


@pytest.mark.parametrize(
    ("num_tokens", "held", "prefill"), [(16, 0, None), (17, 0, "p0"), (36, 5, None), (37, 5, "p0")]
)
def test_auto_disaggregates_what_is_long_and_not_cached(
    num_tokens: int, held: int, prefill: str | None
) -> None:
    """What counts is the part that the chosen decode worker would have to compute."""
    assert _place(_prompt(num_tokens, d0=held), decode=DECODE[:1], mode="auto") == (prefill, "d0")


def test_auto_does_without_a_prefill_tier_and_always_does_not() -> None:
    """With no prefill worker alive the decode workers compute, unless that is forbidden."""
    assert _place(_prompt(), prefill=[], mode="auto") == (None, "d0")
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
    assert _place(_prompt(), prefill=[draining], mode="auto") == (None, "d0")
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


# -- which decode worker


def test_a_decode_worker_without_room_comes_last() -> None:
    """Room for the missing blocks comes before the length of the batch; held blocks need no room."""
    full = make_worker("d0", num_free_blocks=9)
    busy = make_worker("d1", num_running=20)
    assert _place(_prompt(40), decode=[full, busy])[1] == "d1"
    assert _place(_prompt(40, d0=1), decode=[full, busy])[1] == "d0"


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


# -- who asks for less work


def test_a_cooling_worker_comes_after_the_others() -> None:
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
        assert _place(_prompt(p0=9, d0=9), prefill=prefill, decode=decode) == chosen


@pytest.mark.parametrize("mode", MODES)
def test_when_all_cool_the_choice_is_what_it_was(mode: DisaggregateMode) -> None:
    """Nobody is refused for it."""
    prefill = [make_worker("p0", num_pending_tokens=9), make_worker("p1")]
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
    )


def _workers(tier: str) -> st.SearchStrategy[list[WorkerView]]:
    """Up to four of them."""
    names = st.lists(st.sampled_from([f"{tier}{i}" for i in range(4)]), unique=True)
    return names.flatmap(lambda names: st.tuples(*map(_worker, names)).map(list))


Held = st.dictionaries(
    st.sampled_from([WorkerKey(WorkerId(f"{tier}{i}"), BootEpoch(1)) for tier in "pd" for i in range(4)]),
    st.integers(0, 10),
)


@given(
    num_tokens=st.integers(1, 60),
    held=Held,
    prefill=_workers("p"),
    decode=_workers("d"),
    mode=st.sampled_from(MODES),
)
def test_a_route_depends_on_the_workers_and_not_on_their_order(
    num_tokens: int,
    held: dict[WorkerKey, int],
    prefill: list[WorkerView],
    decode: list[WorkerView],
    mode: DisaggregateMode,
) -> None:
    """Equal costs go to the same worker every time, nobody who drains is chosen, and the mode is obeyed."""
    facts = PromptFacts(num_tokens, held)
    try:
        route: Route | None = place(facts, prefill, decode, mode, 16)
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
    assert place(facts, prefill[::-1], decode[::-1], mode, 16) == route


# -- who may lend the beginning


def _hint(
    prompt: PromptFacts,
    prefill: Sequence[WorkerView] = PREFILL,
    decode: Sequence[WorkerView] = DECODE,
    mode: DisaggregateMode = "always",
) -> tuple[str, int] | None:
    """Who is named to whoever computes the prompt, and for how many tokens."""
    hint = place(prompt, prefill, decode, mode, 16).hint
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
    assert _place(_prompt(40, d0=5), prefill, DECODE[:1], mode="auto", local_prefill_tokens=20) == (
        None,
        "d0",
    )
