"""What a worker's settings mean to its scheduler."""

from paceline.core.errors import ConfigError
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.runtime.memory import MemorySize, free_memory_bytes, shown_bytes
from paceline.worker.config import WorkerConfig
from paceline.worker.runner import LoadedRunner


def scheduler_config(config: WorkerConfig, loaded: LoadedRunner) -> SchedulerConfig:
    """Settings, and what the model says about its tokens; raises ConfigError for swap memory that is not there."""
    return SchedulerConfig(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        eos_token_ids=loaded.eos_token_ids,
        fingerprint=loaded.fingerprint.digest(),
        policy=config.policy,
        victim=config.victim,
        batching=config.batching,
        watermark=config.watermark,
        fast_lane_share=config.fast_lane_share,
        fast_lane_prompt_tokens=config.fast_lane_prompt_tokens,
        fast_lane_output_tokens=config.fast_lane_output_tokens,
        aging_s=config.aging_s,
        max_overtakes=config.max_overtakes,
        overload_wait_s=config.overload_wait_s,
        max_decodes=config.max_decodes,
        group_by_experts=config.group_by_experts,
        prefix_pull=config.prefix_pull,
        num_swap_blocks=_num_swap_blocks(config.swap_memory, loaded.layout.block_bytes),
    )


def _num_swap_blocks(swap_memory: str, block_bytes: int) -> int:
    if not swap_memory:
        return 0
    free_bytes = free_memory_bytes()
    num_bytes = MemorySize.parse(swap_memory, "--swap-memory").of(free_bytes)
    if num_bytes > free_bytes:
        raise ConfigError(
            f"--swap-memory {swap_memory} is more than the {shown_bytes(free_bytes)} of memory that are free; lower it"
        )
    if num_bytes < block_bytes:
        raise ConfigError(
            f"--swap-memory {swap_memory} holds no KV block of {shown_bytes(block_bytes)}; raise it, or leave it out"
        )
    return num_bytes // block_bytes
