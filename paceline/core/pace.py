"""How fast a worker is and what it has to do, in the few numbers from which anybody can tell when it will have time.

The worker measures them of its own steps; the router predicts from them. Both of them, and the simulator, mean the same by each.
"""

from dataclasses import dataclass

# Tokens or sequences of each class, the most urgent first.
ByClass = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds, as measured of late.

    A step takes `step_s`, and `decode_s` more for each sequence that decodes, and `prompt_token_s` for each token of a prompt.
    """

    step_s: float
    decode_s: float
    prompt_token_s: float
    # From one newcomer to the next, while seats or blocks are too few for all that wait; 0 if they never were.
    turn_s: float = 0.0
    # Tokens of prompts to compute that have come in a second, of each class.
    tokens_per_s: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def compute_s(self, num_tokens: int, num_decodes: int, max_step_tokens: int) -> float:
        """How long it takes to compute so many tokens of prompts, beside so many that decode, in steps of limited size."""
        room = max(1, max_step_tokens - num_decodes)
        num_steps = -(-num_tokens // room)
        return num_steps * (self.step_s + self.decode_s * num_decodes) + num_tokens * self.prompt_token_s


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tokens of prompts that are still to be computed, of each lane of the scheduler and each class."""

    fast: ByClass = (0, 0, 0)
    normal: ByClass = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class FastLane:
    """Which requests have a part of each step to themselves, and how large it is; see docs/scheduling.md."""

    share: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
