"""`./run bench roofline`: what a step has to do, and what the shares of the limits are."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MixtralConfig

from benchmarks.roofline import command, limits
from benchmarks.roofline.limits import Limits, measure_limits
from benchmarks.roofline.profiles import profile_table
from benchmarks.roofline.shares import Steps, least_s, shares_of
from benchmarks.roofline.work import ModelSize, Shape, model_size
from benchmarks.simulator.cost import StepWork
from benchmarks.simulator.measure import StepSample
from paceline.core.errors import ConfigError
from paceline.core.kv_layout import KVLayout, LayerKV

SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "vocab_size": 100,
} | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2}
LAYOUT = KVLayout((LayerKV(2, 2, 2),) * 3, 4, "bfloat16")


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
def test_a_model_is_counted_by_what_its_steps_read(tmp_path: Path, tie_word_embeddings: bool) -> None:
    """All weights but the table of embeddings, unless the logits are made with it; keys and values; pairs of tokens."""
    config = LlamaConfig(**SIZES, tie_word_embeddings=tie_word_embeddings)
    config.save_pretrained(tmp_path)
    size = model_size(tmp_path, LAYOUT, item_bytes=2)
    layer = [(8, 8), (8, 4), (8, 4), (8, 8), (8, 16), (8, 16), (16, 8)]
    assert size.layers == tuple(Shape(*each) for each in layer * 3)
    assert size.shapes == (Shape(8, 8), Shape(8, 4), Shape(8, 16), Shape(16, 8))
    assert size.head == Shape(8, 100)
    assert size.weight_bytes == 2 * (3 * (sum(a * b for a, b in layer) + 2 * 8) + 8 + 800)
    assert size.kv_bytes_per_token == 3 * 2 * (2 + 2) * 2
    assert size.attention_flops_per_pair == 3 * 4 * (2 * 2 + 2 * 2)


def test_what_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    """Experts, of which a token needs a few; and windows, out of which tokens fall."""
    MixtralConfig(**SIZES, num_local_experts=8).save_pretrained(tmp_path / "experts")
    LlamaConfig(**SIZES).save_pretrained(tmp_path / "plain")
    window = KVLayout((LayerKV(2, 2, 2), LayerKV(2, 2, 2, window=4)), 4, "bfloat16")
    for name, layout in (("experts", LAYOUT), ("plain", window)):
        with pytest.raises(ConfigError, match="dense models"):
            model_size(tmp_path / name, layout, item_bytes=2)


SIZE = ModelSize(
    layers=(Shape(10, 10),),
    head=Shape(10, 100),
    weight_bytes=2200,
    kv_bytes_per_token=8,
    attention_flops_per_pair=6,
)
LIMITS = Limits({1: 50.0, 2: 100.0}, {Shape(10, 10): 4000.0, Shape(9, 9): 1000.0})


def test_a_step_is_as_long_as_what_bounds_it() -> None:
    """One sequence reads weights longer than it computes; many compute longer; attention comes on top."""
    one = StepSample(StepWork(1, 50, 0, 0, 0), 44.0)
    assert least_s(SIZE, LIMITS, one) == 22.0 + 4.0
    many = StepSample(StepWork(100, 0, 0, 0, 0), 1.0)
    assert least_s(SIZE, LIMITS, many) == 2 * 1100 * 100 / 4000


def test_shares_are_of_the_highest_rates() -> None:
    """Of the median step's bytes, of its least time, and of all of a prompt's operations."""
    one = StepWork(1, 50, 0, 0, 0)
    single = [StepSample(one, seconds) for seconds in (99.0, 52.0, 1.0)]
    batch = [StepSample(one, 52.0)]
    chunk = StepSample(StepWork(0, 0, 1, 100, 1000), 10.0)
    found = shares_of(SIZE, LIMITS, Steps(single, batch, [chunk, replace(chunk, duration_s=6.0)]))
    assert found["decode_b1_bandwidth_share"] == (2200 + 400) / 52 / 100
    assert found["decode_b32_roofline_share"] == 0.5
    flops = 2 * (100 * 100 + 1000) + 6 * 1000
    assert found["prefill_2048_flop_share"] == pytest.approx(2 * flops / 16 / 4000)
    assert found["decode_b1_ms"] == 52_000.0 and found["prefill_2048_ms"] == 16_000.0


def test_a_profile_s_shares_are_of_the_whole_step() -> None:
    """Also of what is not shown."""
    lines = profile_table("decode", {"multiply": 6.0, "add": 3.0, "copy": 1.0}, num_shown=2).splitlines()
    assert lines[0] == "decode: 10.00 ms a step"
    assert [line.split() for line in lines[1:]] == [
        ["multiply", "6.000", "ms", "60.0%"],
        ["add", "3.000", "ms", "30.0%"],
    ]


def test_limits_are_measured_for_each_number_of_threads_and_each_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a large shape beside the model's own."""
    monkeypatch.setattr(limits, "_STREAM_BYTES", 1 << 12)
    monkeypatch.setattr(limits, "_LARGE", Shape(16, 16))
    monkeypatch.setattr(limits, "_GEMM_S", 0.0)
    found = measure_limits(1, [Shape(8, 4), Shape(8, 4)])
    assert list(found.memory_by_threads) == [1] and list(found.gemm_by_shape) == [Shape(8, 4), Shape(16, 16)]
    assert found.memory > 0 and found.gemm == max(found.gemm_by_shape.values())


@pytest.mark.thorough
def test_bench_roofline_gives_its_keys(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits, our shares, each round, and where the time goes."""
    monkeypatch.setattr(limits, "_STREAM_BYTES", 1 << 20)
    file = tmp_path / "found.json"
    argv = ["--model", str(tiny_model_dir), "--threads", "1", "--rounds", "2", "--context", "32", "--profile"]
    assert command.main([*argv, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    keys = ("decode_b1_bandwidth_share", "decode_b32_roofline_share", "prefill_2048_flop_share")
    assert all(found[key] > 0 for key in ("memory_gb_s", "bf16_gflop_s", *keys))
    assert len(found["rounds"]) == 2
    assert set(found["profile"]) == {"decode_b1", "decode_b8", "decode_b32", "chunk_512"}
    assert all(sum(by_name.values()) > 0 for by_name in found["profile"].values())
