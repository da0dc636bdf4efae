"""Tokens to text, piece by piece."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.detokenizer import Detokenizer
from router.tokenizer import Tokenizer
from tests.router.reference import first_stop

Cuts = st.lists(st.integers(1, 4), max_size=8)


def _ids(max_id: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, max_id), max_size=40)


def _stops() -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.text("ab tehér\ufffd", min_size=1, max_size=4), max_size=3).map(tuple)


def _cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """The ids in runs of the given sizes, the rest in one."""
    runs: list[list[int]] = []
    start = 0
    for size in sizes:
        runs.append(ids[start : start + size])
        start += size
    return [*runs, ids[start:]]


def _stream(
    tokenizer: Tokenizer, runs: list[list[int]], stop: tuple[str, ...] = (), *, include_stop: bool = False
) -> tuple[str, str | None, int]:
    """The whole text, the stop string, and how many tokens counted."""
    detokenizer = Detokenizer(tokenizer, stop, include_stop=include_stop)
    deltas = [detokenizer.push(run) for run in runs]
    for delta in deltas:
        delta.text.encode()  # raises where a delta is not valid UTF-8
    text = "".join(delta.text for delta in deltas) + detokenizer.flush()
    return text, deltas[-1].matched_stop, sum(delta.num_tokens for delta in deltas)


@given(ids=_ids(500), cuts=Cuts)
def test_deltas_joined_equal_the_library_decode(
    byte_level: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    """Random tokens, randomly cut: the deltas joined are the library's own decode, broken characters included."""
    text, _, num_tokens = _stream(byte_level, _cut(ids, cuts))
    assert text == byte_level._tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
    assert num_tokens == len(ids)


@given(ids=_ids(300), cuts=Cuts)
def test_deltas_joined_equal_one_decode_with_byte_tokens(
    byte_fallback: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    """The same with byte tokens; where all their runs are whole characters the library's decode is equal too."""
    text, _, _ = _stream(byte_fallback, _cut(ids, cuts))
    library = byte_fallback._tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
    assert text == byte_fallback.decode(ids)
    assert len(text) <= len(library)
    if "\ufffd" not in library:
        assert text == library


@given(ids=_ids(300), cuts=Cuts, stop=_stops(), include_stop=st.booleans())
def test_stop_strings_cut_the_text_where_they_are_first_complete(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], stop: tuple[str, ...], include_stop: bool
) -> None:
    """However tokens are cut, the text ends at the first complete stop string, the longest of those that end there."""
    whole = _stream(tokenizer, [ids])[0].removesuffix(_tail(tokenizer, ids))
    found = first_stop(whole, stop)
    text, matched, num_tokens = _stream(tokenizer, _cut(ids, cuts), stop, include_stop=include_stop)
    if found is None:
        assert (text, matched, num_tokens) == (tokenizer.decode(ids), None, len(ids))
        return
    end, expected = found
    assert matched == expected
    assert text == (whole[:end] if include_stop else whole[: end - len(expected)])
    assert num_tokens == _tokens_until(tokenizer, ids, end)


def _tail(tokenizer: Tokenizer, ids: list[int]) -> str:
    """What only the flush gives: a character that never became whole."""
    detokenizer = Detokenizer(tokenizer)
    detokenizer.push(ids)
    return detokenizer.flush()


def _tokens_until(tokenizer: Tokenizer, ids: list[int], num_letters: int) -> int:
    """How many tokens it takes until so many characters are complete."""
    detokenizer = Detokenizer(tokenizer)
    shown = 0
    for count, token_id in enumerate(ids, start=1):
        shown += len(detokenizer.push([token_id]).text)
        if shown >= num_letters:
            return count
    raise AssertionError("the text is shorter")


def test_a_character_is_held_back_until_it_is_whole(tokenizer: Tokenizer) -> None:
    """A character of four tokens comes with its last one, and never as U+FFFD."""
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("\U0001f9ff")
    deltas = [detokenizer.push([token_id]).text for token_id in ids]
    assert "".join(deltas[:-1]) == ""
    assert (deltas[-1], detokenizer.flush()) == ("\U0001f9ff", "")


def test_a_genuine_replacement_character_survives(tokenizer: Tokenizer) -> None:
    """U+FFFD that the model really wrote is text like any other."""
    assert _stream(tokenizer, [list(tokenizer.encode("a\ufffd"))])[0] == "a\ufffd"


def test_a_broken_character_shows_at_the_flush(tokenizer: Tokenizer) -> None:
    """Output that ends inside a character ends in U+FFFD."""
    ids = tokenizer.encode("a\U0001f9ff")[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids).text == "a"
    assert detokenizer.flush() == "\ufffd"


def test_what_is_held_back_is_bounded(byte_level: Tokenizer) -> None:
    """Bytes that can never become a character are shown, not collected."""
    (lead,) = (token_id for token, token_id in byte_level._tokenizer.get_vocab().items() if token == "ð")
    detokenizer = Detokenizer(byte_level)
    assert detokenizer.push([lead] * 100).text == "\ufffd" * 99


def test_the_leading_space_is_dropped_once(byte_fallback: Tokenizer) -> None:
    """SentencePiece's space before the first word is not shown, also when a special token comes before it."""
    ids = list(byte_fallback.encode("the the"))
    assert _stream(byte_fallback, [[1], *([token_id] for token_id in ids)])[0] == "the the"


def test_tokens_after_a_stop_string_count_nothing(byte_level: Tokenizer) -> None:
    """Overshoot is neither shown nor counted, in the same push and in later ones."""
    ids = byte_level.encode("one\n\ntwo")
    detokenizer = Detokenizer(byte_level, ("\n\n",))
    first = detokenizer.push(ids)
    assert (first.text, first.matched_stop) == ("one", "\n\n")
    assert first.num_tokens < len(ids)
    late = detokenizer.push(ids)
    assert (late.text, late.matched_stop, late.num_tokens, detokenizer.flush()) == ("", "\n\n", 0, "")


def test_a_possible_stop_string_is_held_back_and_given_up(byte_level: Tokenizer) -> None:
    """The beginning of a stop string waits; it is shown when it turns out to be something else, or at the end."""
    detokenizer = Detokenizer(byte_level, ("END",))
    shown = [detokenizer.push(byte_level.encode(letter)).text for letter in "aEEN"]
    assert shown == ["a", "", "E", ""]
    assert detokenizer.flush() == "EN"


@pytest.mark.parametrize(("include_stop", "text"), [(False, "a "), (True, "a END")])
def test_include_stop_shows_the_stop_string(byte_level: Tokenizer, include_stop: bool, text: str) -> None:
    """The stop string is shown when asked for, and nothing after it."""
    runs = [[token_id] for token_id in byte_level.encode("a END b")]
    assert _stream(byte_level, runs, ("END",), include_stop=include_stop)[:2] == (text, "END")
