"""What it costs to bring a preempted sequence back, by how its KV is kept meanwhile; in seconds, as they were measured."""

import enum
from dataclasses import dataclass

# A new measurement counts so much against those before it.
_WEIGHT = 0.1
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
        self.remote_block_s = 1e-3
        self.remote_hit_share = _GUESSED_HIT_SHARE

    def note_chunk(self, num_tokens: int, duration_s: float) -> None:
        """A step has computed so many tokens of prompts."""
        self.token_s = _mean(self.token_s, duration_s / num_tokens)

    def note_swap(self, num_blocks: int, duration_s: float) -> None:
        """So many blocks were copied out; the way back takes as long."""
        self.swap_block_s = _mean(self.swap_block_s, 2 * duration_s / num_blocks)

    def note_remote(self, num_asked: int, num_blocks: int, duration_s: float) -> None:
        """Of so many blocks that were asked for, so many came."""
        self.remote_hit_share = _mean(self.remote_hit_share, num_blocks / num_asked)
        if num_blocks:
            self.remote_block_s = _mean(self.remote_block_s, duration_s / num_blocks)

    def note_unasked(self) -> None:
        """Blocks were computed again that might have been pulled. Without this, some misses in a row would end all pulls for good."""
        self.remote_hit_share += _FORGETTING * (_GUESSED_HIT_SHARE - self.remote_hit_share)

    def recompute_s(self, loss: Loss) -> float:
        """All of it is computed again."""
        return self.token_s * loss.num_tokens

    def swap_s(self, loss: Loss) -> float:
        """All of it is copied out and back."""
        return self.swap_block_s * loss.num_blocks

    def remote_s(self, loss: Loss) -> float:
        """What was computed elsewhere is pulled, which may fail; the rest, and what does not come, is computed."""
        num_saved = self.remote_hit_share * loss.num_remote_tokens
        return self.remote_block_s * loss.num_remote_blocks + self.token_s * (loss.num_tokens - num_saved)

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
