"""Builds what computes: a model runner, or the fake one, and what the model says about itself."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.kv_layout import KVLayout
from paceline.engine.engine import Runner
from paceline.engine.fake import FakeModelRunner, fake_layout
from paceline.runtime.cores import Cores
from paceline.runtime.log import get_logger
from paceline.runtime.memory import free_memory_bytes, give_back_freed_memory
from paceline.runtime.processor import resolve_dtype
from paceline.worker.capacity import Capacity, plan_capacity
from paceline.worker.config import WorkerConfig
from paceline.worker.lent_cores import LentCoresRunner

if TYPE_CHECKING:
    from paceline.engine.device import Device
    from paceline.engine.model_loader import LoadedModel
    from paceline.engine.model_runner import ModelRunner
    from paceline.engine.parallel.leader import Followers, ParallelRunner

log = get_logger()


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """A runner and the facts that scheduling and routing need."""

    runner: Runner
    fingerprint: ModelFingerprint
    layout: KVLayout
    capacity: Capacity
    vocab_size: int
    eos_token_ids: frozenset[int]


def load_runner(config: WorkerConfig, followers: "Followers | None" = None) -> LoadedRunner:
    """The runner that `config` asks for; takes seconds. Raises ConfigError or UnsupportedModelError.

    The `followers` compute with it, where the worker has several processes.
    """
    loaded = _load_fake(config) if config.runner == "fake" else _load_torch(config, followers)
    _log_capacity(loaded.capacity, loaded.layout)
    return loaded


def _log_capacity(capacity: Capacity, layout: KVLayout) -> None:
    log.info(
        "model_loaded",
        num_blocks=capacity.num_blocks,
        block_bytes=layout.block_bytes,
        kv_bytes=capacity.num_blocks * layout.block_bytes,
        num_kv_tokens=capacity.num_tokens,
        num_2k_requests=capacity.num_requests,
        max_model_tokens=capacity.max_model_tokens,
    )


def _load_torch(config: WorkerConfig, followers: "Followers | None") -> LoadedRunner:
    # Imported here: a fake worker starts without torch, in a tenth of the time.
    import torch  # noqa: PLC0415
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    from paceline.engine.device import Turn, find_device  # noqa: PLC0415
    from paceline.engine.exact.model import require_exact  # noqa: PLC0415
    from paceline.engine.model_runner import ModelRunner  # noqa: PLC0415
    from paceline.engine.parallel.group import set_threads_of_each  # noqa: PLC0415

    # The log is for lines, and a bar is none.
    disable_progress_bar()  # type: ignore[no-untyped-call] # it has no annotations
    # Set before anything is computed, and checked: two workers that share cores stall each other.
    set_threads = partial(set_threads_of_each, num_ranks=config.tp * config.pp)
    set_threads(config.threads)
    # Exact mode computes on CPUs alone, so what it may choose from is them.
    wanted = "cpu" if (config.device, config.exactness) == ("auto", "exact") else config.device
    device = find_device(wanted, Turn.parse(config.gpu_turn))
    dtype = device.default_dtype(config.dtype, resolve_dtype)
    with device.entered():
        loaded = _load_checked(config, dtype, followers, device)
        # Before anybody asks how much is free.
        give_back_freed_memory()
        gpu_bytes = _gpu_bytes(config, loaded) if device.is_gpu else None
        capacity = _capacity(config, loaded.layout, loaded.max_model_tokens, gpu_bytes)
        runner = _runner(config, loaded, capacity, followers)
    if config.group_by_experts and not runner.has_experts:
        raise ConfigError("--group-by-experts: this model has no experts; leave it out")
    fingerprint = loaded.fingerprint
    if config.exactness == "exact":
        assert isinstance(runner, ModelRunner), "exact mode is for one process"
        fingerprint = replace(fingerprint, arithmetic=require_exact(runner, loaded.vocab_size, loaded.layout))
    log.info(
        "threads",
        num_threads=torch.get_num_threads(),
        num_cores=os.cpu_count(),
        dtype=dtype,
        device=str(device.place),
    )
    return LoadedRunner(
        runner=runner if device.is_gpu else _on_lent_cores(config, runner, set_threads),
        fingerprint=fingerprint,
        layout=loaded.layout,
        capacity=capacity,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
    )


def _on_lent_cores(config: WorkerConfig, runner: Runner, set_threads: Callable[[int], None]) -> Runner:
    if not config.cores_file:
        return runner
    own = range(config.first_core, config.first_core + config.threads)
    return LentCoresRunner(runner, Cores(Path(config.cores_file), own), set_threads)


def _gpu_bytes(config: WorkerConfig, loaded: "LoadedModel") -> int:
    """What the GPU has left for KV."""
    import torch  # noqa: PLC0415

    from paceline.engine.device import Turn  # noqa: PLC0415
    from paceline.engine.gpu_start import measure  # noqa: PLC0415

    num_sharing = Turn.parse(config.gpu_turn).num_sharing(config.device, torch.cuda.device_count())
    memory = measure(loaded, config.max_num_batched_tokens, config.max_num_seqs)
    return memory.for_kv(config.gpu_memory_share, num_sharing)


def _load_checked(
    config: WorkerConfig, dtype: str, followers: "Followers | None", device: "Device"
) -> "LoadedModel":
    """The model, or rank 0's part of it, if it computes here what it computes by itself: with all the bits of its weights, as with the KV's."""
    from paceline.engine.checked import load_checked  # noqa: PLC0415
    from paceline.engine.parallel.leader import joined_by  # noqa: PLC0415
    from paceline.engine.parallel.place import WHOLE  # noqa: PLC0415
    from paceline.engine.quantization import quantised  # noqa: PLC0415

    model, attention, place = Path(config.model), config.attention, WHOLE
    if followers is not None:
        place = joined_by(followers, model, dtype, config.block_size, attention)
    loaded = load_checked(
        model,
        dtype,
        config.block_size,
        config.exactness,
        config.kv_dtype,
        config.mla,
        attention,
        place=place,
        device=device,
    )
    if followers is not None:
        followers.wait_done()
    return quantised(loaded, config.quantization)


def _runner(
    config: WorkerConfig, loaded: "LoadedModel", capacity: Capacity, followers: "Followers | None"
) -> "ModelRunner | ParallelRunner":
    from paceline.engine.gpu_start import capture_decodes  # noqa: PLC0415
    from paceline.engine.model_runner import ModelRunner  # noqa: PLC0415
    from paceline.engine.parallel.leader import ParallelRunner, share_pool  # noqa: PLC0415
    from paceline.engine.parallel.stages import StagedForward  # noqa: PLC0415

    tells_experts = config.group_by_experts
    num_blocks, on_gpu = capacity.num_blocks, loaded.device.is_gpu
    if followers is None:
        runner = ModelRunner(
            loaded.model, loaded.layout, num_blocks, tells_experts=tells_experts, has_scratch=on_gpu
        )
        if on_gpu:
            max_rows = min(config.max_batch_to_capture, config.max_num_seqs)
            capture_decodes(loaded, runner, max_rows, capacity.max_model_tokens)
        return runner
    pool = share_pool(loaded.layout, num_blocks, followers)
    runner = ModelRunner(
        loaded.model,
        loaded.layout,
        num_blocks,
        tells_experts=tells_experts,
        heads=loaded.place.heads,
        pool=pool,
    )
    forward = loaded.model.forward
    return ParallelRunner(runner, followers, forward if isinstance(forward, StagedForward) else None)


def _load_fake(config: WorkerConfig) -> LoadedRunner:
    if config.group_by_experts:
        raise ConfigError("--group-by-experts: the fake runner has no experts; leave it out")
    facts = _read_json(Path(config.model) / "config.json")
    layout = fake_layout(config.block_size)
    capacity = _capacity(config, layout, int(facts["max_position_embeddings"]))
    vocab_size, eos = int(facts["vocab_size"]), facts.get("eos_token_id")
    runner = FakeModelRunner(
        capacity.num_blocks, config.block_size, vocab_size, step_s=config.fake_step_ms / 1e3
    )
    same = ModelFingerprint(
        weights="fake",
        tokenizer="fake",
        chat_template="fake",
        config="fake",
        dtype=layout.dtype,
        kv_dtype=layout.dtype,
        kv_layout=layout.digest(),
        kv_part=str(layout.part),
        block_size=config.block_size,
        quantization=config.quantization,
        arithmetic=config.exactness,
    )
    return LoadedRunner(
        runner=runner,
        fingerprint=same,
        layout=layout,
        capacity=capacity,
        vocab_size=vocab_size,
        eos_token_ids=frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: is it a model's directory?") from error
    return facts


def _capacity(
    config: WorkerConfig, layout: KVLayout, own_max_model_tokens: int, gpu_bytes: int | None = None
) -> Capacity:
    """Asked once the weights are there: what is free then is left for the KV."""
    capacity = plan_capacity(config, layout, own_max_model_tokens, free_memory_bytes(), gpu_bytes)
    if not config.max_model_len and capacity.max_model_tokens < own_max_model_tokens:
        log.warning(
            "context_lowered",
            own_max_model_tokens=own_max_model_tokens,
            max_model_tokens=capacity.max_model_tokens,
            num_blocks=capacity.num_blocks,
            num_blocks_needed=layout.num_blocks_for(own_max_model_tokens, config.max_num_batched_tokens),
        )
    return capacity
