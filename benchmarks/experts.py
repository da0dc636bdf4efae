"""Whether decodes that share experts should share a step: distinct experts a step and time a token, with and without."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.simulator.spec import scheduler_config
from benchmarks.simulator.trace import TraceRequest, spec_of
from paceline.engine.block_pool import BlockPool
from paceline.engine.engine import Engine
from paceline.engine.model_loader import use_paged_attention
from paceline.engine.model_runner import ModelRunner
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import SequenceRole
from paceline.engine.step import SchedulerOutput, StepOutput

_NUM_SEQUENCES, _GROUP = 32, 8
_NUM_TOKENS = 48
_BLOCK_SIZE = 16
# Who decodes in a step: everybody; a group that takes turns; a group that shares experts.
WAYS = {
    "all": {},
    "turns": {"max_decodes": _GROUP},
    "experts": {"max_decodes": _GROUP, "group_by_experts": True},
}


@dataclass(frozen=True, slots=True)
class GroupCost:
    """One way, over all its decode steps."""

    distinct_experts_per_layer: float
    experts_per_token: float
    ms_per_step: float
    ms_per_token: float


def small_mixture() -> PreTrainedModel:
    """Six layers of 32 experts, four for each token; random weights, and so random topics."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=32,
        num_experts_per_tok=4,
        max_position_embeddings=1024,
    )
    model: PreTrainedModel = Qwen3MoeForCausalLM(config)
    model.requires_grad_(requires_grad=False)
    model.train(mode=False)
    return model


def measure_groups(num_repeats: int) -> dict[str, GroupCost]:
    """Each way in turn, `num_repeats` times; medians."""
    model = small_mixture()
    runs = [{way: _run(model, dict(settings)) for way, settings in WAYS.items()} for _ in range(num_repeats)]
    return {way: _median([run[way] for run in runs]) for way in WAYS}


class _Counting(ModelRunner):
    """Notes of each decode step its distinct experts, its tokens and its time."""

    steps: list[tuple[float, int, float]]

    def execute(self, output: SchedulerOutput) -> StepOutput:
        begin = time.perf_counter()
        step = super().execute(output)
        duration_s = time.perf_counter() - begin
        if all(len(item.token_ids) == 1 for item in output.scheduled):
            distinct = [sum(count > 0 for count in layer.counts) for layer in step.expert_tokens]
            self.steps.append((statistics.mean(distinct), len(output.scheduled), duration_s))
        return step


def _run(model: PreTrainedModel, settings: dict[str, int | bool]) -> GroupCost:
    layout = use_paged_attention(model, "float32", _BLOCK_SIZE)
    num_blocks = _NUM_SEQUENCES * 8
    runner = _Counting(model, layout, num_blocks, tells_experts=True)
    runner.steps = []
    config = scheduler_config(max_num_seqs=_NUM_SEQUENCES, fast_lane_share=0.0, watermark=0.0, **settings)
    engine = Engine(Scheduler(config, BlockPool(num_blocks, _BLOCK_SIZE), runner.memory), runner)
    for number in range(_NUM_SEQUENCES):
        spec = spec_of(TraceRequest(0.0, 16, _NUM_TOKENS), number, model.config.vocab_size)
        engine.add(spec, SequenceRole.GENERATE)
    while engine.has_work():
        engine.step()
    # The last steps have fewer sequences than a group.
    full = [step for step in runner.steps if step[1] >= _GROUP]
    num_tokens = sum(num_sequences for _, num_sequences, _ in full)
    return GroupCost(
        distinct_experts_per_layer=statistics.mean(distinct for distinct, _, _ in full),
        experts_per_token=sum(distinct for distinct, _, _ in full) / num_tokens,
        ms_per_step=1e3 * statistics.median(duration_s for _, _, duration_s in full),
        ms_per_token=1e3 * sum(duration_s for _, _, duration_s in full) / num_tokens,
    )


def _median(runs: list[GroupCost]) -> GroupCost:
    names = GroupCost.__dataclass_fields__
    return GroupCost(**{name: statistics.median(getattr(run, name) for run in runs) for name in names})


def group_table(costs: dict[str, GroupCost]) -> Iterator[str]:
    """For people."""
    yield f"{'decodes':<10}{'experts a layer':>16}{'a token':>10}{'ms a step':>12}{'ms a token':>12}"
    for way, cost in costs.items():
        yield (
            f"{way:<10}{cost.distinct_experts_per_layer:>16.1f}{cost.experts_per_token:>10.2f}"
            f"{cost.ms_per_step:>12.2f}{cost.ms_per_token:>12.2f}"
        )
