"""What a step of a dense model has to read and to compute at least, counted from its sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.simulator.cost import StepWork
from paceline.core.errors import ConfigError
from paceline.core.kv_layout import KVLayout


class Shape(NamedTuple):
    """A linear layer's."""

    in_features: int
    out_features: int

    @property
    def num_weights(self) -> int:
        return self.in_features * self.out_features

    def __str__(self) -> str:
        return f"{self.in_features}x{self.out_features}"


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Of a dense model: its linear layers, that of the logits apart; what it keeps of a token; its attention."""

    layers: tuple[Shape, ...]
    head: Shape
    weight_bytes: int  # read by a step, whatever is in it: all but the table of embeddings, of which a row a token is read
    kv_bytes_per_token: int
    attention_flops_per_pair: int  # of all layers, for each token and each one that it attends to

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The different ones of a layer."""
        return tuple(dict.fromkeys(self.layers))

    def linear_flops(self, work: StepWork) -> float:
        """Every token passes the layers, and one of each sequence the head."""
        num_layer_weights = sum(shape.num_weights for shape in self.layers)
        return 2.0 * (num_layer_weights * work.num_tokens + self.head.num_weights * work.num_sequences)

    def attention_flops(self, work: StepWork) -> float:
        """Scores, and the sums of values."""
        return float(self.attention_flops_per_pair * (work.num_decode_context + work.num_chunk_context))

    def kv_bytes(self, work: StepWork) -> float:
        """What decodes read."""
        return float(self.kv_bytes_per_token * work.num_decode_context)


def model_size(directory: Path, layout: KVLayout, item_bytes: int) -> ModelSize:
    """Counted on a model without weights, as transformers describes it, whatever ours is prepared into; raises ConfigError."""
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call] # it has no annotations
    head = model.get_output_embeddings()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    shapes = tuple(Shape(each.in_features, each.out_features) for each in linears)
    weights = {id(each): each for each in model.parameters() if id(each) not in tables} | {
        id(head.weight): head.weight
    }
    num_heads = config.get_text_config().num_attention_heads
    _require_dense(
        shapes, [each.numel() for each in weights.values()], Shape(*head.weight.shape[::-1]), layout
    )
    return ModelSize(
        layers=shapes,
        head=Shape(head.in_features, head.out_features),
        weight_bytes=item_bytes * sum(each.numel() for each in weights.values()),
        kv_bytes_per_token=layout.block_bytes * len(layout.groups) // layout.block_size,
        attention_flops_per_pair=sum(
            2 * num_heads * (layer.key_dim + layer.value_dim) for layer in layout.layers
        ),
    )


def _require_dense(shapes: Sequence[Shape], sizes: Sequence[int], head: Shape, layout: KVLayout) -> None:
    """Experts, of which a token needs a few, are no linear layers in transformers; and a window hides tokens."""
    num_linear = head.num_weights + sum(shape.num_weights for shape in shapes)
    if sum(sizes) > 1.1 * num_linear or any(layer.window is not None for layer in layout.layers):
        raise ConfigError("what a step has to do is counted for dense models without windows only")
