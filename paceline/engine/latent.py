"""The compact cache of MLA models (DeepSeek-V2, https://arxiv.org/abs/2405.04434): what is kept is the latent.

Such a model compresses a token's keys and values into one small vector, offers it to the cache's `update`, and expands
what that returns. So a cache that keeps the latents, and returns those of the whole context, needs no change in the
model; the price is that every step expands its contexts anew.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from paceline.core.kv_layout import LayerKV
from paceline.engine.attention import current_attention, gather_seen


class LatentCache(Cache):
    """Passed to the model's forward: stores what it is offered in the KV cache, and returns the batch's contexts.

    Those stand end to end, each as far as its tokens see it, in the order of the batch.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Both [1, 1, num_tokens, dim]; gives them as [1, 1, tokens of all contexts, dim]."""
        context = current_attention.get()
        cache, batch = context.cache, context.batch
        if not cache.layout.layers[layer_idx].is_latent:
            return key_states, value_states
        slots = batch.slot_mappings[cache.group_of[layer_idx]]
        cache.write_tokens(layer_idx, slots, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        found = [gather_seen(cache, layer_idx, part, key_states.dtype) for part in batch.queries]
        latents, rotary = (
            torch.cat(parts).transpose(0, 1).unsqueeze(0) for parts in zip(*found, strict=True)
        )
        return latents, rotary

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are given explicitly; nothing is to be added to them."""
        del layer_idx
        return 0


class NotedCache(Cache):
    """Notes what each layer offers, for the probe, and keeps nothing."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.offered: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Gives back what came."""
        self.offered[layer_idx] = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """It is empty."""
        del layer_idx
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length of keys and offset: those of the tokens themselves."""
        del layer_idx
        return query_length, 0

    def latent_layer(self, index: int, key: Tensor, value: Tensor) -> LayerKV | None:
        """What the layer, whatever it sees, stores when it stores what it offered; None if that is what it attends to anyway."""
        first, second = self.offered.get(index, (key, value))
        if first is key and second is value:
            return None
        return LayerKV(first.shape[1], first.shape[3], second.shape[3], is_latent=True)
