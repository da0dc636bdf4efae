"""Finds stop strings in text that comes in pieces, and holds back what may still become one."""

from collections.abc import Sequence


class StopMatcher:
    """Watches one candidate's text for the first stop string.

    The match that is complete first wins, and of those that are complete at the same character the longest. So the
    result does not depend on how the text was cut into pieces. Text after the match is never shown; the stop string
    itself only with `include_stop`.
    """

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False) -> None:
        self._patterns = tuple(_Pattern(text) for text in stop)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that can be shown now, and the stop string that is complete. Not to be called after a match."""
        if not self._patterns:
            return text, None
        pending = self._held + text
        for end, letter in enumerate(text, start=len(self._held) + 1):
            complete = [pattern for pattern in self._patterns if pattern.advance(letter)]
            if complete:
                return self._matched(pending[:end], max((pattern.text for pattern in complete), key=len))
        cut = len(pending) - max(pattern.num_matched for pattern in self._patterns)
        self._held = pending[cut:]
        return pending[:cut], None

    def flush(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _matched(self, text: str, stop: str) -> tuple[str, str]:
        self._held = ""
        return (text if self._include_stop else text.removesuffix(stop)), stop


class _Pattern:
    """One stop string, matched letter by letter at constant cost (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        # fallback[n]: after n matched letters and a wrong one, so many of them still begin a match.
        self._fallback = [0, 0]
        for letter in text[1:]:
            self._fallback.append(self._step(self._fallback[-1], letter))

    def advance(self, letter: str) -> bool:
        """Takes one letter; True when the text is complete with it."""
        self.num_matched = self._step(self.num_matched, letter)
        return self.num_matched == len(self.text)

    def _step(self, num_matched: int, letter: str) -> int:
        while num_matched and self.text[num_matched] != letter:
            num_matched = self._fallback[num_matched]
        return num_matched + (self.text[num_matched] == letter)
