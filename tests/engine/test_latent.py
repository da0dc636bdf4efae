"""A compact cache of latents: smaller, and only for models that offer one."""

from pathlib import Path

import pytest

from paceline.core.errors import ConfigError, UnsupportedModelError
from paceline.core.kv_layout import LayerKV
from paceline.engine.conformance.architectures import SERVED, WITH_LATENTS, build_tiny
from paceline.engine.model_loader import load_model, max_tokens_of, use_paged_attention
from paceline.engine.probe import probe_layers
from paceline.launcher.config import UpConfig
from paceline.worker.config import WorkerConfig


@pytest.mark.parametrize("name", WITH_LATENTS)
def test_a_latent_is_what_the_layer_offers_to_its_cache(name: str) -> None:
    """One compressed vector of 16 and one rotary part of 8 a token, instead of four heads of 24 and 12."""
    model = build_tiny(name)
    expanded = use_paged_attention(model, "float32", 8)
    latent = use_paged_attention(model, "float32", 8, "latent")
    assert set(latent.layers) == {LayerKV(1, 16, 8, is_latent=True)}
    assert set(expanded.layers) == {LayerKV(4, 24, 12)}
    assert 6 * latent.block_bytes == expanded.block_bytes
    assert latent.digest() != expanded.digest()


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "qwen2_moe"])
def test_a_model_without_latents_is_refused(name: str) -> None:
    """What it offers to a cache is what it attends to: nothing would be saved."""
    model = build_tiny(name)
    with pytest.raises(UnsupportedModelError, match=r"no latents .* --mla expanded"):
        probe_layers(model, max_tokens_of(model), "latent")


def test_exact_mode_is_refused_before_anything_is_loaded() -> None:
    """Whoever asks for both, not only a worker by its settings."""
    with pytest.raises(ConfigError, match="expanded only"):
        load_model(Path("nowhere"), "float32", 8, exactness="exact", mla="latent")


def test_those_with_latents_are_served_without_them_too() -> None:
    """Each row of latents has one of expanded keys and values beside it."""
    assert set(WITH_LATENTS) <= set(SERVED)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"exactness": "exact"}, "--mla expanded only"),
        ({"runner": "fake"}, "needs --runner torch"),
    ],
)
def test_what_does_not_go_with_latents_is_refused(settings: dict[str, str], why: str) -> None:
    """By a worker and by ./run up, before anything is loaded."""
    with pytest.raises(ConfigError, match=why):
        WorkerConfig(model="somewhere", mla="latent", **settings)  # type: ignore[arg-type] # all of them are strings
    with pytest.raises(ConfigError, match=why):
        UpConfig(mla="latent", **settings)  # type: ignore[arg-type] # the same
