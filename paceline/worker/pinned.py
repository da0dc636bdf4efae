"""Prefixes that stay in a worker's cache for as long as it lives: read from a file, computed at start, never released."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.core.block_hash import chain_root, hash_full_blocks
from paceline.core.errors import ConfigError
from paceline.core.kv_layout import KVLayout
from paceline.core.request import RequestId, SamplingParams, SequenceId, SequenceSpec
from paceline.engine.events import Failed, NewTokens
from paceline.engine.sequence import SequenceRole
from paceline.runtime.log import get_logger
from paceline.worker.capacity import Capacity, longest_in
from paceline.worker.events import EventQueue
from paceline.worker.worker import Worker

Prefix = tuple[int, ...]
_SETTING = "--pinned-prefixes"

log = get_logger()


@dataclass(frozen=True, slots=True)
class PinnedPlan:
    """What to compute, in whole blocks, and how many blocks it holds from then on. What another one begins with is shared."""

    prefixes: tuple[Prefix, ...] = ()
    num_blocks: int = 0


def read_pinned(file: str) -> tuple[Prefix, ...]:
    """The prefixes of a JSON Lines file, in order; none for no file. Raises ConfigError, which names the line."""
    if not file:
        return ()
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_SETTING}: cannot read {file}: {error}") from error
    prefixes = tuple(_parse(file, number, line) for number, line in enumerate(lines, 1) if line.strip())
    if not prefixes:
        raise ConfigError(f'{_SETTING}: {file} has no line; give each prefix one, {{"token_ids": [1, 2]}}')
    return prefixes


def plan_pinned(
    prefixes: Iterable[Prefix], layout: KVLayout, capacity: Capacity, vocab_size: int, max_step_tokens: int
) -> PinnedPlan:
    """Those prefixes on this model and in this pool; raises ConfigError for what cannot be, or leaves too little."""
    # In this order the beginning of another prefix is there before that one, which then shares its blocks.
    whole = sorted({_whole_blocks(prefix, layout, capacity, vocab_size) for prefix in prefixes})
    num_blocks = _num_blocks(whole, layout, max_step_tokens)
    if num_blocks > capacity.num_blocks // 2:
        raise ConfigError(
            f"{_SETTING} would hold {num_blocks} KV blocks for ever, more than half of the {capacity.num_blocks} that there "
            "are; pin less, or raise --kv-memory"
        )
    blocks_for = partial(layout.num_blocks_for, max_step_tokens=max_step_tokens)
    longest = longest_in(blocks_for, capacity.num_blocks - num_blocks, capacity.max_model_tokens)
    if longest < capacity.max_model_tokens:
        raise ConfigError(
            f"{_SETTING} would hold {num_blocks} of {capacity.num_blocks} KV blocks, and a request of "
            f"{capacity.max_model_tokens} tokens would never fit beside them; pin less, raise --kv-memory, or lower "
            f"--max-model-len to {longest}"
        )
    return PinnedPlan(tuple(whole), num_blocks)


async def pin(worker: Worker, plan: PinnedPlan) -> None:
    """Computes them, one after the other; what holds their blocks is that nobody releases these sequences."""
    for number, prefix in enumerate(plan.prefixes):
        spec = SequenceSpec(
            sequence_id=SequenceId(RequestId(f"pinned-{number}"), 0),
            prompt_ids=prefix,
            sampling=SamplingParams(temperature=0.0),
            max_tokens=1,
        )
        events = EventQueue()
        worker.num_pinned += 1
        worker.engine.submit(spec, SequenceRole.PREFILL_ONLY, events.put)
        await _until_computed(events)
    worker.num_pinned_blocks = plan.num_blocks
    if plan.prefixes:
        num_tokens = sum(map(len, plan.prefixes))
        log.info(
            "prefixes_pinned",
            num_prefixes=len(plan.prefixes),
            num_tokens=num_tokens,
            num_blocks=plan.num_blocks,
        )


async def pin_unless_stopped(worker: Worker, plan: PinnedPlan, stop: asyncio.Event) -> None:
    """Returns once all prefixes are there, or as soon as the worker is told to stop."""
    pinning, stopping = asyncio.create_task(pin(worker, plan)), asyncio.create_task(stop.wait())
    await asyncio.wait((pinning, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if pinning.done():
        pinning.result()
    pinning.cancel()


async def _until_computed(events: EventQueue) -> None:
    async for event in events:
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, NewTokens):
            return


def _parse(file: str, number: int, line: str) -> Prefix:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    token_ids = entry.get("token_ids") if isinstance(entry, dict) and len(entry) == 1 else None
    # Not isinstance: a bool is an int to Python, and a mistake to us.
    is_good = isinstance(token_ids, list) and all(type(each) is int and each >= 0 for each in token_ids)
    if not is_good or not token_ids:
        raise ConfigError(f'{_SETTING}: {file}, line {number} is not of the form {{"token_ids": [1, 2, 3]}}')
    return tuple(token_ids)


def _whole_blocks(prefix: Prefix, layout: KVLayout, capacity: Capacity, vocab_size: int) -> Prefix:
    limit = capacity.max_model_tokens - 1
    if max(prefix) >= vocab_size:
        raise ConfigError(
            f"{_SETTING}: token {max(prefix)} is outside of the vocabulary of {vocab_size}; tokenise with this model"
        )
    if len(prefix) > limit:
        raise ConfigError(
            f"{_SETTING}: a prefix of {len(prefix)} tokens is longer than the {limit} that a prompt may have; shorten it"
        )
    num_tokens = len(prefix) // layout.block_size * layout.block_size
    if num_tokens == 0:
        raise ConfigError(
            f"{_SETTING}: a prefix of {len(prefix)} tokens fills no block of {layout.block_size}, so nothing of it can be "
            "found again; leave it out"
        )
    return prefix[:num_tokens]


def _num_blocks(prefixes: list[Prefix], layout: KVLayout, max_step_tokens: int) -> int:
    """Blocks that they hold together: in a group with a window each its own, in others what they share once."""
    size = layout.block_size
    distinct = {each for prefix in prefixes for each in hash_full_blocks(chain_root(b"", ""), prefix, size)}
    return sum(
        sum(min(len(prefix) // size, group.max_live_blocks(max_step_tokens, size)) for prefix in prefixes)
        if group.is_windowed
        else len(distinct)
        for group in layout.groups
    )
