"""Exact attention is attention, and alike for a token however its context was computed."""

import pytest
import torch
from torch import Tensor

from paceline.core.kv_layout import KVLayout, LayerKV, View
from paceline.engine.attention import AttentionRules, attend
from paceline.engine.exact.attention import exact_attention, geometry_of
from paceline.engine.exact.plan import make_plans
from paceline.engine.forward_batch import ForwardBatch, QueryRange
from paceline.engine.kv_cache import KVCache

HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, BLOCK_SIZE = 6, 2, 16, 12, 8
CONTEXT = 300  # three splits, the last one not full
RULES = {
    "plain": AttentionRules(0.3),
    "window": AttentionRules(0.3, View(20)),
    "long window": AttentionRules(0.3, View(200)),
    "window behind sinks": AttentionRules(0.3, View(20, 10)),
    "window behind many sinks": AttentionRules(0.3, View(20, 140)),
    "soft cap": AttentionRules(0.3, softcap=0.5),
    "sinks": AttentionRules(0.3, View(50), sinks=torch.linspace(-1, 1, HEADS)),
}


class _Memory:
    """A context in blocks that lie anywhere, amid what is no number."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        layout = KVLayout((LayerKV(KV_HEADS, KEY_DIM, VALUE_DIM),), BLOCK_SIZE, "float32")
        self.cache = KVCache(layout, num_blocks=50)
        for memory in (self.cache.keys[0], self.cache.values[0]):
            memory.fill_(float("nan"))
        self.table = torch.randperm(50, generator=torch.Generator().manual_seed(seed + 7))[
            : -(-CONTEXT // BLOCK_SIZE)
        ]
        self.query = torch.randn(CONTEXT, HEADS, KEY_DIM, generator=torch.Generator().manual_seed(1))
        generator = torch.Generator().manual_seed(2)
        self.keys = torch.randn(CONTEXT, KV_HEADS, KEY_DIM, generator=generator)
        self.values = torch.randn(CONTEXT, KV_HEADS, VALUE_DIM, generator=generator)
        slots = torch.tensor(
            [int(self.table[i // BLOCK_SIZE]) * BLOCK_SIZE + i % BLOCK_SIZE for i in range(CONTEXT)]
        )
        self.cache.write_tokens(0, slots, self.keys, self.values)

    def attend(self, parts: list[tuple[int, int]], rules: AttentionRules) -> list[Tensor]:
        """The tokens [from, to) of each part, all of them in one batch."""
        queries, first = [], 0
        for start, end in parts:
            table = self.table[: -(-end // BLOCK_SIZE)]
            queries.append(QueryRange(first, first + end - start, end, (table,)))
            first += end - start
        empty = torch.empty(0)
        batch = ForwardBatch(empty, empty, (empty,), tuple(queries), empty, (), (), empty, ())
        geometry = geometry_of(self.cache, 0, HEADS)
        plans = make_plans(batch, geometry, 0, rules.view)
        rows = torch.cat([self.query[start:end] for start, end in parts])
        out = exact_attention(self.cache, 0, rows, plans, geometry, rules)
        return [out[query.first : query.last] for query in queries]


@pytest.mark.parametrize("name", RULES)
def test_exact_attention_is_attention(name: str) -> None:
    """A chunk and a decode have the values of the reference, though the rest of the memory holds no numbers."""
    memory, rules = _Memory(0), RULES[name]
    for start, end in ((0, CONTEXT), (250, CONTEXT), (CONTEXT - 1, CONTEXT), (100, 133), (5, 6)):
        (out,) = memory.attend([(start, end)], rules)
        expected = attend(
            memory.query[start:end].transpose(0, 1),
            memory.keys[:end].transpose(0, 1),
            memory.values[:end].transpose(0, 1),
            rules,
        )
        torch.testing.assert_close(out, expected.transpose(0, 1), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", RULES)
def test_a_token_is_alike_however_its_context_was_cut(name: str) -> None:
    """One by one, in chunks of any size, beside others, in other blocks: the same bits."""
    rules = RULES[name]
    (whole,) = _Memory(0).attend([(0, CONTEXT)], rules)
    memory = _Memory(3)
    for step in (1, 7, 33, 130):
        cuts = [(start, min(start + step, CONTEXT)) for start in range(0, CONTEXT, step)]
        assert torch.equal(torch.cat([memory.attend([cut], rules)[0] for cut in cuts]), whole)
        assert torch.equal(torch.cat(memory.attend(cuts, rules)), whole)


def test_the_reference_depends_on_the_cut() -> None:
    """The attention of fast mode gives other bits when a prompt comes in chunks: the test above can fail."""
    memory = _Memory(0)
    keys, values = memory.keys.transpose(0, 1), memory.values.transpose(0, 1)
    query = memory.query.transpose(0, 1)
    whole = attend(query, keys, values, RULES["plain"])
    parts = [
        attend(query[:, i : i + 1], keys[:, : i + 1], values[:, : i + 1], RULES["plain"])
        for i in range(CONTEXT)
    ]
    assert not torch.equal(torch.cat(parts, 1), whole)
