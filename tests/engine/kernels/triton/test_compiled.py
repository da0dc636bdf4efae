"""Every kernel compiles for real GPUs, though none is here: down to machine code, with what a program may hold of memory."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from paceline.core.kv_layout import KVLayout, LayerKV
from paceline.core.request import SamplingParams
from paceline.engine.attention import AttentionRules
from paceline.engine.forward_batch import QueryRange
from paceline.engine.kernels.triton.attention_arguments import empty_answer
from paceline.engine.kernels.triton.block_copies import plan_gather, plan_scatter
from paceline.engine.kernels.triton.launch import Launch
from paceline.engine.kernels.triton.layer_views import LayerViews
from paceline.engine.kernels.triton.paged_attention import StepTables, plan_attention
from paceline.engine.kernels.triton.sampling import SamplingRows, plan_sampling
from paceline.engine.kernels.triton.write_kv import plan_write
from paceline.engine.kv_cache import KVCache
from paceline.engine.step import SampleTask
from tests.engine.kernels.triton.checks import HEADS, LATENT

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has nothing to compile"
)

# What a program may have of shared memory on the smaller GPUs of these generations (8.6 and 8.9; 8.0 and 9.0 have more).
MAX_SHARED_BYTES = 99 * 1024
TARGETS = (80, 90)
DTYPES = (torch.bfloat16, torch.float16)

_NAMES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is taken from earlier runs, and nothing left behind."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(launch: Launch, capability: int) -> CompiledKernel:
    """What this call would be compiled to: the same types, constants and known divisors as when it is run."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    divisors: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = _type_of(value)
        number = value.data_ptr() if isinstance(value, Tensor) else value
        if isinstance(number, int) and number % 16 == 0:
            divisors[index,] = [["tt.divisibility", 16]]
    assert set(launch.arguments) == {parameter.name for parameter in launch.kernel.params}
    source = ASTSource(launch.kernel, signature, constants, divisors)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{_NAMES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def require_compiles(launch: Launch, capability: int) -> str:
    """To the assembler's text, which it gives, and to machine code, for that GPU, within its memory."""
    kernel = compiled(launch, capability)
    assert f".target sm_{capability}" in kernel.asm["ptx"]
    assert kernel.asm["cubin"][:4] == b"\x7fELF"
    assert kernel.metadata.shared <= MAX_SHARED_BYTES
    return str(kernel.asm["ptx"])


def views_of(layer: LayerKV, kv_dtype: str, dtype: torch.dtype) -> LayerViews:
    """A layer of a pool that is as small as can be."""
    views = LayerViews.of(KVCache(KVLayout((layer, layer), 16, kv_dtype), 2), 1)
    if kv_dtype != "bfloat16":
        return views
    return LayerViews(layer, views.kv_dtype, views.keys.view(dtype), views.values.view(dtype))


def attention_launches(
    layer: LayerKV,
    kv_dtype: str,
    dtype: torch.dtype,
    group: int = 4,
    *,
    softcap: float | None = None,
    with_sinks: bool = False,
) -> list[Launch]:
    """Both kernels of a decode, and that of a chunk."""
    dim = layer.key_dim + (layer.value_dim if layer.is_latent else 0)
    query = torch.zeros(9, layer.num_kv_heads * group, dim, dtype=dtype)
    rules = AttentionRules(0.125, layer.view, softcap, torch.zeros(query.shape[1]) if with_sinks else None)
    views, table = views_of(layer, kv_dtype, dtype), (torch.ones(44, dtype=torch.int64),)
    # Long enough for several splits: a number that is 1 would be a constant to the compiler.
    tables = StepTables.of([QueryRange(0, 1, 700, table), QueryRange(1, 9, 700, table)], 0, "cpu")
    return [*plan_attention(empty_answer(query, views), query, views, tables, rules)]


@pytest.mark.thorough
@pytest.mark.parametrize(("kv_dtype", "capability"), [("int8", 80), ("bfloat16", 90)])
def test_attention_compiles(kv_dtype: str, capability: int) -> None:
    """For the generations that serve; products by the matrix unit, and tiles loaded ahead of them."""
    split, join, chunk = attention_launches(LayerKV(2, 128, 128), kv_dtype, torch.bfloat16)
    for launch in (split, chunk):
        assembly = require_compiles(launch, capability)
        assert re.search(r"mma[\w.]*\.f32\.bf16\.bf16", assembly)
        assert "cp.async" in assembly
    require_compiles(join, capability)


@pytest.mark.thorough
def test_attention_over_fp8_compiles() -> None:
    """For a generation that knows the type; the kernels read its bits, and need nobody who does."""
    for launch in attention_launches(LayerKV(2, 64, 64), "fp8", torch.bfloat16):
        require_compiles(launch, 90)


@pytest.mark.thorough
def test_attention_with_every_rule_compiles() -> None:
    """Windows, sinks of both kinds and a soft cap, in one."""
    layer = LayerKV(2, 80, 80, window=100, num_sink_tokens=4)
    for launch in attention_launches(layer, "bfloat16", torch.float16, softcap=30.0, with_sinks=True):
        require_compiles(launch, 80)


@pytest.mark.thorough
def test_attention_over_latents_compiles() -> None:
    """With as many heads as DeepSeek has."""
    for launch in attention_launches(LATENT, "bfloat16", torch.bfloat16, 128):
        require_compiles(launch, 90)


def write_launch(layer: LayerKV, kv_dtype: str, dtype: torch.dtype) -> Launch:
    """That of some tokens."""
    keys, values = (
        torch.zeros(3, layer.num_kv_heads, dim, dtype=dtype) for dim in (layer.key_dim, layer.value_dim)
    )
    return plan_write(views_of(layer, kv_dtype, dtype), torch.arange(3), keys, values)


@pytest.mark.parametrize(("kv_dtype", "capability"), [("bfloat16", 80), ("int8", 80), ("fp8", 90)])
def test_writing_compiles(kv_dtype: str, capability: int) -> None:
    """Plain and quantised; quotients are rounded once and small ones kept, as on a CPU."""
    assembly = require_compiles(write_launch(LayerKV(8, 128, 128), kv_dtype, torch.bfloat16), capability)
    quotients = set(re.findall(r"\bdiv\.[\w.]*", assembly))
    assert quotients == (set() if kv_dtype == "bfloat16" else {"div.rn.f32"})
    assert ".ftz" not in assembly


@pytest.mark.thorough
@pytest.mark.parametrize("capability", TARGETS)
def test_sampling_compiles(capability: int) -> None:
    """In double precision."""
    rows = SamplingRows.of([SampleTask(SamplingParams())] * 2, (0, 1), "cpu")
    require_compiles(plan_sampling(torch.zeros(2, 49_152), rows)[1], capability)


@pytest.mark.parametrize("capability", TARGETS)
def test_copying_blocks_compiles(capability: int) -> None:
    """Both ways."""
    pool = torch.zeros(4, 4096, dtype=torch.uint8)
    for plan in (plan_gather, plan_scatter):
        require_compiles(plan(pool, torch.arange(2), torch.zeros(2, 4096, dtype=torch.uint8)), capability)


@pytest.mark.thorough
def test_what_does_not_compile_is_noticed() -> None:
    """The same question fails for a tile that no GPU has room for."""
    (split, _, _) = attention_launches(LayerKV(2, 128, 128), "bfloat16", torch.bfloat16)
    large = Launch(split.kernel, split.grid, {**split.arguments, "tile_tokens": 256}, split.num_warps, 4)
    with pytest.raises(AssertionError):
        require_compiles(large, 80)
    nonsense = Launch(split.kernel, split.grid, {**split.arguments, "head_width": 48}, split.num_warps, 1)
    with pytest.raises(triton.CompilationError):
        compiled(nonsense, 80)


@pytest.mark.slow
@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8"])
@pytest.mark.parametrize(("key_dim", "value_dim"), [*HEADS, (512, 64)])
def test_every_size_compiles(
    capability: int, dtype: torch.dtype, kv_dtype: str, key_dim: int, value_dim: int
) -> None:
    """Attention and writing, for bfloat16 and float16; the last size is that of latents."""
    layer = LATENT if (key_dim, value_dim) == (512, 64) else LayerKV(2, key_dim, value_dim)
    for launch in attention_launches(layer, kv_dtype, dtype):
        require_compiles(launch, capability)
    require_compiles(write_launch(layer, kv_dtype, dtype), capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize(("key_dim", "value_dim"), HEADS)
def test_float32_compiles(capability: int, key_dim: int, value_dim: int) -> None:
    """For whoever compares tokens."""
    for launch in attention_launches(LayerKV(2, key_dim, value_dim), "float32", torch.float32):
        require_compiles(launch, capability)
