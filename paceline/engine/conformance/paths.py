"""The ways in which a token can come to be computed, each as one small run of the real scheduler and runner."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from transformers import PreTrainedModel

from paceline.core.kv_layout import BlockId, KVLayout
from paceline.core.request import FirstToken
from paceline.engine.attention import ATTENTION_NAME
from paceline.engine.conformance.bench import Bench, ComparingRunner
from paceline.engine.conformance.reference import Reference, plain_reference, random_prompt
from paceline.engine.events import BlocksReady, Event, NewTokens, Reserved, Started
from paceline.engine.sequence import SequenceRole

TOLERANCE = 1e-4  # largest difference of any logit in fp32
MIN_PROMPT_TOKENS = 70  # more than the largest chunk
NUM_OUTPUT_TOKENS = 6
_MAX_BOUNDARIES = 10  # where prefixes end that are to be hit; each takes two passes over the prompt
E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class PathResult:
    """How far a path's logits lie from plain transformers, and how many greedy tokens differ; or why it crashed."""

    path: str
    max_difference: float
    num_logits: int
    num_tokens: int
    num_wrong_tokens: int
    duration_s: float
    tolerance: float = TOLERANCE
    crash: str = ""

    @property
    def passed(self) -> bool:
        """Whether the path computes what transformers computes."""
        return not self.crash and self.max_difference <= self.tolerance and self.num_wrong_tokens == 0


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that runs our attention, and what plain transformers says about three prompts."""

    model: PreTrainedModel
    layout: KVLayout
    long: Reference
    # One token less than two blocks each: their third output token needs a new block.
    short: tuple[Reference, Reference]
    # Largest difference of a logit that passes.
    tolerance: float = TOLERANCE

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.layout.block_size


def make_subject(
    model: PreTrainedModel,
    layout: KVLayout,
    *,
    num_prompt_tokens: int = MIN_PROMPT_TOKENS,
    attention: str = ATTENTION_NAME,
) -> Subject:
    """Computes the references. `attention` is the name under which the attention to be tried is registered."""
    model.set_attn_implementation(attention)
    vocab_size = model.config.get_text_config().vocab_size
    lengths = (num_prompt_tokens, 2 * layout.block_size - 1, 2 * layout.block_size - 1)
    long, *short = (
        plain_reference(model, random_prompt(vocab_size, length, seed), NUM_OUTPUT_TOKENS)
        for seed, length in enumerate(lengths)
    )
    return Subject(model, layout, long, (short[0], short[1]))


def run_path(subject: Subject, path: str) -> PathResult:
    """Runs one of PATHS. One that crashes has failed; the others say what they have to say all the same."""
    start_s = time.perf_counter()
    try:
        runner = PATHS[path](subject)
    except Exception as error:  # noqa: BLE001 - whatever it is, the path does not compute what it should
        took_s = time.perf_counter() - start_s
        return PathResult(path, 0.0, 0, 0, 0, took_s, subject.tolerance, crash=_first_line(error))
    return PathResult(
        path=path,
        max_difference=runner.max_difference,
        num_logits=runner.num_logits,
        num_tokens=runner.num_tokens,
        num_wrong_tokens=runner.num_wrong_tokens,
        duration_s=time.perf_counter() - start_s,
        tolerance=subject.tolerance,
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _in_chunks(subject: Subject, max_num_batched_tokens: int | None = None) -> ComparingRunner:
    """The prompt in steps of that many tokens, or in one; then decoding."""
    bench = _bench(subject, max_num_batched_tokens or len(subject.long.prompt_ids))
    bench.add("long", subject.long)
    bench.run()
    return bench.runner


def _mixed(subject: Subject) -> ComparingRunner:
    """While one sequence decodes, two prompts come in chunks: all in one forward pass."""
    bench = _bench(subject, 2 * subject.block_size)
    bench.add("decoding", subject.short[0])
    bench.steps(2)
    bench.add("long", subject.long)
    bench.add("short", subject.short[1])
    bench.run()
    sizes = [sorted(len(item.token_ids) for item in step) for step in bench.runner.steps]
    assert any(len(step) > 1 and step[0] == 1 and step[-1] > 1 for step in sizes), "no batch was mixed"
    return bench.runner


def _prefix_hits(subject: Subject) -> ComparingRunner:
    """At block boundaries: the beginning of the prompt is cached, and the rest computed; at least its last token.

    At every one where there are few, as in the tiny models' prompts; else at some from the first to the last.
    """
    runner, num_tokens = _runner(subject), len(subject.long.prompt_ids)
    most_hits = (num_tokens - 1) // subject.block_size
    for num_blocks in _boundaries(num_tokens // subject.block_size):
        bench = _bench(subject, num_tokens, runner)
        bench.add("first", subject.long, num_prompt_tokens=num_blocks * subject.block_size)
        bench.run()
        bench.add("again", subject.long)
        started = _only(bench.run(), Started)
        expected = min(num_blocks, most_hits) * subject.block_size
        assert started.num_cached_tokens == expected, "the prefix was not found"
    return runner


def _boundaries(num_blocks: int) -> list[int]:
    """At most _MAX_BOUNDARIES numbers from 1 to `num_blocks`, evenly spread; the first and the last are among them."""
    count = min(num_blocks, _MAX_BOUNDARIES)
    return [1 + round(i * (num_blocks - 1) / max(1, count - 1)) for i in range(count)]


def _preempted(subject: Subject) -> ComparingRunner:
    """Two sequences, blocks for one and a half: one loses its blocks while it decodes, and is computed again."""
    num_blocks = 2 * subject.layout.num_blocks_for(2 * subject.block_size) + len(subject.layout.groups)
    runner = ComparingRunner(subject.model, subject.layout, num_blocks)
    bench = Bench(runner, num_blocks, 4 * subject.block_size)
    for name, reference in zip(("first", "second"), subject.short, strict=True):
        bench.add(name, reference, bypass_cache=True)
    bench.run()
    assert bench.num_preemptions > 0, "nobody was preempted"
    return runner


def _handed_over(subject: Subject) -> ComparingRunner:
    """One pool computes the prompt; its blocks' bytes go into other blocks of another pool, which decodes."""
    source, target = _bench(subject, 16), _bench(subject, 16)
    sequence_id = source.add("long", subject.long, role=SequenceRole.PREFILL_ONLY)
    said = source.run()
    target.add("neighbour", subject.short[0])
    target.steps(1)
    target.add("long", subject.long, role=SequenceRole.AWAIT_KV)
    reserved = _only(target.steps(1), Reserved)
    ready = [block.block_id for event in said if isinstance(event, BlocksReady) for block in event.blocks]
    assert ready != list(reserved.block_ids), "blocks in their old places would prove less"
    for theirs, ours in zip(ready, reserved.block_ids, strict=True):
        _copy(source.runner, theirs, target.runner, ours)
    target.commit(sequence_id, FirstToken(_only(said, NewTokens).token_ids[0]))
    target.run()
    return _together(source.runner, target.runner)


