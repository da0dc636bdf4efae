"""Each kernel beside its plain form, on whatever device the tensors are: how far apart they are, and whether that is allowed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.kv_layout import BlockId, KVLayout, LayerKV
from paceline.core.request import RequestId, SamplingParams, SequenceId
from paceline.engine.attention import AttentionContext, AttentionRules, attend_by_sequence
from paceline.engine.device import Device
from paceline.engine.forward_batch import ForwardBatch, build_forward_batch
from paceline.engine.kernels.triton.block_copies import gather_blocks, scatter_blocks
from paceline.engine.kernels.triton.layer_views import LayerViews
from paceline.engine.kernels.triton.paged_attention import StepTables, paged_attention
from paceline.engine.kernels.triton.sampling import choose_tokens
from paceline.engine.kernels.triton.write_kv import write_kv
from paceline.engine.kv_cache import KVCache
from paceline.engine.sampler import choose_tokens as choose_plainly
from paceline.engine.step import SampleTask, ScheduledSequence, SchedulerOutput

BLOCK_SIZE = 16
# Largest difference of an answer whose elements are about 1, by what it is computed in.
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
DECODES = ((1, 1), (1, 17), (1, 300), (1, 700))
CHUNKS = ((33, 33), (5, 90), (17, 300))
_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Check:
    """One kernel, on one kind of input."""

    name: str
    difference: float
    allowed: float

    @property
    def passed(self) -> bool:
        """What is no number is as far away as can be."""
        return self.difference <= self.allowed


def run_checks(device: Device, dtype: str) -> Iterator[Check]:
    """All of them, one after the other."""
    with torch.inference_mode(), device.entered():
        for head_dim in (64, 128):
            for kv_dtype in (dtype, "int8", "fp8"):
                layer = LayerKV(2, head_dim, head_dim)
                yield _attention(f"decode, {head_dim}, {kv_dtype}", layer, kv_dtype, dtype, DECODES, device)
                yield _attention(f"chunks, {head_dim}, {kv_dtype}", layer, kv_dtype, dtype, CHUNKS, device)
                yield _stored(f"stored, {head_dim}, {kv_dtype}", layer, kv_dtype, dtype, device)
        windowed = LayerKV(2, 64, 64, window=100, num_sink_tokens=4)
        yield _attention("decode, window", windowed, dtype, dtype, DECODES, device)
        yield _attention("chunks, window", windowed, dtype, dtype, CHUNKS, device)
        yield _moved(device)
        yield _chosen(device)


def filled(
    layer: LayerKV, kv_dtype: str, dtype: str, parts: tuple[tuple[int, int], ...], device: Device
) -> tuple[KVCache, ForwardBatch]:
    """A pool in which the contexts of sequences lie, and a step of their last tokens."""
    items, first = [], 0
    for index, (length, context) in enumerate(parts):
        num_blocks = -(-context // BLOCK_SIZE)
        table = tuple(BlockId(first + ordinal) for ordinal in range(num_blocks))
        sequence_id = SequenceId(RequestId("check"), index)
        items.append(ScheduledSequence(sequence_id, (0,) * length, context - length, (table,)))
        first += num_blocks
    cache = KVCache(KVLayout((layer,), BLOCK_SIZE, kv_dtype), first, device=device)
    slots = torch.arange(first * BLOCK_SIZE, device=device.place)
    keys, values = (
        torch.randn(len(slots), layer.num_kv_heads, dim, device=device.place).to(_TORCH[dtype])
        for dim in (layer.key_dim, layer.value_dim)
    )
    cache.write_tokens(0, slots, keys, values)
    return cache, build_forward_batch(SchedulerOutput(tuple(items), ()), BLOCK_SIZE)


def attention_call(
    cache: KVCache, batch: ForwardBatch, query: Tensor, rules: AttentionRules, device: Device
) -> Callable[[], Tensor]:
    """The kernels' answer, [num_tokens, num_heads, value_dim]; what a step makes once is made."""
    tables, views = StepTables.of(batch.queries, 0, device.place), LayerViews.of(cache, 0)
    return lambda: paged_attention(query, views, tables, rules)


def _attention(
    name: str,
    layer: LayerKV,
    kv_dtype: str,
    dtype: str,
    parts: tuple[tuple[int, int], ...],
    device: Device,
) -> Check:
    torch.manual_seed(0)
    cache, batch = filled(layer, kv_dtype, dtype, parts, device)
    query = torch.randn(len(batch.token_ids), 3 * layer.num_kv_heads, layer.key_dim, device=device.place)
    query = query.to(_TORCH[dtype])
    rules = AttentionRules(layer.key_dim**-0.5, layer.view)
    found = attention_call(cache, batch, query, rules, device)()
    # The plain form in float32, which rounds nothing on the way.
    exact = query.float().transpose(0, 1).unsqueeze(0)
    expected = attend_by_sequence(AttentionContext(cache, batch), 0, rules, exact, exact, exact)[0]
    return Check(name, float((found.float() - expected).abs().max()), TOLERANCE[dtype])


def _stored(name: str, layer: LayerKV, kv_dtype: str, dtype: str, device: Device) -> Check:
    """Bit for bit: so many bytes differ."""
    torch.manual_seed(0)
    layout = KVLayout((layer,), BLOCK_SIZE, kv_dtype)
    ours, plain = KVCache(layout, 8, device=device), KVCache(layout, 8, device=device)
    slots = torch.randperm(8 * BLOCK_SIZE)[:50].to(device.place)
    keys, values = (
        torch.randn(50, layer.num_kv_heads, layer.key_dim, device=device.place).to(_TORCH[dtype])
        for _ in range(2)
    )
    write_kv(LayerViews.of(ours, 0), slots, keys, values)
    plain.write_tokens(0, slots, keys, values)
    return Check(name, float((ours.blocks != plain.blocks).sum()), 0)


def _moved(device: Device) -> Check:
    pool, other = (torch.randint(0, 256, (9, 9000), dtype=torch.uint8).to(device.place) for _ in range(2))
    ids, elsewhere = (torch.tensor(each, device=device.place) for each in ([7, 0, 3], [1, 8, 2]))
    scatter_blocks(other, elsewhere, gather_blocks(pool, ids))
    return Check("blocks moved", float((other[elsewhere] != pool[ids]).sum()), 0)


def _chosen(device: Device) -> Check:
    """The same tokens: so many differ."""
    torch.manual_seed(0)
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02),
    ]
    tasks = [SampleTask(replace(params[row % 3], seed=row)) for row in range(24)]
    logits = (torch.randn(len(tasks), 4000) * 3).to(device.place)
    positions = range(len(tasks))
    ours, plain = (choose(logits, tasks, positions) for choose in (choose_tokens, choose_plainly))
    return Check("tokens chosen", float((ours != plain).sum()), 0)
