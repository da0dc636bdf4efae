"""Weights in fewer bits: which layers have them, how far a model goes from what it was, and that it still gives the same tokens on every path."""

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from transformers import PreTrainedModel

from paceline.core.errors import ConfigError, FingerprintMismatchError
from paceline.engine.conformance.architectures import SERVED, build_tiny
from paceline.engine.conformance.matrix import TINY_BLOCK_SIZE
from paceline.engine.conformance.paths import MIN_PROMPT_TOKENS, NUM_OUTPUT_TOKENS, PATHS, Subject, run_path
from paceline.engine.conformance.reference import random_prompt
from paceline.engine.device import Device
from paceline.engine.fusion import PackedLinear, pack_linears
from paceline.engine.kernels.cpu.build import NoKernelError
from paceline.engine.kernels.cpu.int8_linear import native_int8
from paceline.engine.kv_cache import TORCH_DTYPES
from paceline.engine.model_loader import load_model, use_paged_attention
from paceline.engine.model_runner import ModelRunner
from paceline.engine.quantised_linear import Int4Linear, Int8Linear, TorchInt8
from paceline.engine.quantization import quantise_linears, quantised
from paceline.launcher.config import UpConfig
from paceline.worker.config import WorkerConfig
from paceline.worker.runner import load_runner
from tests.engine.whole import whole_reference

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
KINDS = {"w8a8": Int8Linear, "w4a16": Int4Linear}
# How far logits go (relative L2) in tiny random models, where nothing evens errors out; in a mixture another expert may be chosen.
DENSE, MIXTURE = {"w8a8": 0.06, "w4a16": 0.45}, {"w8a8": 0.2, "w4a16": 0.45}
MIXTURES = ("granitemoe", "mimo_v2_flash", "phimoe")
# One product, by the same measure.
ONE_LAYER = {"w8a8": 0.02, "w4a16": 0.1}


# -- one layer


def _linear(in_features: int, out_features: int, dtype: torch.dtype, *, has_bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(in_features, out_features, bias=has_bias, dtype=dtype)
    return linear.requires_grad_(requires_grad=False)


def _only(linear: nn.Module, quantization: str) -> nn.Module:
    """What becomes of it in a model of one layer."""
    model = nn.Sequential(linear)
    quantise_linears(model, quantization)  # type: ignore[arg-type] # any module will do
    return model[0]


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("quantization", KINDS)
@pytest.mark.parametrize("dtype", TORCH_DTYPES.values())
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_gives_nearly_what_it_gave(quantization: str, dtype: torch.dtype, has_bias: bool) -> None:
    """In the type that it had, for one row, for many and for rows that lie apart; and whoever looks sees nearly the weight."""
    linear = _linear(96, 64, dtype, has_bias=has_bias)
    few = _only(copy.deepcopy(linear), quantization)
    assert type(few) is KINDS[quantization]
    for rows in (torch.randn(96), torch.randn(2, 40, 96), torch.randn(96, 7).t(), torch.randn(0, 96)):
        found, expected = few(rows.to(dtype)), linear(rows.to(dtype))
        assert (found.dtype, found.shape) == (dtype, expected.shape)
        assert not len(rows) or _distance(found, expected) < ONE_LAYER[quantization]
    weight = few.weight
    assert isinstance(weight, torch.Tensor)
    assert weight.dtype == dtype
    assert _distance(weight, linear.weight) < ONE_LAYER[quantization]


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values())
def test_a_row_of_4_bits_is_the_same_in_any_company(dtype: torch.dtype) -> None:
    """Of 8 bits the kernel's own tests say it."""
    few, rows = _only(_linear(96, 64, dtype), "w4a16"), torch.randn(70, 96).to(dtype)
    alone = torch.cat([few(row[None]) for row in rows])
    for num_rows in (1, 2, 5, 17, 70):
        assert torch.equal(few(rows[:num_rows]), alone[:num_rows])


