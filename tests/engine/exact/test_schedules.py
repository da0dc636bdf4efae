"""Whatever happens to a request, in exact mode its logits and its KV are the same bits."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.schedules import Counts, Witness, run_schedule
from paceline.core.errors import UnsupportedModelError
from paceline.core.kv_layout import KVLayout, min_blocks
from paceline.engine.conformance.architectures import SERVED, build_tiny
from paceline.engine.exact.model import make_exact, require_exact
from paceline.engine.kv_cache import TORCH_DTYPES
from paceline.engine.model_loader import load_model, use_paged_attention
from paceline.engine.model_runner import ModelRunner, require_same_as_transformers
from paceline.launcher.models import DEFAULT_MODEL, resolve_model

pytestmark = pytest.mark.thorough

# Plain; key biases; windows and soft caps; windows; sinks and experts; experts; Conv1D-like biases, one key head.
KINDS = ("llama", "qwen2", "gemma2", "gemma3", "gpt_oss", "mixtral", "gpt_bigcode")
QUICK = ("llama", "gemma2", "gpt_oss")
INEXACT = ("apertus", "deepseek_v2", "gemma3n", "gpt2", "phi3_longrope", "phimoe")
BLOCK_SIZE = 8
# What the documents promise of fast mode, in standard deviations of a row's logits.
FAST_DRIFT = {"float32": 1e-4, "bfloat16": 0.2}


def _model(name: str, dtype: str, mode: str) -> tuple[PreTrainedModel, KVLayout]:
    model = torch.nn.Module.to(build_tiny(name), TORCH_DTYPES[dtype])
    layout = use_paged_attention(model, dtype, BLOCK_SIZE)
    if mode == "exact":
        make_exact(model)
    return model, layout


def _run(name: str, dtype: str, mode: str, seeds: range) -> tuple[Witness, Counts]:
    model, layout = _model(name, dtype, mode)
    witness = Witness()
    counts = sum((run_schedule(model, layout, witness, seed) for seed in seeds), Counts())
    return witness, counts


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("name", QUICK)
def test_random_schedules_do_not_change_a_bit(name: str, dtype: str) -> None:
    """Chunk cuts, batch mates, hits, preemptions and hand-overs: equal logits and equal blocks, each compared."""
    witness, counts = _run(name, dtype, "exact", range(2))
    assert witness.num_mismatches == 0
    assert witness.num_compared > 20
    assert min(counts.num_chunks, counts.num_mixed_steps, counts.num_hits, counts.num_hand_overs) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("name", KINDS)
def test_two_hundred_schedules_do_not_change_a_bit(name: str, dtype: str) -> None:
    """Fifteen for each of fourteen models, with one thread or two; every kind of event happens."""
    witness, counts = _run(name, dtype, "exact", range(100, 115))
    assert witness.num_mismatches == 0
    assert witness.num_compared > 500
    assert min(counts.num_chunks, counts.num_mixed_steps, counts.num_hits, counts.num_preemptions) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_architecture_is_exact_or_refused(dtype: str) -> None:
    """Of those that are served, some cannot be exact; the others survive a schedule."""
    for name in SERVED:
        if name in INEXACT:
            with pytest.raises(UnsupportedModelError, match="exact mode cannot serve"):
                _model(name, dtype, "exact")
        else:
            assert _run(name, dtype, "exact", range(2))[0].num_mismatches == 0, name


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_the_default_model_is_exact(dtype: str) -> None:
    """Real weights, real sizes: three schedules without a bit changed, and one digest for 1, 2 and 3 threads."""
    loaded = load_model(resolve_model(DEFAULT_MODEL.name, print), dtype, 16, "exact")
    witness, digests = Witness(), set()
    for num_threads in (3, 2, 1):
        torch.set_num_threads(num_threads)
        runner = ModelRunner(loaded.model, loaded.layout, min_blocks(loaded.layout))
        digests.add(require_exact(runner, loaded.vocab_size, loaded.layout))
        run_schedule(loaded.model, loaded.layout, witness, seed=1 + num_threads)
    assert len(digests) == 1
    assert witness.num_compared > 100
    assert witness.num_mismatches == 0


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_fast_mode_changes_bits_and_drifts_within_what_it_publishes(dtype: str) -> None:
    """The same schedules find differences in fast mode, so they can fail; and the differences are small."""
    witnesses = {name: _run(name, dtype, "fast", range(2))[0] for name in QUICK}
    assert witnesses["llama"].num_mismatches > 0
    assert 0 < max(witness.max_drift for witness in witnesses.values()) < FAST_DRIFT[dtype]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_exact_mode_computes_what_transformers_computes(name: str) -> None:
    """The gate of every worker is passed, and the model is exact after it."""
    model, layout = _model(name, "float32", "exact")
    runner = ModelRunner(model, layout, min_blocks(layout))
    require_same_as_transformers(runner, model, layout)
    assert require_exact(runner, 96, layout).startswith("exact:")


def test_workers_compare_the_bits_that_they_compute() -> None:
    """The digest is that of the weights and of the arithmetic, whatever the number of threads."""
    model, layout = _model("llama", "float32", "exact")
    digests = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        digests.append(require_exact(ModelRunner(model, layout, min_blocks(layout)), 96, layout))
    torch.set_num_threads(1)
    assert digests[0] == digests[1]
    other, _ = _model("qwen2", "float32", "exact")
    assert require_exact(ModelRunner(other, layout, min_blocks(layout)), 96, layout) != digests[0]


def test_a_model_that_is_not_exact_is_found_out_at_start() -> None:
    """In fast mode the same probe gives a prompt several results, and is refused."""
    model, layout = _model("llama", "float32", "fast")
    with pytest.raises(UnsupportedModelError, match="in chunks or beside another prompt"):
        require_exact(ModelRunner(model, layout, min_blocks(layout)), 96, layout)


def test_the_mode_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    """An exact worker and a fast one never share a block."""
    build_tiny("llama").save_pretrained(tmp_path)
    fast, exact = (load_model(tmp_path, "float32", BLOCK_SIZE, mode) for mode in ("fast", "exact"))
    assert fast.fingerprint.arithmetic == "fast"
    assert fast.fingerprint.digest() != exact.fingerprint.digest()
