"""What transformers itself says: the logits and the greedy output of one sequence, computed plainly."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Reference:
    """A prompt, its greedy output, and the logits at every position that has a next token."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logits: Tensor  # [num_prompt_tokens + num_output_tokens - 1, vocab_size], float32

    def next_token(self, position: int) -> int:
        """The greedy token after the one at `position`."""
        return int(self.logits[position].argmax())


@torch.inference_mode()
def plain_reference(model: PreTrainedModel, prompt_ids: tuple[int, ...], num_output_tokens: int) -> Reference:
    """One sequence at a time, eager attention, no cache: every token from a whole forward pass of its own."""
    before = model.config._attn_implementation  # noqa: SLF001 # transformers has no public name for it
    model.set_attn_implementation("eager")
    try:
        token_ids = list(prompt_ids)
        logits = _logits(model, token_ids)
        for _ in range(num_output_tokens - 1):
            token_ids.append(int(logits[-1].argmax()))
            logits = _logits(model, token_ids)
    finally:
        model.set_attn_implementation(before)
    output_ids = (*token_ids[len(prompt_ids) :], int(logits[-1].argmax()))
    return Reference(prompt_ids, output_ids, logits)


def random_prompt(vocab_size: int, num_tokens: int, seed: int) -> tuple[int, ...]:
    """The same prompt for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(vocab_size, (num_tokens,), generator=generator).tolist())


def _logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits.float()
