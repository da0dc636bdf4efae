"""Builds what computes: a model runner, or the fake one, and what the model says about itself."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.kv_layout import KVLayout
from paceline.engine.engine import Runner
from paceline.engine.fake import FakeModelRunner, fake_layout
from paceline.runtime.log import get_logger
from paceline.worker.config import WorkerConfig

log = get_logger()

_MIN_BLOCKS = 4  # the checks at start take two sequences of two blocks


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """A runner and the facts that scheduling and routing need."""

    runner: Runner
    fingerprint: ModelFingerprint
    layout: KVLayout
    num_blocks: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_tokens: int


def load_runner(config: WorkerConfig) -> LoadedRunner:
    """The runner that `config` asks for; takes seconds. Raises ConfigError or UnsupportedModelError."""
    loaded = _load_fake(config) if config.runner == "fake" else _load_torch(config)
    log.info(
        "model_loaded",
        num_blocks=loaded.num_blocks,
        block_bytes=loaded.layout.block_bytes,
        max_model_tokens=loaded.max_model_tokens,
    )
    return loaded


def _load_torch(config: WorkerConfig) -> LoadedRunner:
    # Imported here: a fake worker starts without torch, in a tenth of the time.
    import torch  # noqa: PLC0415

    from paceline.engine.exact.model import require_exact  # noqa: PLC0415
    from paceline.engine.model_loader import load_model  # noqa: PLC0415
    from paceline.engine.model_runner import ModelRunner, require_same_as_transformers  # noqa: PLC0415

    # Set before anything is computed, and checked: two workers that share cores stall each other.
    torch.set_num_threads(config.threads or torch.get_num_threads())
    loaded = load_model(
        Path(config.model), config.dtype, config.block_size, config.exactness, config.kv_dtype
    )
    # With a cache that rounds nothing: it is the model that is checked.
    plain = replace(loaded.layout, dtype=config.dtype)
    require_same_as_transformers(ModelRunner(loaded.model, plain, _MIN_BLOCKS), loaded.model, plain)
    num_blocks = _num_blocks(config, loaded.layout)
    runner = ModelRunner(loaded.model, loaded.layout, num_blocks)
    fingerprint = loaded.fingerprint
    if config.exactness == "exact":
        fingerprint = replace(fingerprint, arithmetic=require_exact(runner, loaded.vocab_size, loaded.layout))
    log.info("threads", num_threads=torch.get_num_threads(), num_cores=os.cpu_count())
    return LoadedRunner(
        runner=runner,
        fingerprint=fingerprint,
        layout=loaded.layout,
        num_blocks=num_blocks,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        max_model_tokens=min(loaded.max_model_tokens, num_blocks * config.block_size),
    )


def _load_fake(config: WorkerConfig) -> LoadedRunner:
    facts = _read_json(Path(config.model) / "config.json")
    layout = fake_layout(config.block_size)
    num_blocks = config.num_blocks or 4096
    vocab_size, eos = int(facts["vocab_size"]), facts.get("eos_token_id")
    runner = FakeModelRunner(num_blocks, config.block_size, vocab_size, step_s=config.fake_step_ms / 1e3)
    same = ModelFingerprint(
        weights="fake",
        tokenizer="fake",
        chat_template="fake",
        config="fake",
        dtype=layout.dtype,
        block_size=config.block_size,
        kv_layout=layout.digest(),
        arithmetic=config.exactness,
    )
    return LoadedRunner(
        runner=runner,
        fingerprint=same,
        layout=layout,
        num_blocks=num_blocks,
        vocab_size=vocab_size,
        eos_token_ids=frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos),
        max_model_tokens=min(int(facts["max_position_embeddings"]), num_blocks * config.block_size),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: is it a model's directory?") from error
    return facts


def _num_blocks(config: WorkerConfig, layout: KVLayout) -> int:
    num_blocks = config.num_blocks or (config.kv_cache_mib << 20) // layout.block_bytes
    if num_blocks < _MIN_BLOCKS:
        raise ConfigError(
            f"--kv-cache-mib {config.kv_cache_mib} holds {num_blocks} blocks; {_MIN_BLOCKS} at least are needed"
        )
    return num_blocks
