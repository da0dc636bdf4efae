"""Loads a model and sees whether it computes here what it computes by itself."""

from dataclasses import replace
from pathlib import Path

from paceline.core.kv_layout import min_blocks
from paceline.engine.device import HOST, Device
from paceline.engine.model_loader import LoadedModel, load_model
from paceline.engine.model_runner import ModelRunner, require_same_as_transformers
from paceline.engine.parallel.place import WHOLE, Place


def load_checked(
    directory: Path,
    dtype: str,
    block_size: int,
    exactness: str = "fast",
    kv_dtype: str = "auto",
    mla: str = "expanded",
    attention: str = "auto",
    *,
    place: Place = WHOLE,
    device: Device = HOST,
) -> LoadedModel:
    """See `load_model`. Where several processes compute a model, all of them have to load it so at the same time."""
    loaded = load_model(
        directory, dtype, block_size, exactness, kv_dtype, mla, attention, place=place, device=device
    )
    # With a cache that rounds nothing: it is the model that is checked.
    plain = replace(loaded.layout, dtype=dtype)
    runner = ModelRunner(loaded.model, plain, min_blocks(plain), heads=place.heads)
    require_same_as_transformers(runner, loaded.model, plain)
    return loaded
