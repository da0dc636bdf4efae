"""How many tokens each expert is given, against what the experts and transformers' own router logits say."""

from collections import Counter
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.core.kv_layout import BlockId
from paceline.engine.block_pool import BlockPool
from paceline.engine.conformance.architectures import SERVED, build_tiny
from paceline.engine.engine import Engine
from paceline.engine.exact.model import make_exact
from paceline.engine.expert_load import ExpertLoad
from paceline.engine.model_loader import use_paged_attention
from paceline.engine.model_runner import ModelRunner
from paceline.engine.scheduler import Scheduler
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.sequence import SequenceRole
from paceline.engine.step import ExpertTokens, SampleTask, ScheduledSequence, SchedulerOutput
from tests.engine.harness import Bench
from tests.factories import BLOCK_SIZE, GREEDY, make_id, make_spec

# Every architecture of the tiny ones with experts, by its configuration; and those that give their router logits.
MIXTURES = sorted(
    name
    for name, given in SERVED.items()
    if {"num_experts", "num_local_experts", "n_routed_experts"} & given.keys()
)
TELLING = ("gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
TOP_K, NUM_EXPERTS = 2, 4
PROMPT = tuple(range(3, 11))


def runner_of(name: str, *, exact: bool = False) -> tuple[PreTrainedModel, ModelRunner]:
    """A tiny model and its runner."""
    model = build_tiny(name)
    layout = use_paged_attention(model, "float32", BLOCK_SIZE)
    if exact:
        make_exact(model)
    return model, ModelRunner(model, layout, num_blocks=8)


def chunk(start: int, end: int, index: int = 0) -> ScheduledSequence:
    """Some tokens of the prompt, in blocks of a sequence's own."""
    # As many KV groups as any of the models has.
    tables = tuple(tuple(BlockId(4 * index + 2 * group + i) for i in range(2)) for group in range(2))
    return ScheduledSequence(make_id(f"r{index}"), PROMPT[start:end], start, tables, ())


def step(runner: ModelRunner, *items: ScheduledSequence) -> tuple[ExpertTokens, ...]:
    """What one step of these chunks gives the experts."""
    return runner.execute(SchedulerOutput(items, ())).expert_tokens


class Ears:
    """Counts, one by one, the expert numbers that modules called `experts` are called with."""

    def __init__(self, model: nn.Module) -> None:
        self.heard: dict[int, Counter[int]] = {}
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                self._listen(int(name.split(".")[2]), module)

    def _listen(self, layer: int, module: nn.Module) -> None:
        counter = self.heard[layer] = Counter()

        def hear(_: nn.Module, args: tuple[Any, ...]) -> None:
            counter.update(args[1].flatten().tolist())

        module.register_forward_pre_hook(hear)

    def counts(self) -> dict[int, tuple[int, ...]]:
        """By layer, for each expert."""
        return {layer: tuple(counter[i] for i in range(NUM_EXPERTS)) for layer, counter in self.heard.items()}


def test_there_are_mixtures_to_try() -> None:
    """The list holds all that the issue of experts is about, and more."""
    wanted = {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3"}
    assert wanted < set(MIXTURES)
    assert len(MIXTURES) >= 12


@pytest.mark.parametrize("name", MIXTURES)
def test_the_count_is_what_the_experts_are_given(name: str) -> None:
    """Step by step, in chunks and mixed batches, for every layer that has experts, and for no other layer."""
    model, runner = runner_of(name)
    for items in ((chunk(0, 3),), (chunk(3, 8), chunk(0, 4, 1)), (chunk(4, 5, 1),)):
        ears = Ears(model)
        counted = step(runner, *items)
        assert {each.layer: each.counts for each in counted} == ears.counts()
        num_tokens = sum(len(item.token_ids) for item in items)
        assert {sum(each.counts) for each in counted} == {TOP_K * num_tokens}


@pytest.mark.parametrize("name", TELLING)
@torch.inference_mode()
def test_the_count_agrees_with_the_router_logits(name: str) -> None:
    """The experts with the largest logits of a plain forward pass are those that are counted."""
    model, runner = runner_of(name)
    counted = step(runner, chunk(0, 8))
    model.set_attn_implementation("eager")
    logits: tuple[Tensor, ...] = model(
        torch.tensor([PROMPT]), use_cache=False, output_router_logits=True
    ).router_logits
    expected = [
        Counter(layer.view(-1, NUM_EXPERTS).topk(TOP_K).indices.flatten().tolist()) for layer in logits
    ]
    assert [dict(enumerate(each.counts)) for each in counted] == [
        {i: counter[i] for i in range(NUM_EXPERTS)} for counter in expected
    ]


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_exact_mode_counts_too(name: str) -> None:
    """The exact twin of a model gives its experts the same tokens, and they are counted."""
    model, runner = runner_of(name, exact=True)
    ears = Ears(model)
    counted = step(runner, chunk(0, 8))
    assert {each.layer: each.counts for each in counted} == ears.counts()
    assert counted == step(runner_of(name)[1], chunk(0, 8))


def test_a_dense_model_costs_nothing() -> None:
    """Without experts there is nothing to count, and no module is watched."""
    model, runner = runner_of("llama")
    assert step(runner, chunk(0, 8)) == ()
    with ExpertLoad(model).counting():
        assert not any(module._forward_hooks for module in model.modules())


def test_two_runners_of_one_model_do_not_count_twice() -> None:
    """Modules are watched only while a runner's own step computes."""
    model, first = runner_of("mixtral")
    layout = use_paged_attention(model, "float32", BLOCK_SIZE)
    second = ModelRunner(model, layout, num_blocks=8)
    assert step(first, chunk(0, 8)) == step(second, chunk(0, 8))
    assert not any(module._forward_hooks for module in model.modules())


def test_an_engine_adds_its_steps_up() -> None:
    """The picture of an engine holds what all steps gave the experts: each token that was computed, twice."""
    _, runner = runner_of("mixtral")
    engine = Engine(
        Scheduler(SchedulerConfig(3, max_num_seqs=4), BlockPool(8, BLOCK_SIZE), runner.memory),
        runner,
    )
    assert engine.stats().expert_tokens == ()
    engine.add(make_spec(prompt_ids=PROMPT, max_tokens=3), SequenceRole.GENERATE)
    while engine.has_work():
        engine.step()
    totals = engine.stats().expert_tokens
    assert [each.layer for each in totals] == [0, 1]
    assert {sum(each.counts) for each in totals} == {TOP_K * (len(PROMPT) + 2)}


def test_imbalance_is_the_busiest_over_the_mean() -> None:
    """1 where all have the same, the number of experts where one has everything, 0 where there was nothing."""
    assert ExpertTokens(0, (5, 5, 5, 5)).imbalance == 1
    assert ExpertTokens(0, (0, 0, 8, 0)).imbalance == 4
    assert ExpertTokens(0, (3, 1)).plus(ExpertTokens(0, (3, 1))) == ExpertTokens(0, (6, 2))
    assert ExpertTokens(0, (6, 2)).imbalance == 1.5
    assert ExpertTokens(0, (0, 0)).imbalance == 0


def test_a_runner_tells_which_experts_computed_each_sampled_token() -> None:
    """A bit for each expert of each layer: as many as a token has experts, the same for the same token, and only when asked."""
    model = build_tiny("mixtral")
    layout = use_paged_attention(model, "float32", BLOCK_SIZE)
    items = [replace_samples(chunk(0, end, index)) for index, end in enumerate((8, 5, 8))]
    silent, telling = (ModelRunner(model, layout, 16, tells_experts=tells) for tells in (False, True))
    assert silent.execute(SchedulerOutput(tuple(items), ())).experts == ()
    step = telling.execute(SchedulerOutput(tuple(items), ()))
    num_layers = len(step.expert_tokens)
    assert [mask.bit_count() for mask in step.experts] == [TOP_K * num_layers] * 3
    assert step.experts[0] == step.experts[2] != step.experts[1]


def replace_samples(item: ScheduledSequence) -> ScheduledSequence:
    """The same, and its next token is sampled."""
    return structs.replace(item, samples=(SampleTask(GREEDY),))


def test_decodes_that_share_experts_share_a_step() -> None:
    """Of six that take turns in threes, the first and those nearest to it decode, and everybody has a turn."""
    bench = Bench(40, max_decodes=3, group_by_experts=True, max_num_seqs=8)
    for number in range(6):
        bench.add(make_spec(f"r{number}", (number,), max_tokens=9))
    bench.step()
    for number, sequence in enumerate(bench.scheduler._running.decoding):
        sequence.experts = 0b0011 if number % 2 else 0b1100
    bench.steps(2)
    assert [sorted(step) for step in bench.computed()[1:3]] == [["r0", "r2", "r4"], ["r1", "r3", "r5"]]
    bench.run()
    assert all(bench.end(make_id(f"r{number}")) is not None for number in range(6))
    assert max(len(step) for step in bench.computed()[1:]) == 3
