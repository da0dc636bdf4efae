"""With keys and values in few bits every path through the engine still gives the same tokens."""

from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.schedules import Counts, Witness, run_schedule
from paceline.core.errors import ConfigError, FingerprintMismatchError
from paceline.core.kv_layout import KV_TYPES, min_blocks
from paceline.engine.conformance.architectures import build_tiny
from paceline.engine.conformance.matrix import TINY_BLOCK_SIZE
from paceline.engine.conformance.paths import MIN_PROMPT_TOKENS, NUM_OUTPUT_TOKENS, PATHS, Subject, run_path
from paceline.engine.conformance.reference import random_prompt
from paceline.engine.exact.model import make_exact, require_exact
from paceline.engine.kv_cache import TORCH_DTYPES
from paceline.engine.model_loader import load_model, use_paged_attention
from paceline.engine.model_runner import ModelRunner
from paceline.launcher.config import UpConfig
from paceline.worker.config import WorkerConfig
from tests.engine.whole import whole_reference

pytestmark = pytest.mark.thorough

QUANTISED = ("fp8", "int8", "int4")
# Plain; windows and soft caps; keys and values of other sizes; sinks and experts; shared keys and values.
KINDS = ("llama", "gemma2", "deepseek_v3", "gpt_oss", "gemma4")
# In fast mode a sum in another order may turn elements to the next steps of their vectors: in standard deviations of logits.
FEW_STEPS = 0.01


@cache
def _subject(name: str, kv_dtype: str) -> Subject:
    """A tiny model whose reference is itself: each prompt computed whole, with the same type of KV."""
    model = build_tiny(name)
    layout = use_paged_attention(model, kv_dtype, TINY_BLOCK_SIZE)
    runner = ModelRunner(model, layout, layout.num_blocks_for(MIN_PROMPT_TOKENS + NUM_OUTPUT_TOKENS))
    lengths = (MIN_PROMPT_TOKENS, 2 * TINY_BLOCK_SIZE - 1, 2 * TINY_BLOCK_SIZE - 1)
    vocab_size = model.config.get_text_config().vocab_size
    long, *short = (
        whole_reference(runner, layout, random_prompt(vocab_size, length, seed), NUM_OUTPUT_TOKENS)
        for seed, length in enumerate(lengths)
    )
    return Subject(model, layout, long, (short[0], short[1]))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [(name, "int8") for name in KINDS] + [("llama", "fp8"), ("gemma2", "int4")],
)
def test_every_path_gives_the_tokens_of_the_whole_prompt(name: str, kv_dtype: str, path: str) -> None:
    """Chunks, batches, prefix hits, preemption, hand-over: no greedy token differs, no logit by more than a few steps."""
    subject = _subject(name, kv_dtype)
    result = run_path(subject, path)
    assert result.num_tokens > 0
    assert result.num_wrong_tokens == 0
    assert result.max_difference <= FEW_STEPS * float(subject.long.logits.std())


@pytest.mark.parametrize(
    ("name", "dtype", "kv_dtype"),
    [
        ("llama", "float32", "int8"),
        ("llama", "bfloat16", "fp8"),
        ("gemma2", "float32", "int4"),
        *(
            pytest.param(name, dtype, kv_dtype, marks=[pytest.mark.slow, pytest.mark.timeout(600)])
            for name in ("llama", "gemma2", "gpt_oss")
            for dtype in TORCH_DTYPES
            for kv_dtype in QUANTISED
        ),
    ],
)
def test_exact_mode_stays_exact(name: str, dtype: str, kv_dtype: str) -> None:
    """A scale depends on one token alone: random schedules do not change a bit of logits or blocks, at any threads."""
    model = torch.nn.Module.to(build_tiny(name), TORCH_DTYPES[dtype])
    layout = use_paged_attention(model, kv_dtype, TINY_BLOCK_SIZE)
    make_exact(model)
    witness = Witness()
    counts = sum((run_schedule(model, layout, witness, seed) for seed in range(2)), Counts())
    assert witness.num_mismatches == 0
    assert witness.num_compared > 20
    assert min(counts.num_chunks, counts.num_mixed_steps, counts.num_hits, counts.num_hand_overs) > 0
    assert require_exact(ModelRunner(model, layout, min_blocks(layout)), 96, layout).startswith("exact:")


def test_the_type_of_the_kv_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    """Workers with other types refuse each other and say why; auto is the type of the weights."""
    build_tiny("llama").save_pretrained(tmp_path)
    loaded = {
        kv_dtype: load_model(tmp_path, "float32", TINY_BLOCK_SIZE, kv_dtype=kv_dtype)
        for kv_dtype in ("auto", *KV_TYPES)
    }
    assert loaded["auto"].fingerprint == loaded["float32"].fingerprint
    digests = {kv_dtype: each.fingerprint.digest() for kv_dtype, each in loaded.items()}
    assert len(set(digests.values())) == len(KV_TYPES)
    with pytest.raises(FingerprintMismatchError, match="kv_dtype differs: int8 here, fp8 there"):
        loaded["int8"].fingerprint.require_same(loaded["fp8"].fingerprint)


def test_the_fake_runner_keeps_no_kv() -> None:
    """A type of KV that it would ignore is refused."""
    assert WorkerConfig(model="m", runner="fake").kv_dtype == "auto"
    for config in (WorkerConfig, UpConfig):
        with pytest.raises(ConfigError, match="--kv-dtype int8 needs --runner torch"):
            config(model="m", runner="fake", kv_dtype="int8")
