"""Counts, while a mixture of experts computes, how many tokens its own routers give to each expert."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.engine.step import ExpertTokens


class ExpertLoad:
    """Watches the routers of one model, of which it knows only the form.

    A router is a module that has a number `num_experts` and returns a tuple with one tensor of integers,
    [num_tokens, experts a token]: its choice. What has the number and returns something else, as the experts
    themselves do, is left alone. A model without such modules costs nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._candidates = [
            (_layer_of(name), module)
            for name, module in model.named_modules()
            if isinstance(getattr(module, "num_experts", None), int)
        ]
        self._counts: dict[int, Tensor] = {}
        # The rows whose experts are to be told, and for each layer so far the place of its first bit and their choices.
        self._rows: Tensor | None = None
        self._chosen: list[tuple[int, list[list[int]]]] = []
        self._num_bits = 0

    @property
    def has_routers(self) -> bool:
        """Whether there is anything to count."""
        return bool(self._candidates)

    @contextmanager
    def counting(self, rows: Tensor | None = None) -> Iterator[None]:
        """What the model computes inside is counted; several runners of one model do not count each other's.

        With `rows`, places in the batch, also which experts compute each of them.
        """
        self._rows = rows
        with ExitStack() as hooks:
            for layer, module in self._candidates:
                handle = module.register_forward_hook(self._hook(layer))
                hooks.callback(handle.remove)
            yield

    def take(self) -> tuple[ExpertTokens, ...]:
        """What was counted since it was taken last, layer by layer."""
        counts, self._counts = self._counts, {}
        return tuple(ExpertTokens(layer, tuple(counts[layer].tolist())) for layer in sorted(counts))

    def take_experts(self) -> tuple[int, ...]:
        """For each of the rows the experts that it was given, a bit for each expert of each layer."""
        chosen, self._chosen, self._num_bits = self._chosen, [], 0
        masks = [0] * (len(chosen[0][1]) if chosen else 0)
        for first_bit, choices in chosen:
            for row, experts in enumerate(choices):
                for expert in experts:
                    masks[row] |= 1 << (first_bit + expert)
        return tuple(masks)

    def _hook(self, layer: int) -> Any:
        def count(module: nn.Module, _: tuple[Any, ...], output: object) -> None:
            choice = _choice_in(output)
            if choice is not None:
                num_experts = int(module.num_experts)  # type: ignore[arg-type] # it is an int: see __init__
                self._add(layer, num_experts, choice.flatten())
                if self._rows is not None:
                    self._chosen.append((self._num_bits, choice[self._rows].tolist()))
                    self._num_bits += num_experts

        return count

    def _add(self, layer: int, num_experts: int, choice: Tensor) -> None:
        if layer not in self._counts:
            self._counts[layer] = torch.zeros(num_experts, dtype=torch.long, device=choice.device)
        # Not bincount, which on a GPU would wait for the choice.
        self._counts[layer].scatter_add_(0, choice.long(), torch.ones_like(choice, dtype=torch.long))


def _choice_in(output: object) -> Tensor | None:
    """The one tensor of integers in a router's answer."""
    parts = output if isinstance(output, tuple) else ()
    found = [part for part in parts if isinstance(part, Tensor) and part.dtype in {torch.int32, torch.int64}]
    return found[0] if len(found) == 1 and found[0].dim() == 2 else None


def _layer_of(name: str) -> int:
    """The number in a module's path, such as model.layers.3.mlp.gate."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), 0)
