"""A model through our paged attention against the same model through plain transformers."""

from pathlib import Path

import pytest
import torch

from paceline.core.errors import UnsupportedModelError
from paceline.core.request import FirstToken, SequenceSpec
from paceline.engine.events import Reserved, Started
from paceline.engine.model_runner import ModelRunner, require_same_as_transformers
from paceline.engine.sequence import SequenceRole
from tests.engine.harness import Bench
from tests.engine.models import FAMILIES, VOCAB_SIZE, Model, RecordingRunner, open_model, write_model
from tests.factories import make_id, make_spec

TOLERANCE = 1e-4
PROMPTS = [
    tuple((7 * n + 3 * start) % VOCAB_SIZE for n in range(length)) for start, length in enumerate((21, 9, 14))
]


@pytest.fixture(scope="module", params=list(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A tiny model of each family."""
    return open_model(write_model(FAMILIES[request.param](), tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The plainest of them."""
    return open_model(write_model(FAMILIES["llama"](), tmp_path_factory.mktemp("llama")))


def _bench(model: Model, num_blocks: int, chunk: int) -> tuple[Bench, RecordingRunner]:
    runner = model.runner(num_blocks)
    return Bench(num_blocks, max_num_batched_tokens=chunk, runner=runner), runner


def _require_plain(model: Model, bench: Bench, runner: RecordingRunner, *specs: SequenceSpec) -> None:
    """Every token of every sequence was sampled from the logits that plain transformers has there."""
    for spec in specs:
        tokens = (*spec.known_ids, *bench.tokens(spec.sequence_id))
        assert len(tokens) == len(spec.prompt_ids) + spec.max_tokens
        plain = model.plain_logits(tokens)
        for position in range(len(spec.known_ids) - 1, len(tokens) - 1):
            ours = runner.logits[spec.sequence_id, position]
            torch.testing.assert_close(ours, plain[position], atol=TOLERANCE, rtol=0)
            assert tokens[position + 1] == int(ours.argmax())


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_a_prompt_in_chunks_has_the_plain_logits(llama: Model, chunk: int) -> None:
    """Whole, or in pieces of any size: prompt and output give the logits of the plain forward pass."""
    bench, runner = _bench(llama, 16, chunk)
    spec = make_spec(prompt_ids=PROMPTS[0])
    bench.add(spec)
    bench.run()
    _require_plain(llama, bench, runner, spec)


def test_a_mixed_batch_has_the_plain_logits_of_each_sequence(llama: Model) -> None:
    """Decodes and chunks of other prompts in one forward pass do not touch each other."""
    bench, runner = _bench(llama, 32, 7)
    specs = [make_spec(f"r{n}", prompt, max_tokens=10) for n, prompt in enumerate(PROMPTS)]
    for spec in specs:
        bench.add(spec)
    bench.run()
    assert any(len(step) > 1 and max(step.values()) > 1 for step in bench.computed())
    _require_plain(llama, bench, runner, *specs)


def test_a_prefix_hit_has_the_plain_logits(llama: Model) -> None:
    """What comes out of the cache is as good as computed."""
    bench, runner = _bench(llama, 32, 64)
    specs = [make_spec("first", PROMPTS[0]), make_spec("second", (*PROMPTS[0][:17], 5, 6))]
    for spec in specs:
        bench.add(spec)
        bench.run()
    assert bench.computed()[-8:-1] == [{"second": 1}] * 7
    assert bench.pool.stats().num_hits == 4
    _require_plain(llama, bench, runner, *specs)


def test_a_preempted_sequence_has_the_plain_logits(llama: Model) -> None:
    """Computed again after it lost its blocks, a sequence goes on where it was."""
    bench, runner = _bench(llama, 8, 16)
    specs = [make_spec(f"r{n}", prompt[:9], max_tokens=16) for n, prompt in enumerate(PROMPTS[:2])]
    for spec in specs:
        bench.add(spec)
    bench.run()
    assert bench.scheduler.stats().num_preemptions > 0
    _require_plain(llama, bench, runner, *specs)


def test_a_later_attempt_has_the_plain_logits(llama: Model) -> None:
    """Output of an earlier attempt is input like a prompt."""
    bench, runner = _bench(llama, 16, 7)
    spec = make_spec(prompt_ids=PROMPTS[1], output_ids=(5, 6, 7), max_tokens=8, attempt=1)
    bench.add(spec)
    bench.run()
    _require_plain(llama, bench, runner, spec)


def test_every_family_has_the_plain_logits_under_pressure(model: Model) -> None:
    """Chunks, mixed batches, prefix hits and preemptions together: windows, soft caps and sinks are honoured."""
    bench, runner = _bench(model, 14, 7)
    specs = [make_spec(f"r{n}", prompt, max_tokens=12) for n, prompt in enumerate(PROMPTS)]
    specs.append(make_spec("again", (*PROMPTS[0][:17], 5, 6), max_tokens=12))
    for spec in specs:
        bench.add(spec)
    bench.run()
    assert bench.scheduler.stats().num_preemptions > 0
    assert bench.pool.stats().num_hits > 0
    _require_plain(model, bench, runner, *specs)


def test_every_family_passes_the_check_at_start(model: Model) -> None:
    """The gate compares with transformers itself and lets through what is right; the model is usable after it."""
    loaded, spec = model.loaded, make_spec(prompt_ids=PROMPTS[0], max_tokens=2)
    runner = ModelRunner(loaded.model, loaded.layout, num_blocks=4)
    require_same_as_transformers(runner, loaded.model, loaded.layout)
    bench, recorder = _bench(model, 8, 7)
    bench.add(spec)
    bench.run()
    _require_plain(model, bench, recorder, spec)


def test_blocks_that_moved_go_on_as_if_computed_here(llama: Model) -> None:
    """The bytes of a prompt's blocks, written into another memory, give the plain logits for what follows."""
    spec = make_spec(prompt_ids=PROMPTS[0])
    source, _ = _bench(llama, 16, 7)
    source.add(spec, SequenceRole.PREFILL_ONLY)
    source.run()
    target, runner = _bench(llama, 16, 7)
    target.add(make_spec("other", PROMPTS[1]))
    target.step()
    target.add(spec, SequenceRole.AWAIT_KV)
    target.step()
    sent, reserved = source.one(spec.sequence_id, Started), target.one(spec.sequence_id, Reserved)
    for theirs, ours in zip(sent.block_ids, reserved.block_ids, strict=True):
        runner.memory.write(ours, 0, bytes(source.runner.memory.read(theirs)))
        assert runner.memory.checksum(ours) == source.runner.memory.checksum(theirs)
    (first,) = source.tokens(spec.sequence_id)
    target.scheduler.commit(spec.sequence_id, FirstToken(first))
    target.run()
    after = make_spec(prompt_ids=PROMPTS[0], output_ids=(first,))
    _require_plain(llama, target, runner, after)


def test_bfloat16_serves_the_same_logits_within_its_precision(tmp_path: Path) -> None:
    """In bf16 the relative distance to plain transformers is that of rounding."""
    model = open_model(write_model(FAMILIES["llama"](), tmp_path), dtype="bfloat16")
    bench, runner = _bench(model, 16, 7)
    bench.add(make_spec(prompt_ids=PROMPTS[0]))
    bench.run()
    plain = model.plain_logits((*PROMPTS[0], *bench.tokens(make_id())))
    for (_, position), ours in runner.logits.items():
        assert (ours - plain[position]).norm() < 0.05 * plain[position].norm()


def test_a_model_with_a_window_is_not_served_without_it(tmp_path: Path) -> None:
    """The comparisons above can fail: with the window left out, the logits differ by more than the tolerance."""
    windowed = open_model(write_model(FAMILIES["mistral"](), tmp_path))
    for layer in windowed.plain.model.layers:
        layer.self_attn.config.sliding_window = None
    bench, runner = _bench(windowed, 16, 64)
    spec = make_spec(prompt_ids=PROMPTS[0])
    bench.add(spec)
    bench.run()
    with pytest.raises(AssertionError):
        _require_plain(windowed, bench, runner, spec)


def test_the_check_at_start_refuses_a_model_that_is_served_wrongly(llama: Model) -> None:
    """A runner that is not the model's own gives other logits, and is refused with the distance in the message."""
    loaded = llama.loaded
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        other = type(loaded.model)(loaded.model.config)
    with pytest.raises(UnsupportedModelError, match="relative distance"):
        require_same_as_transformers(
            ModelRunner(loaded.model, loaded.layout, num_blocks=4), other, loaded.layout
        )