def test_4_bits_need_shapes_that_torch_multiplies() -> None:
    """Channels in sixteens, features in thirty-twos; others stay, and are counted."""
    model = nn.Sequential(*(_linear(*shape, torch.float32) for shape in ((32, 16), (32, 17), (33, 16))))
    with capture_logs() as logs:
        quantise_linears(model, "w4a16")  # type: ignore[arg-type] # any module will do
    assert [type(child) for child in model] == [Int4Linear, nn.Linear, nn.Linear]
    counts = {"quantization": "w4a16", "num_layers": 1, "num_left": 2}
    assert logs == [{"event": "weights_quantised", "log_level": "info", **counts}]


def test_what_chooses_experts_and_what_others_have_hooked_into_stay() -> None:
    """So do embeddings, also one whose weight the last layer shares."""

    class Model(nn.Module):
        """What models are made of."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(32, 64), nn.Linear(64, 32, bias=False)
            self.head.weight = self.embedding.weight
            self.gate, self.hooked, self.packed = nn.Linear(64, 4), nn.Linear(64, 64), nn.Linear(64, 64)
            self.hooked.register_forward_hook(lambda _module, _inputs, output: output + 1)

    model = Model().requires_grad_(requires_grad=False)
    model.packed = PackedLinear(model.packed)  # type: ignore[assignment] # it stands for one
    before = model.embedding.weight.clone()
    quantise_linears(model, "w8a8")  # type: ignore[arg-type] # any module will do
    kinds = {name: type(child) for name, child in model.named_children()}
    plain = {"embedding": nn.Embedding, "gate": nn.Linear, "hooked": nn.Linear}
    assert kinds == {**plain, "head": Int8Linear, "packed": Int8Linear}
    assert torch.equal(model.embedding.weight, before)


# -- models


@cache
def _tiny(name: str) -> PreTrainedModel:
    return build_tiny(name)


@torch.inference_mode()
def _require_near(name: str, quantization: str) -> None:
    model = copy.deepcopy(_tiny(name))
    pack_linears(model)
    assert quantise_linears(model, quantization) > 0
    expected, found = (each(IDS, use_cache=False).logits for each in (_tiny(name), model))
    assert _distance(found, expected) < (MIXTURE if name in MIXTURES else DENSE)[quantization]


@pytest.mark.parametrize("quantization", KINDS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mixtral", "qwen2_moe"])
def test_a_model_gives_nearly_what_it_gave(name: str, quantization: str) -> None:
    """Plain; with windows; without linear layers but the last; mixtures, whose experts stay as they are."""
    _require_near(name, quantization)


@pytest.mark.thorough
@pytest.mark.parametrize("quantization", KINDS)
@pytest.mark.parametrize("name", [name for name in SERVED if not name.endswith("_latent")])
def test_every_architecture_gives_nearly_what_it_gave(name: str, quantization: str) -> None:
    """By its own attention; none is refused."""
    _require_near(name, quantization)


@cache
def _subject(name: str, quantization: str) -> Subject:
    """A tiny model whose reference is itself: each prompt computed whole, with the same weights."""
    model = build_tiny(name)
    layout = use_paged_attention(model, "float32", TINY_BLOCK_SIZE)
    quantise_linears(model, quantization)
    runner = ModelRunner(model, layout, layout.num_blocks_for(MIN_PROMPT_TOKENS + NUM_OUTPUT_TOKENS))
    lengths = (MIN_PROMPT_TOKENS, 2 * TINY_BLOCK_SIZE - 1, 2 * TINY_BLOCK_SIZE - 1)
    long, *short = (
        whole_reference(
            runner, layout, random_prompt(model.config.vocab_size, length, seed), NUM_OUTPUT_TOKENS
        )
        for seed, length in enumerate(lengths)
    )
    return Subject(model, layout, long, (short[0], short[1]))


@pytest.mark.thorough
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("quantization", KINDS)
def test_every_path_gives_the_tokens_of_the_whole_prompt(quantization: str, path: str) -> None:
    """Chunks, batches, prefix hits, preemption, hand-over: no greedy token differs, and logits by rounding that turns few steps."""
    subject = _subject("llama", quantization)
    result = run_path(subject, path)
    assert result.num_tokens > 0
    assert result.num_wrong_tokens == 0
    assert result.max_difference <= 0.05 * float(subject.long.logits.std())


# -- loading


def test_without_a_compiler_torch_computes_the_same(
    monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path
) -> None:
    """The log says so; it is slower, and workers with and without it belong together."""
    try:
        native_int8()
    except NoKernelError as error:
        pytest.skip(str(error))
    models = [quantised(load_model(tiny_model_dir, "bfloat16", 16, attention="torch"), "w8a8")]
    monkeypatch.setenv("CXX", "no-such-compiler")
    with capture_logs() as logs:
        models.append(quantised(load_model(tiny_model_dir, "bfloat16", 16, attention="torch"), "w8a8"))
    warnings = [(line["event"], "no-such-compiler" in line["reason"]) for line in logs if "reason" in line]
    assert warnings == [("no_native_int8", True)]
    layers = [each for each in models[1].model.modules() if isinstance(each, Int8Linear)]
    assert {type(each._product) for each in layers} == {TorchInt8}
    assert models[0].fingerprint == models[1].fingerprint
    for each in models:
        each.model.set_attn_implementation("eager")
    with torch.inference_mode():
        first, second = (each.model(IDS, use_cache=False).logits for each in models)
    assert torch.equal(first, second)


@pytest.mark.parametrize("quantization", KINDS)
def test_a_worker_loads_it_and_says_so_in_its_fingerprint(quantization: str, tiny_model_dir: Path) -> None:
    """Whose weights have other bits is refused: what is computed with them is other KV."""
    settings = {"model": str(tiny_model_dir), "dtype": "float32", "threads": 1, "num_blocks": 64}
    plain, few = (
        load_runner(WorkerConfig(**settings, quantization=each))  # type: ignore[arg-type] # each has its field's type
        for each in ("none", quantization)
    )
    assert plain.fingerprint.quantization == "none"
    with pytest.raises(FingerprintMismatchError, match="quantization"):
        plain.fingerprint.require_same_content(few.fingerprint)


def test_on_a_gpu_it_is_refused(tiny_model_dir: Path) -> None:
    """There would be nothing to multiply with; who asks is told so, and what was loaded is as it was."""
    loaded = load_model(tiny_model_dir, "float32", 16)
    elsewhere = replace(loaded, device=Device(torch.device("meta")))
    with pytest.raises(
        ConfigError, match="--quantization w8a8 is for CPUs, and this worker computes on meta"
    ):
        quantised(elsewhere, "w8a8")
    assert not any(isinstance(each, Int8Linear) for each in loaded.model.modules())
    assert quantised(elsewhere, "none") is elsewhere


@torch.inference_mode()
def test_layers_that_are_computed_together_have_few_bits_too(tiny_model_dir: Path) -> None:
    """Where decoder layers are fused the joined products are replaced, and give what each gives apart."""
    joined, apart = (
        quantised(load_model(tiny_model_dir, "float32", 16, attention=attention), "w8a8")
        for attention in ("auto", "torch")
    )
    names = [name for name, each in joined.model.named_modules() if isinstance(each, Int8Linear)]
    if not any(name.endswith("qkv_proj") for name in names):
        pytest.skip("there is no compiler")
    assert len(names) == 4 * joined.model.config.num_hidden_layers + 1
    prompt = random_prompt(joined.vocab_size, 40, 0)
    found, expected = (
        whole_reference(ModelRunner(each.model, each.layout, 8), each.layout, prompt, 4).logits
        for each in (joined, apart)
    )
    assert _distance(found, expected) < DENSE["w8a8"] / 2


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"exactness": "exact"}, "--quantization w8a8 is for fast mode"),
        ({"runner": "fake"}, "--quantization w8a8 needs --runner torch"),
        ({"tp": 2}, "--quantization w8a8 is for one process: leave --tp 2 out"),
        ({"pp": 2}, "--quantization w8a8 is for one process: leave --pp 2 out"),
    ],
)
def test_what_does_not_go_with_it_is_refused(settings: dict[str, object], why: str) -> None:
    """By a worker and by ./run up, before anything is loaded."""
    with pytest.raises(ConfigError, match=why):
        WorkerConfig(model="somewhere", quantization="w8a8", **settings)  # type: ignore[arg-type] # each has its field's type
    with pytest.raises(ConfigError, match=why):
        UpConfig(quantization="w8a8", **settings)  # type: ignore[arg-type] # the same
