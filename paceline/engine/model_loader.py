"""Loads a Hugging Face directory as a model that our paged attention can run, or refuses it with the reason."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import xxhash
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from paceline.core.errors import ConfigError
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.kv_layout import KVLayout
from paceline.engine.attention import ATTENTION_NAME
from paceline.engine.device import HOST, Device
from paceline.engine.exact.model import make_exact
from paceline.engine.fused_layer import fuse_layers
from paceline.engine.fusion import pack_linears
from paceline.engine.kv_cache import TORCH_DTYPES
from paceline.engine.native_attention import choose_attention
from paceline.engine.parallel.packing import pack_parts
from paceline.engine.parallel.place import WHOLE, Place
from paceline.engine.parallel.plan import whole_layout
from paceline.engine.parallel.stages import StagedForward, gathered
from paceline.engine.probe import Gather, probe_layers
from paceline.runtime.log import get_logger

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
log = get_logger()

_NO_LIMIT = 1 << 20  # tokens, of a model whose config names no longest context


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, and everything that is computed from its directory once."""

    model: PreTrainedModel
    layout: KVLayout
    fingerprint: ModelFingerprint
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_model_tokens: int
    # What of the model this process computes; `layout` is of all layers and heads.
    place: Place = WHOLE
    device: Device = HOST


def load_model(
    directory: Path,
    dtype: str,
    block_size: int,
    exactness: str = "fast",
    kv_dtype: str = "auto",
    mla: str = "expanded",
    attention: str = "auto",
    *,
    place: Place = WHOLE,
    device: Device = HOST,
) -> LoadedModel:
    """The causal language model in `directory`; raises ConfigError or UnsupportedModelError.

    Safetensors only, and no code out of the directory. With `auto` the KV has the dtype of the weights. `mla` is what a
    model with latent attention keeps: "expanded" keys and values, or the "latent". `attention` is what fast mode computes it
    with: "native", compiled on this machine; "triton" on a GPU; "torch"; "auto", the one made for the `device` where that can be. What
    is not for this `place` is not loaded: the process is one of a group, all of which load theirs at the same time.
    """
    if exactness == "exact":
        _require_exact_can_be(attention, device)
    if exactness == "exact" and mla == "latent":
        raise ConfigError("exact mode sums over stored keys and values; it serves MLA models expanded only")
    model = _from_pretrained(directory, dtype, place, device)
    gather = None if place.stage.count == 1 else gathered
    layout = use_paged_attention(model, dtype if kv_dtype == "auto" else kv_dtype, block_size, mla, gather)
    layout = whole_layout(layout, place.heads.count)
    if layout.has_latents:
        _log_saving(model, layout)
    eos_token_ids = _eos_token_ids(directory, model)
    if exactness == "exact":
        make_exact(model)
    else:
        choose_attention(model, attention)
        if place.heads.count > 1:
            pack_parts(model)
        elif device.is_host and attention != "torch":
            fuse_layers(model)
        if device.is_host:
            pack_linears(model)
    return LoadedModel(
        model=model,
        layout=layout,
        fingerprint=fingerprint_of(directory, dtype, layout, eos_token_ids, exactness),
        eos_token_ids=eos_token_ids,
        vocab_size=model.config.get_text_config().vocab_size,
        max_model_tokens=max_tokens_of(model),
        place=place,
        device=device,
    )


def _require_exact_can_be(attention: str, device: Device) -> None:
    if attention in {"native", "triton"}:
        raise ConfigError(f"--attention {attention} is for fast mode; exact mode has an attention of its own")
    if not device.is_host:
        raise ConfigError(
            f"exact mode trusts sums that it has checked on CPUs, and this worker computes on {device.place}; use --device cpu, or fast mode"
        )


def use_paged_attention(
    model: PreTrainedModel,
    kv_dtype: str,
    block_size: int,
    mla: str = "expanded",
    gather: Gather | None = None,
) -> KVLayout:
    """Makes the model run our attention; gives the layout of its KV, or raises UnsupportedModelError. See `probe_layers`."""
    layout = KVLayout(probe_layers(model, max_tokens_of(model), mla, gather), block_size, kv_dtype)
    model.set_attn_implementation(ATTENTION_NAME)
    return layout


def max_tokens_of(model: PreTrainedModel) -> int:
    """The longest context in which a token's position means one thing.

    Past its original length a LongRoPE model turns to other frequencies, for the whole batch and for tokens whose keys
    are long stored: it is served up to there.
    """
    config = model.config.get_text_config()
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    long = [part for part in parts if part.get("rope_type") == "longrope"]
    limits: list[int] = [part["original_max_position_embeddings"] for part in long]
    longest: int = getattr(config, "max_position_embeddings", _NO_LIMIT)
    return min([longest, *limits])


def fingerprint_of(
    directory: Path, dtype: str, layout: KVLayout, eos_token_ids: frozenset[int], exactness: str
) -> ModelFingerprint:
    """Digests of the directory's files by content."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    # Both tiers decide where an output ends, so they must agree on it.
    config["eos_token_ids"] = sorted(eos_token_ids)
    return ModelFingerprint(
        weights=_digest_files(sorted(directory.glob("*.safetensors"))),
        tokenizer=_digest_files(directory / name for name in _TOKENIZER_FILES),
        chat_template=_digest_files(directory / name for name in _TEMPLATE_FILES),
        config=xxhash.xxh3_128_hexdigest(json.dumps(config, sort_keys=True).encode()),
        dtype=dtype,
        kv_dtype=layout.dtype,
        kv_layout=layout.digest(),
        kv_part=str(layout.part),
        block_size=layout.block_size,
        quantization="none",
        arithmetic=exactness,
    )


def _from_pretrained(directory: Path, dtype: str, place: Place, device: Device) -> PreTrainedModel:
    # Of a device the weights go straight there; to a host transformers maps the file, where it is told nothing.
    parts: dict[str, Any] = {} if device.is_host else {"device_map": {"": device.place}}
    if place.count > 1:
        # Parts are cut by the plan that transformers has for the architecture.
        parts["distributed_config"] = DistributedConfig(tp_size=place.heads.count, pp_size=place.stage.count)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=TORCH_DTYPES[dtype],
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            **parts,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"cannot load the model in {directory}: {str(error).partition(chr(10))[0]}"
        ) from error
    if place.stage.count > 1:
        model.forward = StagedForward(model, place.stage, model.dtype)
    return cast("PreTrainedModel", model.eval())  # type: ignore[no-untyped-call] # it has no annotations


def _eos_token_ids(directory: Path, model: PreTrainedModel) -> frozenset[int]:
    try:
        eos = GenerationConfig.from_pretrained(directory, local_files_only=True).eos_token_id
    except OSError:
        eos = model.config.get_text_config().eos_token_id
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def _log_saving(model: PreTrainedModel, layout: KVLayout) -> None:
    expanded = use_paged_attention(model, layout.dtype, layout.block_size)
    log.info("latent_cache", block_bytes=layout.block_bytes, expanded_block_bytes=expanded.block_bytes)


def _digest_files(paths: Iterable[Path]) -> str:
    """One digest over names and contents; files that do not exist count as empty."""
    digest = xxhash.xxh3_128()
    for path in paths:
        content = path.read_bytes() if path.exists() else b""
        digest.update(f"{path.name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()
