"""Decides how many KV blocks a worker has and how long a request may be. Plain numbers in, plain numbers out."""

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import KVLayout, min_blocks
from paceline.runtime.memory import MemorySize, shown_bytes
from paceline.worker.config import WorkerConfig

# What the number of concurrent requests is told for: a prompt of some pages and its answer.
REQUEST_TOKENS = 2048
# Tokens of a sequence to the blocks that it holds at most.
BlocksFor = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a worker can hold; computed once, at start."""

    num_blocks: int
    # Longest prompt and output together; `own_max_model_tokens` is what the model itself could take.
    max_model_tokens: int
    own_max_model_tokens: int
    # Tokens that the blocks hold, in sequences of the longest kind.
    num_tokens: int
    # Requests of REQUEST_TOKENS, or of max_model_tokens where that is less, that they hold at once.
    num_requests: int


def plan_capacity(
    config: WorkerConfig,
    layout: KVLayout,
    own_max_model_tokens: int,
    free_bytes: int,
    gpu_bytes: int | None = None,
) -> Capacity:
    """As `config` says, for a model that takes `own_max_model_tokens`; raises ConfigError for what cannot be.

    On a GPU `gpu_bytes` are for KV, whatever the host has.
    """
    if config.max_model_len > own_max_model_tokens:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the {own_max_model_tokens} tokens that the model "
            "can take; lower it, or leave it out"
        )
    wanted = config.max_model_len or own_max_model_tokens
    blocks_for = partial(layout.num_blocks_for, max_step_tokens=config.max_num_batched_tokens)
    num_blocks, setting = config.num_blocks, f"--num-blocks {config.num_blocks}"
    if not num_blocks and gpu_bytes is None:
        num_blocks = _num_blocks(config, layout, blocks_for(wanted), free_bytes)
        setting = f"--kv-memory (this worker's part: {_shown(config.kv_memory)})"
    elif not num_blocks and gpu_bytes is not None:
        num_blocks = _blocks_of(gpu_bytes, config, layout, blocks_for(wanted))
        setting = f"--gpu-memory-share (for KV: {shown_bytes(gpu_bytes)})"
    if num_blocks < min_blocks(layout):
        raise _too_little(setting, layout, num_blocks, f"the check at start needs {min_blocks(layout)}")
    max_tokens = longest_in(blocks_for, num_blocks, wanted)
    if config.max_model_len > max_tokens:
        needed = blocks_for(wanted)
        raise _too_little(
            setting,
            layout,
            num_blocks,
            f"one request of --max-model-len {wanted} needs {needed} ({shown_bytes(needed * layout.block_bytes)}); "
            f"raise the memory, or lower --max-model-len to {max_tokens}",
        )
    return Capacity(
        num_blocks=num_blocks,
        max_model_tokens=max_tokens,
        own_max_model_tokens=own_max_model_tokens,
        num_tokens=_tokens_in(blocks_for, num_blocks, max_tokens),
        num_requests=min(config.max_num_seqs, num_blocks // blocks_for(min(REQUEST_TOKENS, max_tokens))),
    )


def longest_in(blocks_for: BlocksFor, num_blocks: int, max_tokens: int) -> int:
    """The longest sequence, of at most `max_tokens`, that so many blocks hold."""
    return bisect.bisect_right(range(1, max_tokens + 1), num_blocks, key=blocks_for)


def _num_blocks(config: WorkerConfig, layout: KVLayout, blocks_a_sequence: int, free_bytes: int) -> int:
    """What the memory holds, if it is free."""
    given = MemorySize.parse(config.kv_memory, "--kv-memory").of(free_bytes)
    num_blocks = _blocks_of(given, config, layout, blocks_a_sequence)
    # Pages are touched as the cache fills: without this, a worker would run well and be killed in the middle of it.
    if num_blocks * layout.block_bytes > free_bytes:
        raise ConfigError(
            f"--kv-memory {config.kv_memory}: {shown_bytes(num_blocks * layout.block_bytes)} of KV cache are more than "
            f"the {shown_bytes(free_bytes)} of memory that are free; lower it"
        )
    return num_blocks


def _blocks_of(num_bytes: int, config: WorkerConfig, layout: KVLayout, blocks_a_sequence: int) -> int:
    """What so many bytes hold, but no more than the most and longest sequences could ever use."""
    of_use = config.max_num_seqs * blocks_a_sequence
    return min(num_bytes // layout.block_bytes, max(of_use, min_blocks(layout)))


def _tokens_in(blocks_for: BlocksFor, num_blocks: int, max_tokens: int) -> int:
    num_full, num_left = divmod(num_blocks, blocks_for(max_tokens))
    return num_full * max_tokens + longest_in(blocks_for, num_left, max_tokens)


def _shown(amount: str) -> str:
    given = MemorySize.parse(amount, "--kv-memory")
    return amount if given.share else shown_bytes(given.num_bytes)


def _too_little(setting: str, layout: KVLayout, num_blocks: int, problem: str) -> ConfigError:
    size = shown_bytes(layout.block_bytes)
    return ConfigError(f"{setting} gives {num_blocks} KV blocks of {size}: {problem}")
