"""Turns the tokens of one candidate into text as they come: whole characters only, and nothing past a stop string."""

from collections.abc import Iterable
from dataclasses import dataclass

from router.stop_strings import StopMatcher
from router.token_bytes import TextDecoder
from router.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What some new tokens added to the text.

    `matched_stop` is the stop string that they completed; then only the first `num_tokens` of them count, and the
    text ends before the stop string (or with it).
    """

    text: str
    matched_stop: str | None
    num_tokens: int


class Detokenizer:
    """The text of one candidate.

    The deltas and what `flush` gives, joined, equal one decode of all tokens (up to the stop string), however the
    tokens are cut. A stop string matches in whole characters only; special tokens are no text and match nothing.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decoder = TextDecoder(tokenizer.token_bytes)
        self._matcher = StopMatcher(stop, include_stop=include_stop)
        self._matched_stop: str | None = None
        # Tokens whose text cannot end the output yet, so that no stop string is looked for in it.
        self._num_free_tokens = max(0, min_tokens - 1)

    def push(self, token_ids: Iterable[int]) -> TextDelta:
        """Takes the next tokens. After a stop string, tokens are overshoot: they count nothing and show nothing."""
        shown: list[str] = []
        num_tokens = 0
        for token_id in token_ids:
            if self._matched_stop is not None:
                break
            shown.append(self._take(token_id))
            num_tokens += 1
        return TextDelta("".join(shown), self._matched_stop, num_tokens)

    def _take(self, token_id: int) -> str:
        text = self._decoder.push(token_id)
        if self._num_free_tokens > 0:
            self._num_free_tokens -= 1
            return text
        text, self._matched_stop = self._matcher.push(text)
        return text

    def flush(self) -> str:
        """The end of the text, once no token comes any more: what could have become a character or a stop string."""
        if self._matched_stop is not None:
            return ""
        return self._matcher.flush() + self._decoder.flush()
