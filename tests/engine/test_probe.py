"""What a model shows about its layers in one short pass."""

import pytest
import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModelError
from paceline.core.kv_layout import KVLayout, LayerKV, View
from paceline.engine.conformance.architectures import WINDOW, build_tiny
from paceline.engine.probe import MaskFunction, probe_layers, view_of


def _layers(name: str, max_tokens: int = 256) -> tuple[LayerKV, ...]:
    return probe_layers(build_tiny(name), max_tokens)


def test_layers_have_their_own_heads_sizes_and_windows() -> None:
    """Nothing is taken from the configuration: what differs between layers, or between keys and values, is seen."""
    assert _layers("mimo_v2_flash") == (LayerKV(4, 16, 12, WINDOW), LayerKV(2, 16, 12))
    assert _layers("deepseek_v3") == (LayerKV(4, 24, 12),) * 2
    assert _layers("gpt_bigcode") == (LayerKV(1, 8, 8),) * 2


def test_a_window_that_only_the_mask_has_is_seen() -> None:
    """The call's own argument does not count: this model passes none."""
    assert [layer.window for layer in _layers("qwen2_moe")] == [WINDOW, None]


def test_a_window_as_long_as_any_context_is_none() -> None:
    """It hides nothing, so it changes neither layout nor attention."""
    assert [layer.window for layer in _layers("mistral", WINDOW)] == [None, None]
    assert [layer.window for layer in _layers("mistral", WINDOW + 1)] == [WINDOW, WINDOW]


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_a_layer_that_reads_the_keys_of_another_stores_none(name: str) -> None:
    """It is known by the tensors that it shows, and takes no memory."""
    layers = _layers(name)
    assert [layer.shared_with for layer in layers] == [None, None, 0, 1]
    layout = KVLayout(layers, block_size=8, dtype="float32")
    assert [layout.layer_bytes(layer) > 0 for layer in layers] == [True, True, False, False]


def test_a_model_that_fails_in_a_ragged_pass_is_refused() -> None:
    """Whatever it raises becomes a refusal that names the model and says it on one line."""
    model = build_tiny("llama")
    model.model.layers[1].self_attn.o_proj = torch.nn.Linear(3, 3)
    with pytest.raises(UnsupportedModelError, match=r"^LlamaForCausalLM cannot run .*RuntimeError: [^\n]*$"):
        probe_layers(model, 256)


def test_a_layer_without_a_causal_mask_is_refused() -> None:
    """A model that looks ahead is one whose mask shows it."""
    model = build_tiny("llama")
    model.config.is_causal = False
    with pytest.raises(
        UnsupportedModelError, match=r"LlamaForCausalLM has an attention mask in layer 0 .*ahead"
    ):
        probe_layers(model, 256)


def _causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def _window(size: int) -> MaskFunction:
    return lambda _batch, _head, query, key: (key <= query) & (key > query - size)


def _with_sinks(mask: MaskFunction, num_sink_tokens: int) -> MaskFunction:
    return lambda batch, head, query, key: (
        mask(batch, head, query, key) | ((key < num_sink_tokens) & (key <= query))
    )


def _chunks(size: int) -> MaskFunction:
    return lambda _batch, _head, query, key: (key <= query) & (key // size == query // size)


@pytest.mark.parametrize("size", [1, 2, 7, 31])
def test_a_window_is_read_from_its_mask(size: int) -> None:
    """Its size is how many tokens a query far behind sees; all of them is none. Sinks are the first, seen by all."""
    assert view_of(_window(size), 32) == View(size)
    assert view_of(_window(size + 32), 32) == View()
    assert view_of(_causal, 32) == View()
    for num_sink_tokens in range(1, 32 - size):
        mask = _with_sinks(_window(size), num_sink_tokens)
        assert view_of(mask, 32) == View(size, num_sink_tokens)
    assert view_of(_with_sinks(_window(size), 32 - size), 32) == View()


@pytest.mark.parametrize(
    "mask",
    [
        _chunks(8),
        _chunks(31),
        lambda _batch, _head, query, key: (key % 4 == 0) | (key > query - 8) & (key <= query),
        lambda _batch, _head, query, key: key <= query + 1,
        lambda _batch, _head, query, key: key < query,
    ],
    ids=["chunks", "a-chunk-begins-last", "first-tokens-stay", "looks-ahead", "not-itself"],
)
def test_any_other_mask_is_not_a_window(mask: MaskFunction) -> None:
    """Chunks, gaps and looking ahead are no windows, whatever a single query sees."""
    with pytest.raises(ValueError, match=r"gaps|chunks"):
        view_of(mask, 32)
