"""What two processes must agree on before tokens or blocks pass between them."""

import hashlib
from dataclasses import dataclass, fields

from paceline.core.errors import FingerprintMismatchError


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """Digests of everything that decides which KV a token list gives."""

    weights: str
    tokenizer: str
    chat_template: str
    config: str
    dtype: str
    block_size: int
    kv_layout: str
    arithmetic: str  # "fast", or in exact mode a digest of the bits that this machine computes

    def digest(self) -> bytes:
        """One name for all of it, 16 bytes."""
        values = [str(getattr(self, field.name)).encode() for field in fields(self)]
        # Lengths first: no value can pass for a part of its neighbour.
        lengths = " ".join(str(len(value)) for value in values).encode()
        return hashlib.blake2b(lengths + b":" + b"".join(values), digest_size=16).digest()

    def require_same(self, theirs: "ModelFingerprint") -> None:
        """Raises FingerprintMismatchError with the first field that differs."""
        for field in fields(self):
            ours_value, theirs_value = getattr(self, field.name), getattr(theirs, field.name)
            if ours_value != theirs_value:
                raise FingerprintMismatchError(field.name, str(ours_value), str(theirs_value))
