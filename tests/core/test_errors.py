"""The tree of errors."""

import inspect
from collections.abc import Iterator

import pytest

from paceline.core import errors
from paceline.core.errors import PacelineError
from tests.factories import make_errors


def _children(kind: type[PacelineError]) -> list[type[PacelineError]]:
    """Those of the tree itself; a package may have finer ones for its own use."""
    return [child for child in kind.__subclasses__() if child.__module__ == errors.__name__]


def _all_errors(kind: type[PacelineError] = PacelineError) -> Iterator[type[PacelineError]]:
    yield kind
    for child in _children(kind):
        yield from _all_errors(child)


ERRORS = list(_all_errors())
LEAVES = [kind for kind in ERRORS if not _children(kind)]


def test_the_picture_shows_every_error() -> None:
    """The tree at the top of the file names each public class, with the reason of each that is raised."""
    picture = inspect.getdoc(errors) or ""
    lines = {line.strip("│├└─ ").split(" ")[0]: line for line in picture.splitlines() if line}
    public = [kind for kind in ERRORS if not kind.__name__.startswith("_")]
    assert [kind.__name__ for kind in public if kind.__name__ not in lines] == []
    assert [kind for kind in LEAVES if kind.reason not in lines[kind.__name__]] == []


def test_every_error_is_told_apart_by_its_reason() -> None:
    """Each class that is raised has a reason of its own."""
    assert all("reason" in vars(kind) for kind in LEAVES)
    assert len({kind.reason for kind in LEAVES}) == len(LEAVES)


def test_the_examples_leave_no_error_out() -> None:
    """The list that other tests go through is complete."""
    assert sorted(type(error).__name__ for error in make_errors()) == sorted(kind.__name__ for kind in LEAVES)


@pytest.mark.parametrize("error", make_errors(), ids=lambda error: type(error).__name__)
def test_facts_are_text_that_the_message_shows_too(error: PacelineError) -> None:
    """What an error knows can travel as text, and a person reads the same as a program."""
    facts = error.facts()
    assert str(error)
    assert all(value in str(error) for value in facts.values())


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (
            errors.PromptTooLongError(limit=4, given=5, unit="bytes"),
            {"limit": "4", "given": "5", "unit": "bytes"},
        ),
        (errors.BadSamplingError("top_p", "is 0"), {"field": "top_p"}),
        (errors.BadStopError("stop", "is empty"), {"field": "stop"}),
        (errors.NotBuiltError("logprobs", "later"), {"field": "logprobs"}),
        (errors.ScopeForbiddenError("priority", "is for others"), {"field": "priority"}),
        (
            errors.RateLimitedError("tokens", 6000, retry_after_s=2.5),
            {"limit": "tokens", "per_minute": "6000", "retry_after_s": "2.5"},
        ),
        (errors.DeadlineError("transfer"), {"phase": "transfer"}),
        (errors.KvChecksumError(3), {"ordinal": "3"}),
        (errors.FingerprintMismatchError("dtype", "a", "b"), {"field": "dtype", "ours": "a", "theirs": "b"}),
        (errors.KvLostError("gone"), {}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_facts_name_what_was_wrong(error: PacelineError, facts: dict[str, str]) -> None:
    """An error that concerns one thing says which."""
    assert error.facts() == facts
