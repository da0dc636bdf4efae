"""Which models can be computed in parts or in stages, into how many, and what whole blocks parts make up."""

import math
from dataclasses import replace
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from paceline.core.errors import ConfigError, UnsupportedModelError
from paceline.core.kv_layout import KVLayout

# Those whose parts have been compared with the whole, by tests/engine/parallel/test_architectures.py. The plans by which weights are
# split are those of transformers: of others some leave attention whole, and some give wrong numbers.
SERVED_IN_PARTS = frozenset(
    {
        "apertus",
        "arcee",
        "codegen",
        "cohere",
        "cohere2",
        "cwm",
        "deepseek_v2",
        "dots1",
        "ernie4_5",
        "exaone4",
        "exaone_moe",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "glm",
        "glm4",
        "glm4_moe",
        "gpt_neox",
        "gptj",
        "granite",
        "helium",
        "llama",
        "mimo_v2_flash",
        "minicpm3",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "nanochat",
        "nemotron",
        "olmo",
        "phi",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
        "vaultgemma",
    }
)
# The same for stages; only what embeds, goes through layers one after the other and ends with a norm can be cut so.
SERVED_IN_STAGES = frozenset(
    {
        "apertus",
        "arcee",
        "cohere",
        "cohere2",
        "cwm",
        "ernie4_5",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "granite",
        "helium",
        "hunyuan_v1_dense",
        "llama",
        "ministral",
        "ministral3",
        "mistral",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen3",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
        "vaultgemma",
    }
)


def require_place(directory: Path, *, tp: int, pp: int) -> None:
    """Raises ConfigError or UnsupportedModelError for a model that cannot be computed in so many parts, or stages."""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read the config of the model in {directory}: {error}") from error
    if tp > 1:
        require_parts(config, tp)
    if pp > 1:
        require_stages(config, pp)


def require_parts(config: PreTrainedConfig, num_parts: int) -> None:
    """The same for a config, in parts."""
    _require_served(config, SERVED_IN_PARTS, f"--tp {num_parts}")
    text = config.get_text_config()
    num_heads = text.num_attention_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    most = math.gcd(num_heads, num_kv_heads)
    if most % num_parts:
        fitting = [str(each) for each in range(1, most + 1) if most % each == 0]
        raise ConfigError(
            f"--tp {num_parts}: the {num_heads} heads and {num_kv_heads} KV heads of this model do not divide into "
            f"{num_parts} parts; what fits is --tp {' or '.join(fitting)}"
        )


def require_stages(config: PreTrainedConfig, num_stages: int) -> None:
    """The same, in stages."""
    _require_served(config, SERVED_IN_STAGES, f"--pp {num_stages}")
    num_layers = config.get_text_config().num_hidden_layers
    if num_stages > num_layers:
        raise ConfigError(f"--pp {num_stages}: the model has {num_layers} layers, and each stage needs one")


def _require_served(config: PreTrainedConfig, served: frozenset[str], asked: str) -> None:
    if config.model_type not in served:
        raise UnsupportedModelError(
            f"{asked}: models of type {config.model_type} are served by one process only; those that are not: "
            f"{', '.join(sorted(served))}"
        )


def whole_layout(part: KVLayout, num_parts: int) -> KVLayout:
    """The layout of the blocks that all parts make up, from what the layers of one of them show."""
    layers = tuple(replace(layer, num_kv_heads=layer.num_kv_heads * num_parts) for layer in part.layers)
    return KVLayout(layers, part.block_size, part.dtype)
