"""A scheduler and a model runner that compares every logit and every token it computes with the reference."""

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.core.kv_layout import KVLayout
from paceline.core.request import FirstToken, RequestId, SamplingParams, SequenceId, SequenceSpec
from paceline.engine.block_pool import BlockPool
from paceline.engine.conformance.reference import Reference
from paceline.engine.engine import Engine
from paceline.engine.events import Event
from paceline.engine.forward_batch import ForwardBatch
from paceline.engine.model_runner import ModelRunner
from paceline.engine.scheduler import Scheduler
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.sequence import SequenceRole
from paceline.engine.step import ScheduledSequence, SchedulerOutput, StepOutput

_GREEDY = SamplingParams(temperature=0.0)


class ComparingRunner(ModelRunner):
    """A model runner that knows what should come out.

    It computes the logits of all tokens of a step, not only of those that sample.
    """

    def __init__(self, model: PreTrainedModel, layout: KVLayout, num_blocks: int) -> None:
        super().__init__(model, layout, num_blocks)
        self.max_difference = 0.0
        self.num_logits = 0
        self.num_tokens = 0
        self.num_wrong_tokens = 0
        self.steps: list[tuple[ScheduledSequence, ...]] = []
        self._references: dict[SequenceId, Reference] = {}

    def expect(self, sequence_id: SequenceId, reference: Reference) -> None:
        """From now on the sequence must give what `reference` says; it may be shorter."""
        self._references[sequence_id] = reference

    def execute(self, output: SchedulerOutput) -> StepOutput:
        """See Runner.execute."""
        self.steps.append(output.scheduled)
        step = super().execute(output)
        sampling = [item for item in output.scheduled if item.samples]
        for item, token_id in zip(sampling, step.token_ids, strict=True):
            self.num_tokens += 1
            self.num_wrong_tokens += token_id != self._references[item.sequence_id].next_token(item.end - 1)
        return step

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See ModelRunner.forward."""
        every_row = torch.arange(len(batch.token_ids))
        logits = super().forward(replace(batch, sample_rows=every_row, score_rows=every_row[:0]))
        for item, query in zip(self.steps[-1], batch.queries, strict=True):
            expected = self._references[item.sequence_id].logits[item.start : item.end]
            self._compare(logits[query.first : query.last].float(), expected)
        return logits[batch.logit_rows]

    def _compare(self, ours: Tensor, expected: Tensor) -> None:
        # What is no number is as far away as can be.
        difference = (ours - expected).abs().nan_to_num(nan=torch.finfo(torch.float32).max)
        self.max_difference = max(self.max_difference, float(difference.max()))
        self.num_logits += ours.numel()


class Bench:
    """An engine with an empty prefix cache, stepped by hand. Several in turn may use one runner."""

    def __init__(self, runner: ComparingRunner, num_blocks: int, max_num_batched_tokens: int) -> None:
        self.runner = runner
        self.pool = BlockPool(num_blocks, runner.memory.layout.block_size, runner.memory.layout.groups)
        config = SchedulerConfig(max_num_batched_tokens, max_num_seqs=8)
        self._scheduler = Scheduler(config, self.pool, runner.memory)
        self._engine = Engine(self._scheduler, runner)

    def add(
        self,
        name: str,
        reference: Reference,
        *,
        num_prompt_tokens: int | None = None,
        num_known_outputs: int = 0,
        role: SequenceRole = SequenceRole.GENERATE,
        bypass_cache: bool = False,
    ) -> SequenceId:
        """Queues the reference's prompt, or the beginning of it, of which only the next token is asked."""
        sequence_id = SequenceId(RequestId(name), attempt=0)
        is_part = num_prompt_tokens is not None
        spec = SequenceSpec(
            sequence_id=sequence_id,
            prompt_ids=reference.prompt_ids[:num_prompt_tokens],
            output_ids=reference.output_ids[:num_known_outputs],
            sampling=_GREEDY,
            max_tokens=1 if is_part else len(reference.output_ids),
            bypass_cache=bypass_cache,
        )
        self.runner.expect(sequence_id, reference)
        self._engine.add(spec, role)
        return sequence_id

    def commit(self, sequence_id: SequenceId, first: FirstToken) -> None:
        """The sequence's blocks have been filled."""
        self._engine.commit(sequence_id, [first])

    def steps(self, num_steps: int) -> list[Event]:
        """Some steps; what they said."""
        return [event for _ in range(num_steps) for event in self._engine.step().events]

    def run(self) -> list[Event]:
        """Steps until nothing is left to compute; what they said."""
        events: list[Event] = []
        while self._engine.has_work():
            result = self._engine.step()
            assert not result.idle, "the blocks of a bench are enough for one of its sequences"
            events += result.events
        self._engine.check_invariants()
        return events

    @property
    def num_preemptions(self) -> int:
        """Sequences that lost their blocks so far."""
        return self._engine.stats().num_preemptions
