"""A model of which each process has some layers: what one has computed is what the next one begins with."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel

from paceline.core.errors import UnsupportedModelError
from paceline.core.kv_layout import LayerKV
from paceline.engine.parallel.place import Stage


@dataclass(frozen=True, slots=True)
class StageOutput:
    """As a model's own output: of the last stage logits, of the others the hidden states that these would be made of."""

    logits: Tensor


@dataclass(slots=True)
class StagedForward:
    """The forward pass of one stage, in the place of its model's own. The ranks of the group are the stages, in order.

    Batches are computed by all stages in the same order, and a stage begins with the next one while others still compute the last.
    """

    model: PreTrainedModel
    stage: Stage
    dtype: torch.dtype  # of what is handed on; the model itself may have no parameter left that tells
    _waited_s: float = 0.0
    # What the next stage may not have taken yet: once forgotten, it is not sent any more.
    _sent: list[tuple[distributed.Work, Tensor]] = field(default_factory=list)

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        use_cache: bool = False,  # noqa: FBT001, FBT002 - as models have it
        logits_to_keep: Tensor | None = None,
    ) -> StageOutput:
        """See the forward of a transformers model."""
        given: dict[str, Any] = {"position_ids": position_ids, "use_cache": use_cache}
        if self.stage.is_first:
            given["input_ids"] = input_ids
        else:
            given["inputs_embeds"] = self._receive(input_ids.shape)
        if self.stage.is_last:
            rows: Any = 0 if logits_to_keep is None else logits_to_keep
            output = type(self.model).forward(self.model, **given, logits_to_keep=rows)
            return StageOutput(output.logits)
        hidden: Tensor = self.model.base_model(**given).last_hidden_state
        self._send(hidden)
        return StageOutput(hidden if logits_to_keep is None else hidden[:, logits_to_keep])

    def flush(self) -> None:
        """Returns when the next stage has taken everything."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def take_wait_s(self) -> float:
        """For how long the stage before has been waited for since this was asked last."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _receive(self, shape: torch.Size) -> Tensor:
        hidden = torch.empty(*shape, self.model.config.get_text_config().hidden_size, dtype=self.dtype)
        begin_s = time.perf_counter()
        distributed.recv(hidden, self.stage.index - 1)
        self._waited_s += time.perf_counter() - begin_s
        return hidden

    def _send(self, hidden: Tensor) -> None:
        work = distributed.isend(hidden, self.stage.index + 1)
        assert work is not None, "this process is one of the group"
        self._sent.append((work, hidden))


def gathered(layers: Mapping[int, LayerKV], num_layers: int) -> dict[int, LayerKV]:
    """The layers of all stages, of which each process brings its own."""
    if any(layer.shared_with is not None or layer.is_latent for layer in layers.values()):
        raise UnsupportedModelError(
            "--pp: layers that share keys and values, or keep latents, are not served in stages"
        )
    table = torch.zeros(num_layers, 5, dtype=torch.long)
    for index, layer in layers.items():
        sizes = (layer.num_kv_heads, layer.key_dim, layer.value_dim, layer.window or 0, layer.num_sink_tokens)
        table[index] = torch.tensor(sizes)
    distributed.all_reduce(table)
    return {
        index: LayerKV(heads, key_dim, value_dim, window or None, num_sink_tokens=sinks)
        for index, (heads, key_dim, value_dim, window, sinks) in enumerate(table.tolist())
        if heads
    }
