"""Where keys are on the ring, and how full a member may be."""

from collections import Counter
from fractions import Fraction
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from router.hash_ring import (
    KEY_TOKENS,
    LOAD_BOUND,
    HashRing,
    load_limit,
    prompt_key,
    session_key,
    within_bound,
)

NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8, unique=True)
KEYS = [f"key {number}".encode() for number in range(4000)]


def first(ring: HashRing, key: bytes) -> str:
    """Who a key prefers."""
    return next(ring.walk(key))


@given(names=NAMES, key=st.binary(max_size=20))
def test_a_walk_meets_every_member_once(names: list[str], key: bytes) -> None:
    """So there is always a next one, and the walk ends."""
    assert sorted(HashRing.of(names).walk(key)) == sorted(names)


@given(names=NAMES, key=st.binary(max_size=20))
def test_the_order_of_insertion_does_not_matter(names: list[str], key: bytes) -> None:
    """Every router that knows the same members makes the same ring."""
    ring, other = HashRing.of(names), HashRing.of([*names[::-1], names[0]])
    assert ring == other
    assert list(ring.walk(key)) == list(other.walk(key))


@given(names=NAMES, key=st.binary(max_size=20), data=st.data())
def test_a_member_that_is_left_out_changes_nothing_for_the_others(
    names: list[str], key: bytes, data: st.DataObject
) -> None:
    """A walk that passes somebody by is the walk on the ring without it."""
    gone = data.draw(st.sampled_from(names))
    rest = [name for name in names if name != gone]
    walked = [name for name in HashRing.of(names).walk(key) if name != gone]
    assert walked == list(HashRing.of(rest).walk(key))


def test_nobody_is_on_an_empty_ring() -> None:
    """A walk on it ends at once."""
    assert list(HashRing.of(()).walk(b"key")) == []


def test_one_member_more_moves_its_share_and_nothing_else() -> None:
    """Of n members then, one gets about 1/n of the keys, and all of those that move go to it; back it is the same."""
    for num_members in (2, 4, 8, 16, 32):
        names = [f"worker-{number}" for number in range(num_members)]
        before, after = HashRing.of(names[:-1]), HashRing.of(names)
        moved = [first(after, key) for key in KEYS if first(before, key) != first(after, key)]
        assert set(moved) == {names[-1]}
        assert 0.6 / num_members < len(moved) / len(KEYS) < 1.4 / num_members


def test_shares_are_about_equal() -> None:
    """With 128 points each, nobody's share of the keys is far from the mean."""
    names = [f"worker-{number}" for number in range(8)]
    shares = Counter(first(HashRing.of(names), key) for key in KEYS)
    assert max(shares.values()) < 1.4 * len(KEYS) / len(names)
    assert min(shares.values()) > 0.6 * len(KEYS) / len(names)


# -- the bound


@given(
    num_members=st.integers(1, 12),
    keys=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=80),
)
def test_the_bound_is_never_exceeded(num_members: int, keys: list[tuple[int, int]]) -> None:
    """Requests come and go, most of them with few keys: whoever is given one has at most 1.25 times the mean, rounded up."""
    ring = HashRing.of(f"worker-{number}" for number in range(num_members))
    held: list[str] = []
    for key, num_leaving in keys:
        del held[: num_leaving // 2]
        loads = Counter(held)
        order = list(ring.walk(bytes([key])))
        chosen = order[within_bound([loads[name] for name in order], 1)]
        held.append(chosen)
        assert Counter(held)[chosen] <= ceil(LOAD_BOUND * Fraction(len(held), num_members))


@given(loads=st.lists(st.integers(0, 500), min_size=1, max_size=12), size=st.integers(1, 400))
def test_whoever_is_passed_by_is_too_full(loads: list[int], size: int) -> None:
    """The first that fits is taken; somebody always does, be the request ever so large."""
    chosen = within_bound(loads, size)
    limit = load_limit(loads, size)
    assert loads[chosen] + size <= limit
    assert all(load + size > limit for load in loads[:chosen])
    mean = Fraction(sum(loads) + size, len(loads))
    assert limit == max(ceil(LOAD_BOUND * mean), min(loads) + size)


def test_nobody_is_given_more_than_five_quarters_of_the_mean() -> None:
    """Of 44 among four that is 14: the first one takes its fourteenth, and not its fifteenth."""
    assert within_bound([13, 10, 10, 10], 1) == 0
    assert within_bound([14, 10, 10, 9], 1) == 1


def test_only_the_traffic_of_the_full_one_goes_elsewhere() -> None:
    """Keys of the others stay where they are."""
    ring = HashRing.of(f"worker-{number}" for number in range(8))
    loads = {name: 9 if name == "worker-3" else 8 for name in ring.members} | {"worker-3": 40}
    for key in KEYS[:200]:
        order = list(ring.walk(key))
        chosen = order[within_bound([loads[name] for name in order], 1)]
        assert chosen == next(name for name in order if name != "worker-3")


# -- keys


@given(st.lists(st.integers(0, 2**32 - 1), min_size=KEY_TOKENS, max_size=KEY_TOKENS + 20))
def test_prompts_that_begin_alike_have_one_key(token_ids: list[int]) -> None:
    """What comes behind the beginning does not matter; one other token in it does, and so does the scope."""
    key = prompt_key(token_ids, "a")
    assert key == prompt_key([*token_ids[:KEY_TOKENS], 1, 2, 3], "a")
    assert key != prompt_key([token_ids[0] ^ 1, *token_ids[1:]], "a")
    assert key != prompt_key(token_ids, "b")


def test_a_session_is_its_own_within_a_scope() -> None:
    """Two tenants' sessions of one name are two, and no session has the key of a prompt."""
    assert session_key("chat", "a") == session_key("chat", "a")
    assert (
        len(
            {
                session_key("chat", "a"),
                session_key("chat", "b"),
                session_key("other", "a"),
                prompt_key((), "a"),
            }
        )
        == 4
    )
