"""What the clever code must give, written down without any cleverness."""

from collections.abc import Sequence


def first_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """Where the stop string that is complete first ends, and which it is; of several that end there the longest."""
    ends = [(end, -len(s), s) for s in stop for end in range(1, len(text) + 1) if text[:end].endswith(s)]
    return (min(ends)[0], min(ends)[2]) if ends else None
