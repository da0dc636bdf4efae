"""Log probabilities of prompt tokens on a real model: those of one plain forward pass, whatever way the prompt took."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.core.request import SequenceSpec, TokenLogprob
from paceline.engine.conformance.architectures import build_tiny
from paceline.engine.events import PromptScored
from paceline.engine.exact.model import make_exact
from paceline.engine.model_loader import use_paged_attention
from paceline.engine.model_runner import ModelRunner
from paceline.engine.scoring import score, token_logprobs
from paceline.engine.step import ScoreTask
from tests.engine.harness import Bench
from tests.factories import BLOCK_SIZE, make_spec

PROMPT = tuple((7 * n * n + 3) % 61 for n in range(40))


def _bench(num_blocks: int = 40, *, chunk: int = 64, name: str = "llama", exact: bool = False) -> Bench:
    model = build_tiny(name)
    layout = use_paged_attention(model, "float32", BLOCK_SIZE)
    if exact:
        make_exact(model)
    runner = ModelRunner(model, layout, num_blocks)
    return Bench(num_blocks, max_num_batched_tokens=chunk, runner=runner)


def _told(bench: Bench, spec: SequenceSpec) -> list[TokenLogprob]:
    return [entry for event in bench.of(spec.sequence_id, PromptScored) for entry in event.logprobs]


@torch.inference_mode()
def _plain(model: PreTrainedModel, prompt_ids: tuple[int, ...]) -> Tensor:
    logits: Tensor = model(torch.tensor([prompt_ids]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


def _require_plain(told: list[TokenLogprob], spec: SequenceSpec, name: str = "llama") -> None:
    """The entries are what transformers' own forward pass of the whole prompt says, alternatives included."""
    logprobs = _plain(build_tiny(name), spec.prompt_ids)
    assert [entry.token_id for entry in told] == list(spec.prompt_ids[1:])
    for place, entry in enumerate(told, 1):
        before = logprobs[place - 1]
        assert entry.logprob == pytest.approx(float(before[entry.token_id]), abs=1e-4)
        best = before.topk(spec.num_top_logprobs or 0)
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [float(before[token_id]) for token_id, _ in entry.top] == pytest.approx(
            best.values.tolist(), abs=1e-4
        )


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("name", ["llama", "gpt_bigcode"])
def test_they_are_those_of_a_plain_forward_pass(name: str, chunk: int) -> None:
    """In chunks of any size, from a model that computes chosen rows and from one that computes them all."""
    bench, spec = (
        _bench(chunk=chunk, name=name),
        make_spec("r", PROMPT, num_top_logprobs=5, prompt_logprobs=True),
    )
    bench.add(spec)
    bench.run()
    _require_plain(_told(bench, spec), spec, name)


def test_neighbours_in_a_batch_keep_their_rows_apart() -> None:
    """Two prompts that are told, one that is not, and a decode, all in one step."""
    bench = _bench(chunk=16)
    decoding = make_spec("decoding", PROMPT[20:25], num_top_logprobs=1, max_tokens=30)
    bench.add(decoding)
    bench.step()
    specs = [
        make_spec("silent", PROMPT[5:9]),
        make_spec("one", PROMPT[:6], num_top_logprobs=2, prompt_logprobs=True),
        make_spec("two", PROMPT, num_top_logprobs=0, prompt_logprobs=True),
    ]
    for spec in specs:
        bench.add(spec)
    bench.step()
    assert len(bench.outputs[-1].scheduled) == 4
    bench.run()
    assert _told(bench, specs[0]) == []
    for spec in specs[1:]:
        _require_plain(_told(bench, spec), spec)


def test_a_prompt_preempted_midway_has_each_entry_once() -> None:
    """The entries from before and after the preemption together are the plain ones."""
    bench = _bench(num_blocks=11, chunk=4)
    bench.add(make_spec("old", (1, 2, 3), max_tokens=12))
    bench.step()
    spec = make_spec("young", PROMPT[:36], num_top_logprobs=1, max_tokens=2, prompt_logprobs=True)
    bench.add(spec)
    while bench.scheduler.stats().num_preemptions == 0:
        bench.step()
    assert 0 < len(_told(bench, spec)) < 35
    bench.run()
    _require_plain(_told(bench, spec), spec)


def test_exact_mode_tells_the_same_bits_in_any_chunks() -> None:
    """Equal with ==, alone and beside another one."""
    spec = make_spec("r", PROMPT, num_top_logprobs=3, prompt_logprobs=True)
    told = []
    for chunk, has_neighbour in ((64, False), (7, False), (1, False), (16, True)):
        bench = _bench(chunk=chunk, exact=True)
        if has_neighbour:
            bench.add(make_spec("neighbour", PROMPT[::-1], num_top_logprobs=1, prompt_logprobs=True))
        bench.add(spec)
        bench.run()
        told.append(_told(bench, spec))
    assert len(told[0]) == len(PROMPT) - 1
    assert all(each == told[0] for each in told)


@torch.inference_mode()
def test_rows_are_scored_alike_in_slices_and_at_once() -> None:
    """A chunk of more rows than are taken at a time gives the bits that its rows give alone; tasks keep their order."""
    logits = torch.randn(150, 1000, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    target_ids = tuple((31 * n) % 1000 for n in range(150))
    tasks = [ScoreTask(0, target_ids[:140], 4), ScoreTask(3, target_ids[140:], 0)]
    many, few = score(logits, tasks)
    alone = [
        token_logprobs(row[None].float(), [token_id], 4)[0]
        for row, token_id in zip(logits, target_ids, strict=True)
    ]
    assert list(many) == alone[:140]
    assert [(entry.token_id, entry.logprob) for entry in few] == [
        (entry.token_id, entry.logprob) for entry in alone[140:]
    ]
    assert all(entry.top == () for entry in few)
    assert score(logits[:0], []) == ()
