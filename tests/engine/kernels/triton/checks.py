"""What holds of the kernels wherever they run: they give what their plain forms give."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.kv_layout import KVLayout, LayerKV
from paceline.core.request import SamplingParams
from paceline.engine.attention import AttentionRules
from paceline.engine.forward_batch import QueryRange
from paceline.engine.kernels.triton.attention_arguments import RaggedBatch
from paceline.engine.kernels.triton.layer_views import LayerViews
from paceline.engine.kernels.triton.paged_decode import paged_decode
from paceline.engine.kernels.triton.paged_prefill import paged_prefill
from paceline.engine.kernels.triton.sampling import SamplingRows, sample_tokens
from paceline.engine.kernels.triton.write_kv import write_kv
from paceline.engine.kv_cache import KVCache
from paceline.engine.sampler import sample
from paceline.engine.step import SampleTask
from tests.engine.kernels.triton.ragged import FLOAT16, Ragged, copy_on

# How far attention may be off, by how keys and values are stored.
TOLERANCE = {"float32": 2e-5, "int8": 2e-5, "fp8": 2e-5, FLOAT16: 4e-3, "bfloat16": 3e-2}
HEADS = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (576, 512)]
LATENT = LayerKV(1, 512, 64, is_latent=True)
NUM_BLOCKS, BLOCK_SIZE = 5, 8
KINDS_OF_ROWS = (
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=5.0),
    SamplingParams(top_k=1),
    SamplingParams(top_k=40),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.05),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=1.5, top_k=61, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=1e-30, top_p=0.5),
    SamplingParams(temperature=0.7, top_k=10**6, min_p=1.0),
)


def attention_of(
    ragged: Ragged,
    query: Tensor,
    rules: AttentionRules,
    parts: Sequence[QueryRange] = (),
    device: str = "cpu",
) -> Tensor:
    """What the kernel for these sequences gives; rows of others than `parts` are nobody's."""
    batch = RaggedBatch.of(parts or ragged.queries, 0, device)
    kernel = paged_decode if batch.max_tokens == 1 else paged_prefill
    on_device = AttentionRules(
        rules.scaling, rules.view, rules.softcap, None if rules.sinks is None else rules.sinks.to(device)
    )
    _, views = copy_on(ragged.cache, ragged.views, device)
    return kernel(query.to(device), views, batch, on_device).cpu()


def require_attention(
    layer: LayerKV,
    sequences: Sequence[tuple[int, int]],
    group: int,
    kv_dtype: str = "float32",
    *,
    block_size: int = 16,
    softcap: float | None = None,
    with_sinks: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Kernel and `attend` agree on a random pool."""
    ragged = Ragged(layer, kv_dtype, sequences, block_size=block_size, seed=seed)
    num_heads = layer.num_kv_heads * group
    query = ragged.query(num_heads)
    sinks = torch.randn(num_heads) if with_sinks else None
    rules = AttentionRules(query.shape[-1] ** -0.5, layer.view, softcap, sinks)
    found, tolerance = attention_of(ragged, query, rules, device=device), TOLERANCE[kv_dtype]
    torch.testing.assert_close(found.float(), ragged.plain(query, rules), atol=tolerance, rtol=tolerance)


def vectors(num_tokens: int, num_heads: int, dim: int, spread: float = 1.0) -> Tensor:
    """As the model lays them out: [num_tokens, num_heads, dim], heads apart; some much larger than others."""
    sizes = torch.exp(spread * torch.randn(num_heads, num_tokens, 1))
    return (torch.randn(num_heads, num_tokens, dim) * sizes).transpose(0, 1)


def require_stored(layer: LayerKV, kv_dtype: str, keys: Tensor, values: Tensor, device: str = "cpu") -> None:
    """The kernel leaves what `write_tokens` leaves, in the whole pool."""
    layout = KVLayout((LayerKV(1, 3, 5), layer), BLOCK_SIZE, kv_dtype)
    ours, plain = KVCache(layout, NUM_BLOCKS), KVCache(layout, NUM_BLOCKS)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[: len(keys)]
    plain.write_tokens(1, slots, keys, values)
    pool, views = copy_on(ours, LayerViews.of(ours, 1), device)
    write_kv(views, slots.to(device), keys.to(device), values.to(device))
    ours.blocks.view(-1).copy_(pool)
    assert torch.equal(_contents(ours), _contents(plain))


def _contents(cache: KVCache) -> Tensor:
    """All bytes of a cache. A scale that is no number is one, whichever it is."""
    for scales in (*cache.key_scales, *cache.value_scales):
        scales.nan_to_num_(nan=-1.0, posinf=math.inf)
    return cache.blocks.flatten().clone()


def tasks_of(num_rows: int, seed: int = 0) -> list[SampleTask]:
    """Rows of every kind, each with a seed and a candidate of its own."""
    chance, kinds = random.Random(seed), KINDS_OF_ROWS
    return [
        SampleTask(replace(kinds[row % len(kinds)], seed=chance.getrandbits(64)), candidate=row % 3)
        for row in range(num_rows)
    ]


def require_tokens(logits: Tensor, seed: int = 0, device: str = "cpu") -> None:
    """Row by row the tokens that `sample` chooses."""
    tasks, positions = tasks_of(len(logits), seed), range(100, 100 + len(logits))
    found = sample_tokens(logits.to(device), SamplingRows.of(tasks, positions, device))
    assert tuple(found.tolist()) == sample(logits, tasks, positions).token_ids
