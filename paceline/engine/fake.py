"""A runner without a model, for tests, the simulator and demos: fast, exact, and honest about its KV.

A token's "KV" is its id and position, in the block where real KV would be. The next token is a digest of what is
read back from those blocks; so a block that is lost, stale, misplaced or another's changes the tokens.
"""

import hashlib
import struct
import time
from collections.abc import Collection

import xxhash

from paceline.core.kv_layout import BlockId, KVLayout, LayerKV
from paceline.core.request import SamplingParams, TokenLogprob
from paceline.engine.step import SampleTask, ScheduledSequence, SchedulerOutput, ScoreTask, StepOutput

_SLOT = struct.Struct("<II")  # token id, position


def fake_layout(block_size: int) -> KVLayout:
    """A layout whose token takes as many bytes as a fake token's KV."""
    return KVLayout((LayerKV(num_kv_heads=1, key_dim=1, value_dim=1),), block_size, "float32")


class FakeMemory:
    """Blocks of `block_size` slots of 8 bytes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * _SLOT.size
        self._bytes = memoryview(bytearray(num_blocks * self.block_bytes))

    def read(self, block_id: BlockId) -> memoryview:
        """See BlockMemory.read."""
        start = block_id * self.block_bytes
        return self._bytes[start : start + self.block_bytes].toreadonly()

    def write(self, block_id: BlockId, offset: int, data: bytes) -> None:
        """See BlockMemory.write."""
        assert offset + len(data) <= self.block_bytes, "a write must stay inside its block"
        start = block_id * self.block_bytes + offset
        self._bytes[start : start + len(data)] = data

    def checksum(self, block_id: BlockId) -> int:
        """See BlockMemory.checksum."""
        return xxhash.xxh3_64_intdigest(self.read(block_id))


class FakeModelRunner:
    """Gives the tokens of `fake_next_token`; a step takes `step_s` seconds."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int, *, step_s: float = 0.0) -> None:
        self.memory = FakeMemory(num_blocks, block_size)
        self._vocab_size = vocab_size
        self._step_s = step_s

    def execute(self, output: SchedulerOutput) -> StepOutput:
        """See Runner.execute."""
        if self._step_s:
            time.sleep(self._step_s)
        for item in output.scheduled:
            self._write(item)
        sampled = [(item, item.sample) for item in output.scheduled if item.sample is not None]
        token_ids = tuple(self._sample(item, task) for item, task in sampled)
        # It knows no doubt of its own: whatever it says has probability 1.
        logprobs = tuple(
            _certain(token_id, task) for token_id, (_, task) in zip(token_ids, sampled, strict=True)
        )
        scores = tuple(self._scores(item, item.score) for item in output.scheduled if item.score is not None)
        return StepOutput(token_ids, logprobs, scores)

    def _write(self, item: ScheduledSequence) -> None:
        size = self.memory.block_size
        for position, token_id in enumerate(item.token_ids, item.start):
            block_id = item.block_table[position // size]
            self.memory.write(block_id, position % size * _SLOT.size, _SLOT.pack(token_id, position))

    def _sample(self, item: ScheduledSequence, task: SampleTask) -> int:
        return _digest_token(self._context(item), task.params, self._vocab_size, task.banned_ids)

    def _scores(self, item: ScheduledSequence, task: ScoreTask) -> tuple[TokenLogprob, ...]:
        first = item.start + task.first_row + 1
        return _digest_scores(self._context(item), first, task, self._vocab_size)

    def _context(self, item: ScheduledSequence) -> bytes:
        blocks = b"".join(self.memory.read(block_id) for block_id in item.block_table)
        return blocks[: item.end * _SLOT.size]


def fake_next_token(
    token_ids: tuple[int, ...], params: SamplingParams, vocab_size: int, banned_ids: Collection[int] = ()
) -> int:
    """The oracle: what the fake model says after `token_ids`."""
    return _digest_token(_slots(token_ids), params, vocab_size, banned_ids)


def fake_prompt_logprobs(
    prompt_ids: tuple[int, ...], num_top: int, vocab_size: int
) -> tuple[TokenLogprob, ...]:
    """The oracle: what the fake model thinks of a prompt's tokens, from the second one on. It doubts these."""
    return _digest_scores(_slots(prompt_ids), 1, ScoreTask(0, prompt_ids[1:], num_top), vocab_size)


def _slots(token_ids: tuple[int, ...]) -> bytes:
    return b"".join(_SLOT.pack(token_id, position) for position, token_id in enumerate(token_ids))


def _digest_token(
    context: bytes, params: SamplingParams, vocab_size: int, banned_ids: Collection[int]
) -> int:
    digest = hashlib.blake2b(context + _params_bytes(params), digest_size=8).digest()
    token_id = int.from_bytes(digest, "little") % vocab_size
    while token_id in banned_ids:
        token_id = (token_id + 1) % vocab_size
    return token_id


def _digest_scores(context: bytes, first: int, task: ScoreTask, vocab_size: int) -> tuple[TokenLogprob, ...]:
    """Each a digest of the target and of all that stands before it; `first` is the place of the first target."""
    before, scores = hashlib.blake2b(context[: (first - 1) * _SLOT.size], digest_size=2), []
    for place, token_id in enumerate(task.target_ids, first):
        before.update(context[(place - 1) * _SLOT.size : place * _SLOT.size])
        digest = before.copy()
        digest.update(_SLOT.pack(token_id, place))
        number = int.from_bytes(digest.digest(), "little")
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
