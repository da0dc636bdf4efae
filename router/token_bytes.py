"""What each token adds to the output, as bytes; so text can be put together token by token, at constant cost each.

It holds copies of the tokenizer's tables and needs neither the tokenizer nor its thread.
"""

import codecs
import json
import re
from collections.abc import Mapping

from tokenizers.decoders import Decoder

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Decoders look only at whether a token is the first; any plain token in front makes the next one not the first.
_ANCHOR = "a"


class TokenBytes:
    """The bytes of every token that is shown; `skipped` ids (the special tokens) and unknown ids add nothing.

    The bytes of several tokens joined, then read as UTF-8, are what the tokenizer's own decoder gives. There is one
    exception, in our favour: where byte tokens (`<0xE2>`) do not make up whole characters, SentencePiece decoders
    spoil all the bytes of the run, and we only the broken ones.
    """

    def __init__(self, tokens: Mapping[int, str], skipped: frozenset[int], decoder: Decoder | None) -> None:
        self._tokens = tokens
        self._skipped = skipped
        self._decoder = decoder
        kinds = _kinds(decoder)
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        # At most two entries a token: as the first of the output, and anywhere else.
        self._cache: dict[tuple[int, bool], bytes] = {}

    def shows(self, token_id: int) -> bool:
        """Whether the token is part of the text at all."""
        return token_id in self._tokens and token_id not in self._skipped

    def get(self, token_id: int, *, first: bool) -> bytes:
        """The bytes of a token that is shown. The `first` one shown may lack the space that stands before a word."""
        key = (token_id, first)
        if key not in self._cache:
            self._cache[key] = self._bytes_of(self._tokens[token_id], first=first)
        return self._cache[key]

    def _bytes_of(self, token: str, *, first: bool) -> bytes:
        if self._byte_level:
            return _byte_level_bytes(token)
        byte = self._byte_of(token)
        if byte >= 0x80:
            return bytes((byte,))
        if first:
            return self._decode([token]).encode()
        return self._decode([_ANCHOR, token]).removeprefix(self._decode([_ANCHOR])).encode()

    def _byte_of(self, token: str) -> int:
        """The value of a byte token; -1 for any other."""
        match = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        return int(match[1], 16) if match else -1

    def _decode(self, tokens: list[str]) -> str:
        return self._decoder.decode(tokens) if self._decoder else " ".join(tokens)


class TextDecoder:
    """Tokens to text, without regard to stop strings. Holds back at most the three bytes of a broken character."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._first = True

    def push(self, token_id: int) -> str:
        """The characters that are complete with this token."""
        if not self._token_bytes.shows(token_id):
            return ""
        data = self._token_bytes.get(token_id, first=self._first)
        self._first = False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """U+FFFD for a character that never became whole, or nothing."""
        return self._utf8.decode(b"", final=True)


def _kinds(decoder: Decoder | None) -> frozenset[str]:
    """The names of the steps that a decoder is made of."""
    if decoder is None:
        return frozenset()
    state = json.loads(decoder.__getstate__())
    return frozenset(step["type"] for step in state.get("decoders", [state]))


def _byte_level_alphabet() -> dict[str, int]:
    """The letter that stands for each byte in a byte-level vocabulary: printable ones stand for themselves."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """An added token may hold letters outside the alphabet; it stands for itself."""
    if all(letter in _BYTE_OF_LETTER for letter in token):
        return bytes(_BYTE_OF_LETTER[letter] for letter in token)
    return token.encode()
