"""Several candidates of one prompt on a real model: each is what it would be alone."""

import pytest

from paceline.core.request import SamplingParams, SequenceSpec, TokenLogprob
from paceline.engine.conformance.architectures import build_tiny
from paceline.engine.events import NewTokens
from paceline.engine.exact.model import make_exact
from paceline.engine.model_loader import use_paged_attention
from paceline.engine.model_runner import ModelRunner
from tests.engine.harness import Bench
from tests.factories import BLOCK_SIZE, make_spec

NUM_BLOCKS = 60
# Two blocks and a half: what lies in the half one is copied.
PROMPT = tuple(range(5, 15))


def _bench(name: str, *, exact: bool = False, num_blocks: int = NUM_BLOCKS) -> Bench:
    model = build_tiny(name)
    layout = use_paged_attention(model, "float32", BLOCK_SIZE)
    if exact:
        make_exact(model)
    return Bench(num_blocks, runner=ModelRunner(model, layout, num_blocks), groups=layout.groups)


def _spec(name: str, candidates: tuple[int, ...]) -> SequenceSpec:
    return make_spec(
        name,
        PROMPT,
        sampling=SamplingParams(seed=3),
        max_tokens=14,
        num_top_logprobs=2,
        candidates=candidates,
    )


def _outputs(bench: Bench, spec: SequenceSpec) -> dict[int, list[TokenLogprob]]:
    bench.add(spec)
    bench.run()
    assert bench.pool.num_available == bench.pool.num_blocks
    new = bench.of(spec.sequence_id, NewTokens)
    return {
        candidate: [entry for event in new if event.candidate == candidate for entry in event.logprobs]
        for candidate in spec.candidates
    }


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_each_candidate_says_what_it_would_alone(name: str) -> None:
    """The same tokens as three sequences that share nothing, for models with and without windows."""
    together = _outputs(_bench(name), _spec("family", (0, 1, 2)))
    for candidate, output in together.items():
        alone = _outputs(_bench(name), _spec("alone", (candidate,)))[candidate]
        assert [entry.token_id for entry in output] == [entry.token_id for entry in alone]
        assert len(output) == 14
    assert len({tuple(entry.token_id for entry in output) for output in together.values()}) == 3


@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS, 8])
def test_in_exact_mode_every_number_is_the_same(num_blocks: int) -> None:
    """Log probabilities equal bit by bit, also when candidates are preempted and computed again."""
    bench = _bench("llama", exact=True, num_blocks=num_blocks)
    together = _outputs(bench, _spec("family", (0, 1, 5)))
    for candidate, output in together.items():
        alone = _bench("llama", exact=True)
        assert output == _outputs(alone, _spec("alone", (candidate,)))[candidate]
    assert (bench.scheduler.stats().num_preemptions > 0) == (num_blocks == 8)
