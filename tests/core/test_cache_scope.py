"""Who shares which block: everybody the public ones, each tenant its own."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.block_hash import BlockHash, chain_root, hash_full_blocks
from paceline.core.cache_scope import CacheScope

TOKENS = tuple(range(20))


@given(st.builds(CacheScope, st.text(max_size=20), st.integers(0, 10**6)))
def test_a_scope_is_what_its_text_says(scope: CacheScope) -> None:
    """It survives the way to a worker, whatever its salt is made of, unless a salt alone looks like a public scope."""
    if scope.num_public_tokens or not scope.salt.startswith("public:"):
        assert CacheScope.parse(str(scope)) == scope


@given(st.text(max_size=30))
def test_any_text_is_a_scope(text: str) -> None:
    """Whatever a peer sends names some scope, also what nearly looks like one with a public part; nothing raises."""
    for scope in (text, f"public:{text}", f"public:3:{text}"):
        assert len(hashes(scope)) == 5


def hashes(scope: str, tokens: tuple[int, ...] = TOKENS, block_size: int = 4) -> tuple[BlockHash, ...]:
    """Of the full blocks in a scope."""
    return hash_full_blocks(chain_root(b"model", scope), tokens, block_size, scope)


def shared(one: str, other: str, tokens: tuple[int, ...] = TOKENS) -> int:
    """How many leading blocks of the same tokens have the same names in two scopes."""
    same = [mine == theirs for mine, theirs in zip(hashes(one, tokens), hashes(other, tokens), strict=True)]
    assert same == sorted(same, reverse=True), "what comes after a private block is private"
    return sum(same)


def test_tenants_share_whole_blocks_of_what_is_public() -> None:
    """Another tenant has the public blocks and none behind them; the same tenant has all."""
    anne, bert = (str(CacheScope(salt, 8)) for salt in ("anne", "bert"))
    assert shared(anne, bert) == 2
    assert shared(anne, anne) == 5
    assert shared("anne", "bert") == 0


def test_a_block_that_is_public_in_part_is_private() -> None:
    """The first block past the public tokens takes the salt in, also when some of its tokens are public."""
    for num_public, num_shared in ((3, 0), (4, 1), (7, 1), (8, 2), (11, 2), (20, 5), (30, 5)):
        anne, bert = (str(CacheScope(salt, num_public)) for salt in ("anne", "bert"))
        assert shared(anne, bert) == num_shared


def test_public_blocks_are_those_of_the_empty_scope() -> None:
    """What a worker pins, it pins for everybody."""
    assert shared("", str(CacheScope("anne", 8))) == 2
    assert shared("", "anne") == 0


def test_longer_and_shorter_public_prefixes_share_what_both_have() -> None:
    """Two prefixes that begin alike have their common blocks once."""
    assert shared(str(CacheScope("anne", 8)), str(CacheScope("bert", 16))) == 2
