"""Which models can be computed in parts."""

from pathlib import Path

import pytest
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig

from paceline.core.errors import ConfigError, UnsupportedModelError
from paceline.core.kv_layout import KVLayout, LayerKV
from paceline.engine.parallel.plan import require_parts, require_place, require_stages, whole_layout


def _llama(num_heads: int, num_kv_heads: int | None) -> PreTrainedConfig:
    return LlamaConfig(
        hidden_size=8 * num_heads, num_attention_heads=num_heads, num_key_value_heads=num_kv_heads
    )


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_parts"), [(4, 2, 2), (9, 3, 3), (8, 8, 8), (8, None, 4), (32, 8, 1)]
)
def test_heads_that_divide_are_taken(num_heads: int, num_kv_heads: int | None, num_parts: int) -> None:
    """Each part has as many heads, and as many KV heads, as any other."""
    require_parts(_llama(num_heads, num_kv_heads), num_parts)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_parts", "what_fits"),
    [(9, 3, 2, "--tp 1 or 3$"), (4, 1, 2, "--tp 1$"), (32, 8, 16, "--tp 1 or 2 or 4 or 8$")],
)
def test_heads_that_do_not_divide_are_refused_with_what_would_fit(
    num_heads: int, num_kv_heads: int, num_parts: int, what_fits: str
) -> None:
    """No KV head is kept twice, and none is cut."""
    with pytest.raises(ConfigError, match=what_fits):
        require_parts(_llama(num_heads, num_kv_heads), num_parts)


def test_an_architecture_that_nobody_has_compared_is_refused() -> None:
    """Its plan may be wrong, and would say nothing of it."""
    with pytest.raises(UnsupportedModelError, match="bloom are served by one process only"):
        require_parts(AutoConfig.for_model("bloom"), 2)


def test_a_model_is_judged_by_its_directory(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Before anything of it is loaded."""
    require_place(tiny_model_dir, tp=2, pp=1)
    with pytest.raises(ConfigError, match=r"--tp 1 or 2$"):
        require_place(tiny_model_dir, tp=3, pp=1)
    with pytest.raises(ConfigError, match="cannot read the config"):
        require_place(tmp_path, tp=2, pp=1)


def test_parts_make_up_whole_blocks() -> None:
    """All heads, whatever else a layer has."""
    layers = (LayerKV(2, 8, 4, window=9), LayerKV(1, 8, 4), LayerKV(1, 8, 4, shared_with=1))
    whole = whole_layout(KVLayout(layers, 16, "int8"), 3)
    assert [layer.num_kv_heads for layer in whole.layers] == [6, 3, 3]
    assert whole.layers[0].window == 9
    assert (whole.block_size, whole.dtype, str(whole.part)) == (16, "int8", "0/1")


def test_a_model_has_a_layer_for_each_stage() -> None:
    """And no more stages than layers."""
    require_stages(LlamaConfig(num_hidden_layers=3), 3)
    with pytest.raises(ConfigError, match="has 3 layers"):
        require_stages(LlamaConfig(num_hidden_layers=3), 4)
    with pytest.raises(UnsupportedModelError, match="bloom are served by one process only"):
        require_stages(AutoConfig.for_model("bloom"), 2)
