"""What two processes must agree on."""

from dataclasses import fields

import pytest

from paceline.core.errors import FingerprintMismatchError
from paceline.core.fingerprint import ModelFingerprint
from tests.factories import FINGERPRINT, make_fingerprint

NAMES = [field.name for field in fields(ModelFingerprint)]


def _changed(name: str) -> ModelFingerprint:
    return make_fingerprint(**{name: 8 if name == "block_size" else "other"})


def test_equal_fingerprints_agree() -> None:
    """Two processes with the same settings may talk, and use one name for what they serve."""
    FINGERPRINT.require_same(make_fingerprint())
    assert FINGERPRINT.digest() == make_fingerprint().digest()


@pytest.mark.parametrize("name", NAMES)
def test_each_field_is_compared_and_named(name: str) -> None:
    """A difference in any one field is refused, and the refusal says which field and both values."""
    other = _changed(name)
    with pytest.raises(FingerprintMismatchError) as caught:
        FINGERPRINT.require_same(other)
    assert caught.value.facts() == {
        "field": name,
        "ours": str(getattr(FINGERPRINT, name)),
        "theirs": str(getattr(other, name)),
    }


@pytest.mark.parametrize("name", NAMES)
def test_each_field_changes_the_digest(name: str) -> None:
    """No field is left out of the name from which block hashes start."""
    assert _changed(name).digest() != FINGERPRINT.digest()


def test_fields_do_not_run_together() -> None:
    """A value that looks like the next field does not give another fingerprint's digest."""
    one = make_fingerprint(weights="a\ntokenizer=b", tokenizer="c")
    two = make_fingerprint(weights="a", tokenizer="b\ntokenizer=c")
    assert one.digest() != two.digest()


@pytest.mark.parametrize("name", NAMES)
def test_only_how_blocks_are_cut_can_be_converted(name: str) -> None:
    """Another block size or another part of the heads is the same content; any other difference is refused and named."""
    other = _changed(name)
    if name in ("block_size", "kv_part"):
        FINGERPRINT.require_same_content(other)
        return
    with pytest.raises(FingerprintMismatchError, match=name):
        FINGERPRINT.require_same_content(other)
