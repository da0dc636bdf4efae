"""`python -m paceline.launcher.convert_gguf FILE.gguf DIR`: a GGUF file into a Hugging Face directory.

A program of its own, so that the launcher itself never loads torch.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel


def convert(gguf: Path, directory: Path) -> None:
    """Write model, tokenizer, chat template (if it has one) and generation settings of `gguf` into `directory`, in bf16."""
    _plain_copy(_load(gguf)).save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)


def _load(gguf: Path) -> PreTrainedModel:
    # Without `dequantize` transformers keeps the weights packed.
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    return model


def _plain_copy(source: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that never was a GGUF: one loaded from a GGUF refuses to be saved."""
    copy = type(source)(source.config).bfloat16()
    copy.load_state_dict(source.state_dict())
    copy.tie_weights()
    copy.generation_config = source.generation_config
    return copy


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