def _next_attempt(subject: Subject) -> ComparingRunner:
    """Output of an earlier attempt is input like a prompt."""
    bench = _bench(subject, 7)
    bench.add("long", subject.long, num_known_outputs=3)
    bench.run()
    return bench.runner


PATHS: Mapping[str, Callable[[Subject], ComparingRunner]] = {
    "whole": _in_chunks,
    "chunk 1": partial(_in_chunks, max_num_batched_tokens=1),
    "chunk 7": partial(_in_chunks, max_num_batched_tokens=7),
    "chunk 16": partial(_in_chunks, max_num_batched_tokens=16),
    "chunk 64": partial(_in_chunks, max_num_batched_tokens=64),
    "mixed": _mixed,
    "prefix hit": _prefix_hits,
    "preempted": _preempted,
    "handed over": _handed_over,
    "next attempt": _next_attempt,
}


def _num_blocks(subject: Subject) -> int:
    """Room for all three sequences."""
    longest = len(subject.long.prompt_ids) + NUM_OUTPUT_TOKENS
    return subject.layout.num_blocks_for(longest) + 8 * len(subject.layout.groups)


def _runner(subject: Subject) -> ComparingRunner:
    return ComparingRunner(subject.model, subject.layout, _num_blocks(subject))


def _bench(subject: Subject, max_num_batched_tokens: int, runner: ComparingRunner | None = None) -> Bench:
    runner = runner or _runner(subject)
    return Bench(runner, _num_blocks(subject), max_num_batched_tokens)


def _only(events: list[Event], kind: type[E]) -> E:
    (event,) = (event for event in events if isinstance(event, kind))
    return event


def _copy(source: ComparingRunner, theirs: BlockId, target: ComparingRunner, ours: BlockId) -> None:
    """In pieces, as they come over the wire."""
    data = bytes(source.memory.read(theirs))
    half = len(data) // 2
    target.memory.write(ours, 0, data[:half])
    target.memory.write(ours, half, data[half:])
    assert target.memory.checksum(ours) == source.memory.checksum(theirs), "the bytes are not the same"


def _together(first: ComparingRunner, second: ComparingRunner) -> ComparingRunner:
    """The second one, with what the first one found."""
    second.max_difference = max(first.max_difference, second.max_difference)
    second.num_logits += first.num_logits
    second.num_tokens += first.num_tokens
    second.num_wrong_tokens += first.num_wrong_tokens
    return second
