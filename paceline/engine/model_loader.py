"""Loads a Hugging Face directory as a model that our paged attention can run, or refuses it with the reason."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)

from paceline.core.errors import ConfigError, UnsupportedModelError
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.kv_layout import KVLayout, LayerKV
from paceline.engine.attention import ATTENTION_NAME
from paceline.engine.kv_cache import TORCH_DTYPES

_PROBE_NAME = "paceline_probe"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json")
# How far a layer may look. What else there is, such as attention in chunks, a model does by its mask alone, which is
# never built here: left unchecked it would be served wrongly as soon as a prompt is longer than a chunk.
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, and everything that is computed from its directory once."""

    model: PreTrainedModel
    layout: KVLayout
    fingerprint: ModelFingerprint
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_model_tokens: int


def load_model(directory: Path, dtype: str, block_size: int) -> LoadedModel:
    """The causal language model in `directory`; raises ConfigError or UnsupportedModelError.

    Safetensors only, and no code out of the directory.
    """
    model = _from_pretrained(directory, dtype)
    _require_known_layers(model)
    layout = KVLayout(probe_layers(model), block_size, dtype)
    model.set_attn_implementation(ATTENTION_NAME)
    text_config, eos_token_ids = model.config.get_text_config(), _eos_token_ids(directory, model)
    return LoadedModel(
        model=model,
        layout=layout,
        fingerprint=fingerprint_of(directory, layout, eos_token_ids),
        eos_token_ids=eos_token_ids,
        vocab_size=text_config.vocab_size,
        max_model_tokens=text_config.max_position_embeddings,
    )


def probe_layers(model: PreTrainedModel) -> tuple[LayerKV, ...]:
    """The KV geometry of each layer, as the layers themselves show it in one short forward pass.

    Raises UnsupportedModelError when a layer never asks for attention: it would silently ignore our KV cache.
    """
    seen: dict[int, LayerKV] = {}

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in seen:
            raise UnsupportedModelError(f"{_name(model)} calls attention more than once a layer")
        seen[layer] = LayerKV(key.shape[1], key.shape[3], value.shape[3])
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2), None

    AttentionInterface.register(_PROBE_NAME, record)
    model.set_attn_implementation(_PROBE_NAME)
    with torch.inference_mode():
        model(input_ids=torch.tensor([[0, 1, 2]]), position_ids=torch.arange(3)[None], use_cache=False)
    num_layers = model.config.get_text_config().num_hidden_layers
    if sorted(seen) != list(range(num_layers)):
        raise UnsupportedModelError(
            f"{_name(model)} uses attention in {len(seen)} of its {num_layers} layers; "
            "layers with a state of another kind cannot be served"
        )
    return tuple(seen[layer] for layer in range(num_layers))


def fingerprint_of(directory: Path, layout: KVLayout, eos_token_ids: frozenset[int]) -> ModelFingerprint:
    """Digests of the directory's files by content."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    # Both tiers decide where an output ends, so they must agree on it.
    config["eos_token_ids"] = sorted(eos_token_ids)
    return ModelFingerprint(
        weights=_digest_files(sorted(directory.glob("*.safetensors"))),
        tokenizer=_digest_files(directory / name for name in _TOKENIZER_FILES),
        chat_template=_digest_files(directory / name for name in _TEMPLATE_FILES),
        config=xxhash.xxh3_128_hexdigest(json.dumps(config, sort_keys=True).encode()),
        dtype=layout.dtype,
        block_size=layout.block_size,
        kv_layout=layout.digest(),
    )


def _from_pretrained(directory: Path, dtype: str) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=TORCH_DTYPES[dtype],
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"cannot load the model in {directory}: {str(error).partition(chr(10))[0]}"
        ) from error
    return cast("PreTrainedModel", model.eval())  # type: ignore[no-untyped-call] # it has no annotations


def _require_known_layers(model: PreTrainedModel) -> None:
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    unknown = sorted(set(layer_types) - _LAYER_TYPES)
    if unknown:
        raise UnsupportedModelError(
            f"{_name(model)} has layers of a kind that cannot be served: {', '.join(unknown)}"
        )


def _eos_token_ids(directory: Path, model: PreTrainedModel) -> frozenset[int]:
    try:
        eos = GenerationConfig.from_pretrained(directory, local_files_only=True).eos_token_id
    except OSError:
        eos = model.config.get_text_config().eos_token_id
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def _digest_files(paths: Iterable[Path]) -> str:
    """One digest over names and contents; files that do not exist count as empty."""
    digest = xxhash.xxh3_128()
    for path in paths:
        content = path.read_bytes() if path.exists() else b""
        digest.update(f"{path.name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__
