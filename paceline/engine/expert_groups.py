"""Which of many decoding sequences share a step when not all of them do: those that the same experts compute."""

from collections.abc import Iterable
from itertools import islice

from paceline.engine.sequence import Sequence


def take_turns(decoding: Iterable[Sequence], max_decodes: int) -> list[Sequence]:
    """The first ones; whoever has decoded goes to the end of the line."""
    return list(islice(decoding, max_decodes))


def share_experts(decoding: Iterable[Sequence], max_decodes: int) -> list[Sequence]:
    """The first one, whose turn it is, and those whose last token needed the fewest experts beside its own.

    Experts change slowly from token to token where they stand for a topic or a language; elsewhere this is worth little.
    """
    first, *others = decoding
    fewest = sorted(others, key=lambda each: (each.experts & ~first.experts).bit_count())
    return [first, *fewest[: max_decodes - 1]]
