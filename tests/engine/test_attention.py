"""Attention over paged context against its definition."""

import math

import pytest
import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModelError
from paceline.core.kv_layout import LayerKV, View
from paceline.engine.attention import AttentionRules, attend, read_rules

LAYER = LayerKV(2, key_dim=16, value_dim=16)


def _by_definition(query: Tensor, keys: Tensor, values: Tensor, rules: AttentionRules) -> Tensor:
    """Each query looks at each key it may see, one by one."""
    num_heads, num_queries, _ = query.shape
    context, group = keys.shape[1], num_heads // keys.shape[0]
    out = torch.empty(num_heads, num_queries, values.shape[2])
    for head in range(num_heads):
        for row in range(num_queries):
            position = context - num_queries + row
            first = rules.view.first_visible(position)
            seen = [*range(min(first, rules.view.num_sink_tokens)), *range(first, position + 1)]
            logits = [float(query[head, row] @ keys[head // group, k]) * rules.scaling for k in seen]
            if rules.softcap is not None:
                logits = [math.tanh(x / rules.softcap) * rules.softcap for x in logits]
            total = sum(math.exp(x) for x in logits)
            if rules.sinks is not None:
                total += math.exp(float(rules.sinks[head]))
            weights = [math.exp(x) / total for x in logits]
            out[head, row] = sum(
                (w * values[head // group, k] for w, k in zip(weights, seen, strict=True)),
                torch.zeros(values.shape[2]),
            )
    return out


@pytest.mark.parametrize("num_queries", [1, 3, 9])
@pytest.mark.parametrize("window", [None, 1, 4, 9, 20])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_equals_its_definition(
    num_queries: int, window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    """Grouped heads, a value size of its own, windows, soft caps and sinks, for a chunk, a decode and a whole prompt."""
    torch.manual_seed(num_queries)
    query, keys, values = torch.randn(4, num_queries, 8), torch.randn(2, 9, 8), torch.randn(2, 9, 6)
    sinks = torch.randn(4) if with_sinks else None
    rules = AttentionRules(0.3, View(window), softcap, sinks)
    expected = _by_definition(query, keys, values, rules)
    torch.testing.assert_close(attend(query, keys, values, rules), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_queries", [1, 2, 4])
@pytest.mark.parametrize("num_sink_tokens", [1, 3])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_what_nobody_sees_between_sinks_and_window_may_be_left_out(
    num_queries: int, num_sink_tokens: int, softcap: float | None
) -> None:
    """The sinks and the window alone give what the whole context gives."""
    torch.manual_seed(num_queries)
    query, keys, values = torch.randn(4, num_queries, 8), torch.randn(2, 12, 8), torch.randn(2, 12, 6)
    rules = AttentionRules(0.3, View(3, num_sink_tokens), softcap)
    expected = _by_definition(query, keys, values, rules)
    torch.testing.assert_close(attend(query, keys, values, rules), expected, atol=1e-5, rtol=0)
    first = rules.view.first_visible(12 - num_queries)
    there = [*range(num_sink_tokens), *range(first, 12)]
    out = attend(query, keys[:, there], values[:, there], rules, num_left_out=12 - len(there))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


def test_what_a_layer_asks_for_is_honoured() -> None:
    """Scaling, soft cap and sinks are read, under both names of the last one; scaling has a default."""
    sinks = torch.zeros(2)
    rules = read_rules(LAYER, {"scaling": 0.5, "softcap": 2.0, "s_aux": sinks, "dropout": 0.0}, 16)
    assert (rules.scaling, rules.softcap) == (0.5, 2.0)
    assert rules.sinks is sinks
    assert read_rules(LAYER, {"sinks": sinks}, 16).sinks is sinks
    assert read_rules(LAYER, {"softcap": None, "use_cache": False}, 16) == AttentionRules(0.25)


def test_the_window_is_the_layer_s_own() -> None:
    """What the call says about it does not count: the layer's mask was asked."""
    windowed = LayerKV(2, key_dim=16, value_dim=16, window=4)
    assert read_rules(windowed, {}, 16).view.window == 4
    assert read_rules(windowed, {"sliding_window": 9}, 16).view.window == 4
    assert read_rules(LAYER, {"sliding_window": 9}, 16).view.window is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("dropout", 0.1), ("position_bias", 1.0), ("is_causal", False), ("a_new_trick", 1)],
)
def test_what_is_not_honoured_is_refused(name: str, value: float) -> None:
    """An argument that we do not know is never ignored, and is named; the same without a value asks for nothing."""
    assert read_rules(LAYER, {name: None if name != "dropout" else 0.0}, 16) == AttentionRules(0.25)
    with pytest.raises(UnsupportedModelError):
        read_rules(LAYER, {name: value}, 16)
