"""Random ways in which the same tokens come to be computed, and a witness that compares the bits.

A schedule is two engines and some requests with common beginnings: one engine has small pools, budgets and batches of
random sizes, the other one prefills for it. So there are chunk cuts, batch mates, prefix hits, preemptions and hand-overs.
What a token gives depends on the tokens before it and on nothing else: that is what the witness holds all schedules to.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import xxhash
from torch import Tensor
from transformers import PreTrainedModel

from paceline.core.kv_layout import BlockId, KVLayout
from paceline.core.request import FirstToken, RequestId, SamplingParams, SequenceId, SequenceSpec
from paceline.engine.block_pool import BlockPool
from paceline.engine.engine import Engine
from paceline.engine.events import BlocksReady, Event, NewTokens, Reserved
from paceline.engine.forward_batch import ForwardBatch
from paceline.engine.model_runner import ModelRunner
from paceline.engine.scheduler import Scheduler
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.sequence import SequenceRole
from paceline.engine.step import SchedulerOutput, StepOutput

_Tokens = tuple[int, ...]
E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class Counts:
    """What happened in schedules; equality says something only where these are not 0."""

    num_steps: int = 0
    num_chunks: int = 0
    num_mixed_steps: int = 0
    num_hits: int = 0
    num_preemptions: int = 0
    num_hand_overs: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            **{name: getattr(self, name) + getattr(other, name) for name in Counts.__dataclass_fields__}
        )


class Witness:
    """Remembers what each beginning of a text gave the first time, and counts what differed later."""

    def __init__(self) -> None:
        self.num_compared = 0
        self.num_mismatches = 0
        self.max_drift = 0.0  # largest difference of a logit, in standard deviations of its row
        self._logits: dict[_Tokens, Tensor] = {}
        self._blocks: dict[tuple[int, _Tokens], int] = {}

    def see_logits(self, tokens: _Tokens, logits: Tensor) -> None:
        """What follows `tokens`."""
        first = self._logits.setdefault(tokens, logits)
        if first is logits:
            return
        self._count(torch.equal(first, logits))
        drift = (first.float() - logits.float()).abs().max() / first.float().std()
        self.max_drift = max(self.max_drift, float(drift))

    def see_block(self, group: int, tokens: _Tokens, digest: int) -> None:
        """The bytes of the KV block that a group keeps for the last of `tokens`."""
        if (group, tokens) in self._blocks:
            self._count(self._blocks[group, tokens] == digest)
        self._blocks.setdefault((group, tokens), digest)

    def add(self, other: "Witness") -> None:
        """Counts what another one has found, about another model."""
        self.num_compared += other.num_compared
        self.num_mismatches += other.num_mismatches
        self.max_drift = max(self.max_drift, other.max_drift)

    def _count(self, is_same: bool) -> None:  # noqa: FBT001 - it is the result itself
        self.num_compared += 1
        self.num_mismatches += not is_same


class WatchedRunner(ModelRunner):
    """Shows a witness the logits of every token, or of those that are sampled, and every block that becomes full."""

    def __init__(
        self, model: PreTrainedModel, layout: KVLayout, num_blocks: int, witness: Witness, *, all_logits: bool
    ) -> None:
        super().__init__(model, layout, num_blocks)
        self._block_size = layout.block_size
        self._witness = witness
        self._all_logits = all_logits
        self._texts: dict[SequenceId, list[int]] = {}
        self._output = SchedulerOutput((), ())
        self.counts = Counts()

    def expect(self, spec: SequenceSpec) -> None:
        """The tokens that are known of a sequence; the others come by."""
        self._texts[spec.sequence_id] = list(spec.known_ids)

    def execute(self, output: SchedulerOutput) -> StepOutput:
        """See Runner.execute."""
        self._output = output
        for item in output.scheduled:
            self._texts[item.sequence_id][item.start : item.end] = item.token_ids
        self.counts += _counts_of(output)
        return super().execute(output)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See ModelRunner.forward."""
        if not self._all_logits:
            logits = super().forward(batch)
            self._show_sampled(logits[: len(batch.sample_tasks)])
        else:
            every_row = torch.arange(len(batch.token_ids))
            all_rows = super().forward(replace(batch, sample_rows=every_row, score_rows=every_row[:0]))
            self._show_all(all_rows)
            logits = all_rows[batch.logit_rows]
        self._show_blocks()
        return logits

    def _show_sampled(self, logits: Tensor) -> None:
        sampling = [item for item in self._output.scheduled if item.samples]
        for item, row in zip(sampling, logits, strict=True):
            self._witness.see_logits(tuple(self._texts[item.sequence_id][: item.end]), row)

    def _show_all(self, logits: Tensor) -> None:
        ends = [(item, end) for item in self._output.scheduled for end in range(item.start + 1, item.end + 1)]
        for (item, end), row in zip(ends, logits, strict=True):
            self._witness.see_logits(tuple(self._texts[item.sequence_id][:end]), row)

    def _show_blocks(self) -> None:
        for item in self._output.scheduled:
            for ordinal in range(item.start // self._block_size, item.end // self._block_size):
                tokens = tuple(self._texts[item.sequence_id][: (ordinal + 1) * self._block_size])
                for group, table in enumerate(item.block_tables):
                    self._witness.see_block(group, tokens, self._digest_of(group, table[ordinal]))

    def _digest_of(self, group: int, block_id: BlockId | None) -> int:
        assert block_id is not None, "what is computed has a place"
        return xxhash.xxh3_64_intdigest(self.memory.read(block_id)[: self.memory.layout.used_bytes(group)])


def _counts_of(output: SchedulerOutput) -> Counts:
    lengths = [len(item.token_ids) for item in output.scheduled]
    return Counts(
        num_steps=1,
        num_chunks=sum(not item.samples for item in output.scheduled),
        num_mixed_steps=int(len(lengths) > 1 and max(lengths) > 1 and min(lengths) == 1),
    )


def run_schedule(model: PreTrainedModel, layout: KVLayout, witness: Witness, seed: int) -> Counts:
    """One random schedule, to its end. The number of threads is drawn too, and put back."""
    with _threads(random.Random(seed).choice((1, 1, 1, 2))):  # noqa: S311 - to be drawn again, no secret
        return _Schedule(model, layout, witness, seed).run()


class _Schedule:
    def __init__(self, model: PreTrainedModel, layout: KVLayout, witness: Witness, seed: int) -> None:
        self._rng = random.Random(seed)  # noqa: S311 - the same
        self._block_size = layout.block_size
        longest = self._rng.choice((30, 60, 60, 200))
        vocab_size = model.config.get_text_config().vocab_size
        self._specs = [self._random_spec(number, longest, vocab_size) for number in range(6)]
        room = max(layout.num_blocks_for(len(spec.prompt_ids) + spec.max_tokens) for spec in self._specs)
        # Little more than the longest sequence needs, so that some are preempted; plenty where all are held.
        self._target = _Side(model, layout, room + self._rng.randint(0, 2), witness, self._rng)
        self._source = _Side(model, layout, 6 * room, witness, self._rng)
        self._waiting: set[SequenceId] = set()

    def run(self) -> Counts:
        """Adds the requests one after the other, with some steps between."""
        for number, spec in enumerate(self._specs):
            if number % 2 == 0:
                self._source.add(spec, SequenceRole.PREFILL_ONLY)
                self._target.add(spec, SequenceRole.AWAIT_KV)
                self._waiting.add(spec.sequence_id)
            else:
                self._target.add(spec, SequenceRole.GENERATE)
            for _ in range(self._rng.randint(0, 6)):
                self._step()
        while self._source.engine.has_work() or self._target.engine.has_work() or self._waiting:
            self._step()
        sides = (self._source, self._target)
        return sum((side.counts() for side in sides), Counts(num_hand_overs=3))

    def _step(self) -> None:
        for side in (self._source, self._target):
            if side.engine.has_work():
                side.step()
        for sequence_id in sorted(self._waiting):
            self._hand_over(sequence_id)

    def _hand_over(self, sequence_id: SequenceId) -> None:
        first, reserved = self._source.said(sequence_id, NewTokens), self._target.said(sequence_id, Reserved)
        if first is None or reserved is None:
            return
        pairs = list(zip(self._source.ready_ids(sequence_id), reserved.block_ids, strict=True))
        for theirs, ours in pairs[reserved.num_held :]:
            self._target.runner.memory.write(ours, 0, bytes(self._source.runner.memory.read(theirs)))
        self._target.engine.commit(sequence_id, [FirstToken(first.token_ids[0], first.finish_reason)])
        self._source.engine.release(sequence_id, asked_at_step=0)
        self._waiting.remove(sequence_id)

    def _random_spec(self, number: int, longest: int, vocab_size: int) -> SequenceSpec:
        rng = self._rng
        # The same beginnings in every schedule, so that what one saw another one sees again.
        start = rng.choice((7, 14))
        shared = [(31 * i + start) % vocab_size for i in range(rng.randint(1, longest))]
        own = [rng.randrange(vocab_size) for _ in range(rng.choice((0, 1, 3)))]
        return SequenceSpec(
            sequence_id=SequenceId(RequestId(f"r{number}"), 0),
            prompt_ids=(*shared, *own),
            output_ids=(),
            sampling=SamplingParams(temperature=rng.choice((0.0, 1.0)), seed=rng.randrange(3)),
            max_tokens=rng.randint(2, 24),
            ignore_eos=True,
        )


class _Side:
    """One engine, and what it has said."""

    def __init__(
        self,
        model: PreTrainedModel,
        layout: KVLayout,
        num_blocks: int,
        witness: Witness,
        rng: random.Random,
    ) -> None:
        self.runner = WatchedRunner(model, layout, num_blocks, witness, all_logits=rng.random() < 0.5)
        self._pool = BlockPool(num_blocks, layout.block_size, layout.groups)
        config = SchedulerConfig(rng.choice((1, 3, 7, 16, 33, 64, 256)), max_num_seqs=rng.randint(2, 6))
        self.engine = Engine(Scheduler(config, self._pool, self.runner.memory), self.runner)
        self._said: dict[SequenceId, list[Event]] = {}

    def add(self, spec: SequenceSpec, role: SequenceRole) -> None:
        self.runner.expect(spec)
        self._said[spec.sequence_id] = []
        self.engine.add(spec, role)

    def step(self) -> None:
        for event in self.engine.step().events:
            self._said[event.sequence_id].append(event)
        self.engine.check_invariants()

    def said(self, sequence_id: SequenceId, kind: type[E]) -> E | None:
        return next((event for event in self._said[sequence_id] if isinstance(event, kind)), None)

    def ready_ids(self, sequence_id: SequenceId) -> list[BlockId]:
        """The blocks that a hand-over moves, as far as they are computed."""
        events = (event for event in self._said[sequence_id] if isinstance(event, BlocksReady))
        return [block.block_id for event in events for block in event.blocks]

    def counts(self) -> Counts:
        hits, preemptions = self._pool.stats().num_hits, self.engine.stats().num_preemptions
        return replace(self.runner.counts, num_hits=hits, num_preemptions=preemptions)


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
