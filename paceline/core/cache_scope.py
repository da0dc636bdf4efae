"""Whose cached blocks a request shares: everybody's at its beginning, then those of its tenant alone."""

import re
from dataclasses import dataclass

_PUBLIC = re.compile(r"public:([0-9]{1,9}):(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CacheScope:
    """Blocks wholly within the first `num_public_tokens` are public. Those behind them are named by the salt too.

    The empty scope is public to its end. Its text goes with each piece of work; routers make it, clients never do.
    """

    salt: str = ""
    num_public_tokens: int = 0

    @classmethod
    def parse(cls, text: str) -> "CacheScope":
        """What `str` has written; any other text is a salt."""
        match = _PUBLIC.fullmatch(text)
        return cls(text) if match is None else cls(match[2], int(match[1]))

    def __str__(self) -> str:
        return f"public:{self.num_public_tokens}:{self.salt}" if self.num_public_tokens else self.salt

    @property
    def root_salt(self) -> str:
        """What the first block is named by, beside its model and tokens."""
        return "" if self.num_public_tokens else self.salt

    def begins_private(self, start: int, end: int) -> bool:
        """Whether the block of the tokens from `start` up to `end` is the first that is not public."""
        return self.num_public_tokens > 0 and start <= self.num_public_tokens < end
