"""Tiny models of several families, and what plain transformers says about a token list."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from paceline.core.request import SequenceId
from paceline.engine.forward_batch import ForwardBatch
from paceline.engine.model_loader import LoadedModel, load_model
from paceline.engine.model_runner import ModelRunner
from paceline.engine.step import ScheduledSequence, SchedulerOutput, StepOutput
from tests.factories import BLOCK_SIZE

VOCAB_SIZE = 96
WINDOW = 6  # neither a multiple of the block size nor longer than the prompts
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MIXED_LAYERS = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SMALL),
    "qwen2": lambda: Qwen2Config(**SMALL),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=16),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=WINDOW),
    "phi3": lambda: Phi3Config(**SMALL),
    "gemma2": lambda: Gemma2Config(
        **SMALL,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=_MIXED_LAYERS,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SMALL, head_dim=16, sliding_window=WINDOW, layer_types=_MIXED_LAYERS
    ),
    "mixtral": lambda: MixtralConfig(**SMALL, **_MOE),
    "gpt_oss": lambda: GptOssConfig(
        **SMALL, **_MOE, head_dim=16, sliding_window=WINDOW, layer_types=_MIXED_LAYERS
    ),
}


def write_model(config: PreTrainedConfig, directory: Path, *, seed: int = 0) -> Path:
    """A directory with random weights; attention sinks, which start as zeros or rubbish, are random too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call] # it has no annotations
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(parameter)
    model.save_pretrained(directory)
    return directory


@dataclass
class Model:
    """A model as we serve it, beside its twin as transformers runs it."""

    loaded: LoadedModel
    plain: PreTrainedModel

    @torch.inference_mode()
    def plain_logits(self, token_ids: tuple[int, ...]) -> Tensor:
        """[num_tokens, vocab_size], from one forward pass over one sequence."""
        logits: Tensor = self.plain(torch.tensor([token_ids]), use_cache=False).logits[0]
        return logits.float()

    def runner(self, num_blocks: int) -> "RecordingRunner":
        """A runner with memory of its own."""
        return RecordingRunner(self.loaded.model, self.loaded.layout, num_blocks)


def open_model(directory: Path, *, dtype: str = "float32") -> Model:
    """Both twins."""
    loaded = load_model(directory, dtype, BLOCK_SIZE)
    plain = AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=getattr(torch, dtype)
    )
    return Model(loaded, plain.eval())  # type: ignore[no-untyped-call] # it has no annotations


class RecordingRunner(ModelRunner):
    """Keeps the logits of every token that was sampled, by sequence and position of the token before."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.logits: dict[tuple[SequenceId, int], Tensor] = {}
        self._sampled: list[ScheduledSequence] = []

    def execute(self, output: SchedulerOutput) -> StepOutput:
        """See Runner.execute."""
        self._sampled = [item for item in output.scheduled if item.sample is not None]
        return super().execute(output)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See ModelRunner.forward."""
        logits = super().forward(batch)
        for item, row in zip(self._sampled, logits, strict=True):
            self.logits[item.sequence_id, item.end - 1] = row.float().clone()
        return logits
