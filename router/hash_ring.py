"""A consistent-hash ring with virtual nodes and a bound on load: which members a key prefers, and the first that is not too full.

After Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (arXiv:1608.01350). It knows neither workers nor
prompts, neither clock nor network.
"""

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Final

# Points of each member: with 128 its share of the keys is within some 9 % (one standard deviation) of 1/n.
POINTS_PER_MEMBER: Final = 128
# No member is given more than this times the mean, as long as anybody has less.
LOAD_BOUND: Final = Fraction(5, 4)
# So much of a prompt's beginning names it: long enough to tell users of one short system prompt apart.
KEY_TOKENS: Final = 128

_POINT_BYTES = 8


@dataclass(frozen=True, slots=True)
class HashRing:
    """Members on a circle. The same members make the same ring, in whatever order they are named."""

    # Ascending; the owner of each point is at the same index.
    _points: tuple[int, ...]
    _owners: tuple[str, ...]
    members: frozenset[str]

    @classmethod
    def of(cls, members: Iterable[str], points_per_member: int = POINTS_PER_MEMBER) -> "HashRing":
        """The ring of some members; each counts once."""
        named = frozenset(members)
        placed = sorted(
            (_point(f"{name}/{n}".encode()), name) for name in named for n in range(points_per_member)
        )
        return cls(tuple(point for point, _ in placed), tuple(name for _, name in placed), named)

    def walk(self, key: bytes) -> Iterator[str]:
        """Every member once, in the order in which the key prefers them: clockwise from the key's own point."""
        start = bisect_right(self._points, _point(key))
        seen: set[str] = set()
        for index in range(len(self._points)):
            owner = self._owners[(start + index) % len(self._owners)]
            if owner not in seen:
                seen.add(owner)
                yield owner
                if len(seen) == len(self.members):
                    return


def load_limit(loads: Sequence[int], size: int) -> int:
    """The most that a member may have once it has been given `size` more.

    That is 1.25 times the mean that there will be, rounded up, and never so little that nobody could take it.
    """
    mean = Fraction(sum(loads) + size, len(loads))
    return max(ceil(LOAD_BOUND * mean), min(loads) + size)


def within_bound(loads: Sequence[int], size: int) -> int:
    """The index of the first member, in the order of a walk, that stays within the limit when it is given `size` more."""
    limit = load_limit(loads, size)
    return next(index for index, load in enumerate(loads) if load + size <= limit)


def prompt_key(token_ids: Sequence[int], cache_scope: str) -> bytes:
    """The key of prompts that begin alike, within one cache scope."""
    return _digest(cache_scope.encode(), array("I", token_ids[:KEY_TOKENS]).tobytes())


def session_key(session_id: str, cache_scope: str) -> bytes:
    """The key of all prompts of one session, within one cache scope."""
    return _digest(b"session", cache_scope.encode(), session_id.encode())


def _digest(*fields: bytes) -> bytes:
    """Each field with its length before it, so that no two lists of fields are the same bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for field in fields:
        digest.update(len(field).to_bytes(4, "little") + field)
    return digest.digest()


def _point(name: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name, digest_size=_POINT_BYTES).digest(), "little")
