"""How much of a trace begins alike: what a prefix cache could hold, and what is worth pinning in it."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from benchmarks.simulator.trace import Trace, prompt_ids

Key = bytes


@dataclass(frozen=True, slots=True)
class Coverage:
    """Of one length: how many requests each beginning has that at least two of them share, most frequent first."""

    num_tokens: int
    num_requests: int
    counts: tuple[int, ...]
    # Who begins with each of them: the number of the first such request.
    examples: tuple[int, ...]

    @property
    def num_distinct(self) -> int:
        """Beginnings that are shared."""
        return len(self.counts)

    def share_of(self, num_prefixes: int) -> float:
        """The share of all requests that so many of the most frequent ones cover."""
        return sum(self.counts[:num_prefixes]) / self.num_requests

    def as_json(self) -> dict[str, object]:
        """For programs."""
        shares = {f"first_{count}": self.share_of(count) for count in (1, 4, 16)}
        return {"num_tokens": self.num_tokens, "num_shared": self.num_distinct, **shares}


@dataclass(frozen=True, slots=True)
class Pins:
    """Prefixes of one length that are worth keeping. `is_real`: their tokens are the trace's own, not made-up ones."""

    num_tokens: int
    share: float
    prefixes: tuple[tuple[int, ...], ...]
    is_real: bool

    @property
    def num_tokens_held(self) -> int:
        """Tokens of the cache that they take, for good."""
        return self.num_tokens * len(self.prefixes)

    def as_json(self) -> dict[str, object]:
        """For programs."""
        return {"num_tokens": self.num_tokens, "num_prefixes": len(self.prefixes), "share": self.share}


def coverage(trace: Trace, block_size: int) -> list[Coverage]:
    """For 1, 2, 4, ... blocks, and where it stops growing so fast the lengths between, as long as anything is shared."""
    counts: dict[int, Counter[Key]] = {}
    examples: dict[Key, int] = {}
    for number, request in enumerate(trace.requests):
        ids = array("I", prompt_ids(request, number))
        for num_tokens in _lengths(len(ids), block_size):
            key = blake2b(ids[:num_tokens].tobytes(), digest_size=16).digest()
            counts.setdefault(num_tokens, Counter())[key] += 1
            examples.setdefault(key, number)
    found = [_coverage(num_tokens, counts[num_tokens], examples, trace) for num_tokens in sorted(counts)]
    return [each for each in found if each.counts]


def choose_pins(trace: Trace, found: Sequence[Coverage], max_pins: int, pays_from: float) -> Pins | None:
    """The longest prefixes of which few cover more than `pays_from` of the requests; no more of them than it takes."""
    for each in reversed(found):
        for count in range(1, min(max_pins, each.num_distinct) + 1):
            if each.share_of(count) > pays_from:
                return _pins(trace, each, count)
    return None


def _pins(trace: Trace, found: Coverage, count: int) -> Pins:
    chosen = [(number, trace.requests[number]) for number in found.examples[:count]]
    return Pins(
        num_tokens=found.num_tokens,
        share=found.share_of(count),
        prefixes=tuple(prompt_ids(request, number)[: found.num_tokens] for number, request in chosen),
        is_real=all(request.prompt_ids for _, request in chosen),
    )


def _coverage(num_tokens: int, counts: Counter[Key], examples: dict[Key, int], trace: Trace) -> Coverage:
    shared = [(key, count) for key, count in counts.most_common() if count > 1]
    return Coverage(
        num_tokens,
        len(trace.requests),
        tuple(count for _, count in shared),
        tuple(examples[key] for key, _ in shared),
    )


def _lengths(num_tokens: int, block_size: int) -> list[int]:
    """Whole blocks only, since nothing less is ever shared: every power of two, and the length halfway to the next."""
    lengths, num_blocks = [], 1
    while num_blocks * block_size <= num_tokens:
        lengths.append(num_blocks * block_size)
        halfway = num_blocks + num_blocks // 2
        if num_blocks > 1 and halfway * block_size <= num_tokens:
            lengths.append(halfway * block_size)
        num_blocks *= 2
    return lengths
