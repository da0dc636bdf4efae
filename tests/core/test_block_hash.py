"""Names for blocks: equal where the content must be equal, different everywhere else."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.block_hash import chain_root, hash_block, hash_full_blocks

ROOT = chain_root(b"model", "tenant")
TokenIds = st.lists(st.integers(0, 2**32 - 1), max_size=24)


def test_hashes_are_the_same_in_every_process_and_version() -> None:
    """Workers compare hashes by bytes, so a change of the digest is a change of the protocol."""
    assert ROOT.hex() == "d6cd64baf95640cdb24b7f404abcb171"
    assert hash_block(ROOT, [1, 2, 3, 4]).hex() == "add6c91d6ab15bc9ab935d9efac40baf"


@given(prefix=TokenIds, tail=TokenIds, other=TokenIds)
def test_equal_prefixes_have_equal_hashes_and_no_others(
    prefix: list[int], tail: list[int], other: list[int]
) -> None:
    """Two prompts share the hashes of exactly those blocks up to which all of their tokens are equal."""
    first, second = prefix + tail, prefix + other
    hashes, others = hash_full_blocks(ROOT, first, 4), hash_full_blocks(ROOT, second, 4)
    for index, (mine, theirs) in enumerate(zip(hashes, others, strict=False)):
        end = 4 * (index + 1)
        assert (mine == theirs) == (first[:end] == second[:end])


@given(token_ids=TokenIds, block_size=st.integers(1, 9))
def test_only_full_blocks_have_a_hash(token_ids: list[int], block_size: int) -> None:
    """A partial last block has none, and adding tokens to it changes no earlier hash."""
    hashes = hash_full_blocks(ROOT, token_ids, block_size)
    assert len(hashes) == len(token_ids) // block_size
    assert hash_full_blocks(ROOT, [*token_ids, 7], block_size)[: len(hashes)] == hashes


def test_the_chain_is_the_blocks_hashed_one_after_the_other() -> None:
    """Hashing a whole prompt equals hashing each block under its predecessor."""
    first = hash_block(ROOT, [1, 2])
    assert hash_full_blocks(ROOT, [1, 2, 1, 2], 2) == (first, hash_block(first, [1, 2]))


def test_the_same_block_in_another_place_has_another_hash() -> None:
    """A block's name depends on everything before it, since its content does."""
    first, second = hash_full_blocks(ROOT, [1, 2, 1, 2], 2)
    assert first != second
    assert len(first) == len(second) == 16


def test_scopes_share_no_block() -> None:
    """The same tokens under another scope have other names; under the same scope the same."""
    assert chain_root(b"model", "tenant") == ROOT
    assert chain_root(b"model", "tenant2") != ROOT
    assert hash_block(chain_root(b"model", "other"), [1]) != hash_block(ROOT, [1])


def test_models_share_no_block() -> None:
    """The same tokens under another fingerprint have other names."""
    assert chain_root(b"model2", "tenant") != ROOT


@given(fingerprint=st.binary(max_size=6), scope=st.text(max_size=6), moved=st.integers(0, 6))
def test_fingerprint_and_scope_do_not_run_together(fingerprint: bytes, scope: str, moved: int) -> None:
    """Moving bytes from one field into the other gives another root, though the bytes joined are equal."""
    joined = fingerprint + scope.encode()
    left, right = joined[:moved], joined[moved:]
    if left == fingerprint or not right.isascii():
        return
    assert chain_root(left, right.decode()) != chain_root(fingerprint, scope)
