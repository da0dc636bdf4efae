"""What it costs to bring a preempted sequence back, by how its KV is kept meanwhile; in seconds, as they were measured."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass

# A new measurement counts so much against those before it.
_WEIGHT = 0.1
# Blocks of the two made-up pulls that the estimate begins with, and how much each of them always counts.
_GUESSED_PULLS = (1, 64)
_GUESS_WEIGHT = 0.002
# Of blocks that nobody has asked for anything of late, a part is there; so much of the way back to that guess goes each of them.
_GUESSED_HIT_SHARE = 0.5
_FORGETTING = 0.01


class PreemptionKind(enum.Enum):
    """What becomes of the KV of a preempted sequence."""

    RECOMPUTE = "recompute"  # it is dropped; what is still cached when the sequence comes back is found
    SWAP = "swap"  # it is copied to host memory, and back
    REMOTE = "remote"  # it is dropped, and pulled again from the worker that computed the prompt, if that still has it


@dataclass(frozen=True, slots=True)
class Loss:
    """What a sequence would lose."""

    num_tokens: int  # computed, and in blocks that nobody else holds
    num_blocks: int  # that hold them
    num_remote_tokens: int = 0  # of those tokens, how many another worker has computed
    num_remote_blocks: int = 0


class CostEstimate:
    """Running means. Before the first measurement they are guesses for a small model on a CPU."""

    def __init__(self) -> None:
        self.token_s = 1e-3
        self.swap_block_s = 1e-4  # out and back in
        self.remote_pull_s = 2e-2  # asking, and the round trips
        self.remote_block_s = 1e-3
        self.remote_miss_s = 0.0  # to find out that nothing comes
        self.remote_hit_share = _GUESSED_HIT_SHARE
        # What was measured of pulls: weight, and weighted sums of x, y, x * x and x * y.
        guesses = ((x, self.pull_s(x)) for x in _GUESSED_PULLS)
        self._guesses = _sums(guesses, _GUESS_WEIGHT)
        self._pulls: tuple[float, ...] = (0.0,) * 5

    def note_chunk(self, num_tokens: int, duration_s: float) -> None:
        """A step has computed so many tokens of prompts."""
        self.token_s = _mean(self.token_s, duration_s / num_tokens)

    def note_swap(self, num_blocks: int, duration_s: float) -> None:
        """So many blocks were copied out; the way back takes as long."""
        self.swap_block_s = _mean(self.swap_block_s, 2 * duration_s / num_blocks)

    def note_remote(self, num_asked: int, num_blocks: int, duration_s: float) -> None:
        """Of so many blocks that were asked for, so many came."""
        self.remote_hit_share = _mean(self.remote_hit_share, num_blocks / num_asked)
        if not num_blocks:
            self.remote_miss_s = _mean(self.remote_miss_s, duration_s)
            return
        measured = _sums([(num_blocks, duration_s)], _WEIGHT)
        self._pulls = tuple(
            _mean(so_far, new / _WEIGHT) for so_far, new in zip(self._pulls, measured, strict=True)
        )
        self.remote_pull_s, self.remote_block_s = _line(
            map(sum, zip(self._pulls, self._guesses, strict=True))
        )

    def note_unasked(self) -> None:
        """Blocks were computed again that might have been pulled. Without this, some misses in a row would end all pulls for good."""
        self.remote_hit_share += _FORGETTING * (_GUESSED_HIT_SHARE - self.remote_hit_share)

    def pull_s(self, num_blocks: int) -> float:
        """How long it takes to pull so many blocks at once."""
        return self.remote_pull_s + self.remote_block_s * num_blocks

    def is_pull_cheaper(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether to ask for so many blocks, instead of computing their tokens at once."""
        return self._ask_s(num_blocks) < self.remote_hit_share * self.token_s * num_tokens

    def _ask_s(self, num_blocks: int) -> float:
        """How long it takes to ask for so many blocks, whether they come or not."""
        hits = self.remote_hit_share
        return hits * self.pull_s(num_blocks) + (1 - hits) * max(self.remote_miss_s, self.remote_pull_s)

    def recompute_s(self, loss: Loss) -> float:
        """All of it is computed again."""
        return self.token_s * loss.num_tokens

    def swap_s(self, loss: Loss) -> float:
        """All of it is copied out and back."""
        return self.swap_block_s * loss.num_blocks

    def remote_s(self, loss: Loss) -> float:
        """What was computed elsewhere is pulled, which may fail; the rest, and what does not come, is computed."""
        num_saved = self.remote_hit_share * loss.num_remote_tokens
        return self._ask_s(loss.num_remote_blocks) + self.token_s * (loss.num_tokens - num_saved)

    def cheapest(self, loss: Loss, *, may_swap: bool, may_recall: bool) -> tuple[float, PreemptionKind]:
        """The best of the kinds that are possible, and what it costs; computing again always is."""
        best_s, kind = self.recompute_s(loss), PreemptionKind.RECOMPUTE
        if may_swap and (swap_s := self.swap_s(loss)) < best_s:
            best_s, kind = swap_s, PreemptionKind.SWAP
        if may_recall and (remote_s := self.remote_s(loss)) < best_s:
            best_s, kind = remote_s, PreemptionKind.REMOTE
        return best_s, kind


def _mean(so_far: float, measured: float) -> float:
    return so_far + _WEIGHT * (measured - so_far)


def _sums(points: Iterable[tuple[int, float]], weight: float) -> tuple[float, ...]:
    """What a line through points needs to know of them."""
    terms = [(1.0, x, y, x * x, x * y) for x, y in points]
    return tuple(weight * sum(column) for column in zip(*terms, strict=True))


def _line(sums: Iterable[float]) -> tuple[float, float]:
    """Least squares: value at 0, and slope; neither is negative."""
    weight, x, y, xx, xy = sums
    slope = max(0.0, (weight * xy - x * y) / (weight * xx - x * x))
    return max(0.0, (y - slope * x) / weight), slope
