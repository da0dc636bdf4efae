"""A runner without a model, for tests, the simulator and demos: fast, exact, and honest about its KV.

A token's "KV" is its id and position, in the blocks where real KV would be: one in each KV group. The next token is a
digest of what is read back from those blocks, as far as the group sees; so a block that is lost, stale, misplaced or
another's changes the tokens.
"""

import hashlib
import struct
import time
from collections.abc import Collection, Sequence

import xxhash

from paceline.core.kv_layout import BlockId, KVGroup, KVLayout, LayerKV, View
from paceline.core.request import SamplingParams, TokenLogprob
from paceline.engine.step import (
    BlockTable,
    SampleTask,
    ScheduledSequence,
    SchedulerOutput,
    ScoreTask,
    StepOutput,
)
from paceline.runtime.pool_memory import PoolMemory

_SLOT = struct.Struct("<II")  # token id, position


_WHOLE = (KVGroup(),)


def fake_layout(block_size: int) -> KVLayout:
    """A layout in which a token's KV is one run of as many bytes as a fake token's."""
    return KVLayout((LayerKV(num_kv_heads=1, key_dim=2, value_dim=0),), block_size, "float32")


class FakeMemory:
    """Blocks of `block_size` slots of 8 bytes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * _SLOT.size
        self.pool = PoolMemory(num_blocks * self.block_bytes)
        self._bytes = self.pool.buffer

    def read(self, block_id: BlockId) -> memoryview:
        """See BlockMemory.read."""
        start = block_id * self.block_bytes
        return self._bytes[start : start + self.block_bytes].toreadonly()

    def write(self, block_id: BlockId, offset: int, data: bytes | memoryview) -> None:
        """See BlockMemory.write."""
        assert offset + len(data) <= self.block_bytes, "a write must stay inside its block"
        start = block_id * self.block_bytes + offset
        self._bytes[start : start + len(data)] = data

    def copy(self, source: BlockId, target: BlockId) -> None:
        """See BlockMemory.copy."""
        self.write(target, 0, self.read(source))

    def save(self, block_id: BlockId) -> bytes:
        """See BlockSaver.save."""
        return bytes(self.read(block_id))

    def restore(self, saved: bytes, block_id: BlockId) -> None:
        """See BlockSaver.restore."""
        self.write(block_id, 0, saved)

    def checksum(self, block_id: BlockId) -> int:
        """See BlockMemory.checksum."""
        return xxhash.xxh3_64_intdigest(self.read(block_id))


class FakeModelRunner:
    """Gives the tokens of `fake_next_token`; a step takes `step_s` seconds."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        *,
        groups: Sequence[KVGroup] = _WHOLE,
        step_s: float = 0.0,
    ) -> None:
        self._groups = groups
        self.memory = FakeMemory(num_blocks, block_size)
        self._vocab_size = vocab_size
        self._step_s = step_s

    def execute(self, output: SchedulerOutput) -> StepOutput:
        """See Runner.execute."""
        if self._step_s:
            time.sleep(self._step_s)
        for item in output.scheduled:
            self._write(item)
        sampled = [(item, task) for item in output.scheduled for task in item.samples]
        token_ids = tuple(self._sample(item, task) for item, task in sampled)
        # It knows no doubt of its own: whatever it says has probability 1.
        logprobs = tuple(
            _certain(token_id, task) for token_id, (_, task) in zip(token_ids, sampled, strict=True)
        )
        scores = tuple(self._scores(item, item.score) for item in output.scheduled if item.score is not None)
        return StepOutput(token_ids, logprobs, scores)

    def _write(self, item: ScheduledSequence) -> None:
        for table in item.block_tables:
            for position, token_id in enumerate(item.token_ids, item.start):
                block_id, slot = self._slot(table, position)
                self.memory.write(block_id, slot, _SLOT.pack(token_id, position))

    def _sample(self, item: ScheduledSequence, task: SampleTask) -> int:
        seen = self._seen(item, item.end)
        return _digest_token(seen, task.params, self._vocab_size, task.banned_ids, task.candidate)

    def _scores(self, item: ScheduledSequence, task: ScoreTask) -> tuple[TokenLogprob, ...]:
        first = item.start + task.first_row + 1
        ends = range(first, first + len(task.target_ids))
        return _digest_scores([self._seen(item, end) for end in ends], task, self._vocab_size)

    def _seen(self, item: ScheduledSequence, end: int) -> bytes:
        """What the last of the first `end` tokens sees, in each group."""
        return b"".join(
            self._read(table, group.view, end)
            for table, group in zip(item.block_tables, self._groups, strict=True)
        )

    def _read(self, table: BlockTable, view: View, end: int) -> bytes:
        first = view.first_visible(end - 1)
        return self._read_range(table, 0, view.num_kept(first)) + self._read_range(table, first, end)

    def _read_range(self, table: BlockTable, first: int, end: int) -> bytes:
        size = self.memory.block_size
        ordinals = range(first // size, -(-end // size))
        blocks = b"".join(self.memory.read(self._slot(table, ordinal * size)[0]) for ordinal in ordinals)
        return blocks[first % size * _SLOT.size :][: (end - first) * _SLOT.size]

    def _slot(self, table: BlockTable, position: int) -> tuple[BlockId, int]:
        block_id = table[position // self.memory.block_size]
        assert block_id is not None, "what is seen is held"
        return block_id, position % self.memory.block_size * _SLOT.size


def fake_next_token(
    token_ids: tuple[int, ...],
    params: SamplingParams,
    vocab_size: int,
    banned_ids: Collection[int] = (),
    groups: Sequence[KVGroup] = _WHOLE,
    candidate: int = 0,
) -> int:
    """The oracle: what the fake model says after `token_ids`."""
    return _digest_token(_seen_of(token_ids, groups), params, vocab_size, banned_ids, candidate)


def fake_prompt_logprobs(
    prompt_ids: tuple[int, ...], num_top: int, vocab_size: int, groups: Sequence[KVGroup] = _WHOLE
) -> tuple[TokenLogprob, ...]:
    """The oracle: what the fake model thinks of a prompt's tokens, from the second one on. It doubts these."""
    contexts = [_seen_of(prompt_ids[:end], groups) for end in range(1, len(prompt_ids))]
    return _digest_scores(contexts, ScoreTask(0, prompt_ids[1:], num_top), vocab_size)


def _seen_of(token_ids: tuple[int, ...], groups: Sequence[KVGroup]) -> bytes:
    slots = [_SLOT.pack(token_id, position) for position, token_id in enumerate(token_ids)]
    end = len(slots)
    return b"".join(
        slots[place] for group in groups for place in group.blocks_seen(end - 1, end, block_size=1)
    )


def _digest_token(
    context: bytes, params: SamplingParams, vocab_size: int, banned_ids: Collection[int], candidate: int
) -> int:
    # Candidates differ by chance alone.
    chance = struct.pack("<I", candidate) if candidate and params.temperature > 0 else b""
    digest = hashlib.blake2b(context + _params_bytes(params) + chance, digest_size=8).digest()
    token_id = int.from_bytes(digest, "little") % vocab_size
    while token_id in banned_ids:
        token_id = (token_id + 1) % vocab_size
    return token_id


def _digest_scores(contexts: list[bytes], task: ScoreTask, vocab_size: int) -> tuple[TokenLogprob, ...]:
    """For each target a digest of itself and of what its predecessor sees."""
    scores = []
    for context, token_id in zip(contexts, task.target_ids, strict=True):
        digest = hashlib.blake2b(context + struct.pack("<I", token_id), digest_size=2).digest()
        number = int.from_bytes(digest, "little")
        top = tuple(((number + rank) % vocab_size, -float(rank)) for rank in range(task.num_top_logprobs))
        # Between -16 and 0, in steps that float32 holds exactly.
        scores.append(TokenLogprob(token_id, -number / 4096, top))
    return tuple(scores)


def _params_bytes(params: SamplingParams) -> bytes:
    """Every parameter counts, so that one which gets lost on the way changes the tokens; greedy has no seed."""
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    numbers = (params.temperature, params.top_p, params.min_p, *penalties)
    seed = params.seed if params.temperature > 0 else 0
    bias = b"".join(struct.pack("<Id", *entry) for entry in params.logit_bias)
    return struct.pack("<6dIQ", *numbers, params.top_k, seed) + bias


def _certain(token_id: int, task: SampleTask) -> TokenLogprob | None:
    if task.num_top_logprobs is None:
        return None
    return TokenLogprob(token_id, 0.0, ((token_id, 0.0),) if task.num_top_logprobs else ())
