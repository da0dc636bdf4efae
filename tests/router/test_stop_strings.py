"""Stop strings, found in text that comes in pieces."""

from hypothesis import example, given
from hypothesis import strategies as st

from router.stop_strings import StopMatcher
from tests.router.reference import first_stop

# Two letters: repetitions, overlaps and stop strings inside stop strings are then the rule.
Letters = st.text("ab", max_size=6)
Stops = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3)


@example(pieces=["b", "ab"], stop=["ab", "bab"], include_stop=False)
@given(pieces=st.lists(Letters, max_size=8), stop=Stops, include_stop=st.booleans())
def test_the_first_complete_stop_string_ends_the_text(
    pieces: list[str], stop: list[str], include_stop: bool
) -> None:
    """However the text is cut, what is shown and which stop string matched follow from the whole text alone."""
    whole = "".join(pieces)
    shown, matched = _feed(StopMatcher(stop, include_stop=include_stop), pieces)
    found = first_stop(whole, stop)
    if found is None:
        assert (shown, matched) == (whole, None)
    else:
        end, expected = found
        assert (shown, matched) == (whole[: end if include_stop else end - len(expected)], expected)


@given(pieces=st.lists(Letters, max_size=8), stop=Stops)
def test_only_what_may_become_a_stop_string_is_held_back(pieces: list[str], stop: list[str]) -> None:
    """After each piece, the text that is not shown yet is the longest one that still begins a stop string."""
    matcher = StopMatcher(stop)
    seen = shown = ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        if matched:
            return
        seen, shown = seen + piece, shown + text
        beginnings = {s[:length] for s in stop for length in range(len(s))}
        assert len(seen) - len(shown) == max(len(each) for each in beginnings if seen.endswith(each))


def _feed(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    shown: list[str] = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        shown.append(text)
        if matched:
            return "".join(shown), matched
    return "".join(shown) + matcher.flush(), None
