"""What two processes must agree on before tokens or blocks pass between them."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields

from paceline.core.errors import FingerprintMismatchError

# Tokens in a block, and whose heads.
_CUT = ("block_size", "kv_part")


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """Digests of everything that decides which KV a token list gives."""

    weights: str
    tokenizer: str
    chat_template: str
    config: str
    dtype: str
    kv_dtype: str
    kv_layout: str
    kv_part: str
    block_size: int
    quantization: str  # of the weights: "none", "w8a8", "w4a16"
    arithmetic: str  # "fast", or in exact mode a digest of the bits that this machine computes

    def digest(self) -> bytes:
        """One name for all of it, 16 bytes."""
        values = [str(getattr(self, field.name)).encode() for field in fields(self)]
        # Lengths first: no value can pass for a part of its neighbour.
        lengths = " ".join(str(len(value)) for value in values).encode()
        return hashlib.blake2b(lengths + b":" + b"".join(values), digest_size=16).digest()

    def require_same(self, theirs: "ModelFingerprint") -> None:
        """Raises FingerprintMismatchError with the first field that differs."""
        self._require_equal(theirs, [field.name for field in fields(self)])

    def require_same_content(self, theirs: "ModelFingerprint") -> None:
        """The same, but for how the KV of one token list is cut into blocks: that can be converted."""
        self._require_equal(theirs, [field.name for field in fields(self) if field.name not in _CUT])

    def _require_equal(self, theirs: "ModelFingerprint", names: Iterable[str]) -> None:
        for name in names:
            ours_value, theirs_value = getattr(self, name), getattr(theirs, name)
            if ours_value != theirs_value:
                raise FingerprintMismatchError(name, str(ours_value), str(theirs_value))
