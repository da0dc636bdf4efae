"""Runs every path for one model after the other, and keeps what came of it, refusals included."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from paceline.core.errors import UnsupportedModelError
from paceline.core.kv_layout import KVLayout, min_blocks
from paceline.engine.attention import ATTENTION_NAME
from paceline.engine.conformance.architectures import REFUSED, SERVED, WITH_LATENTS, build_tiny
from paceline.engine.conformance.paths import (
    MIN_PROMPT_TOKENS,
    NUM_OUTPUT_TOKENS,
    PATHS,
    TOLERANCE,
    PathResult,
    Subject,
    make_subject,
    run_path,
)
from paceline.engine.fused_layer import fuse_layers
from paceline.engine.model_loader import load_model, use_paged_attention
from paceline.engine.model_runner import ModelRunner, require_same_as_transformers
from paceline.engine.native_attention import NATIVE_NAME

TINY_BLOCK_SIZE = 8  # tokens
_MODEL_BLOCK_SIZE = 16
# The prompt passes a real model's window where no longer one than this is needed.
_MAX_PROMPT_TOKENS = 1200

_LATENT = "_latent"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One model: what its paths gave, or why it is not served."""

    architecture: str
    is_to_be_served: bool = True
    results: tuple[PathResult, ...] = ()
    refusal: str = ""
    # Windows (tokens) that the prompts were too short to pass: nothing is said about them.
    unreached_windows: tuple[int, ...] = ()
    # Bytes of a block that keeps latents beside one that keeps expanded keys and values.
    latent_share: float | None = None

    @property
    def num_failed(self) -> int:
        """Paths that went wrong; 1 for a model that was refused or served and should not have been."""
        if bool(self.refusal) == self.is_to_be_served:
            return 1
        return sum(not result.passed for result in self.results)


def tiny_names() -> tuple[str, ...]:
    """Every architecture that there is a tiny model of; those that are to be refused come last."""
    return (*SERVED, *(name + _LATENT for name in WITH_LATENTS), *REFUSED)


def tiny_rows(names: Iterable[str], say: Say, attention: str = ATTENTION_NAME) -> Iterator[Row]:
    """A row for each of the tiny models, with the attention of this name; `say` hears what is under way."""
    for name in names:
        yield _row(name, partial(tiny_subject, name, attention), say, is_to_be_served=name not in REFUSED)


def model_row(
    directory: Path,
    num_prompt_tokens: int | None,
    say: Say,
    *,
    tolerance: float = TOLERANCE,
    attention: str = ATTENTION_NAME,
) -> Row:
    """The row of the model in `directory`, in fp32; raises ConfigError when there is none."""
    return _row(
        directory.name, partial(_model_subject, directory, num_prompt_tokens, tolerance, attention), say
    )


def tiny_subject(name: str, attention: str = ATTENTION_NAME) -> Subject:
    """A tiny model, ready for its paths; raises UnsupportedModelError for one that a worker refuses."""
    model = build_tiny(name.removesuffix(_LATENT))
    mla = "latent" if name.endswith(_LATENT) else "expanded"
    layout = use_paged_attention(model, "float32", TINY_BLOCK_SIZE, mla)
    return _checked_subject(model, layout, MIN_PROMPT_TOKENS, attention)


def _row(name: str, subject_of: Callable[[], Subject], say: Say, *, is_to_be_served: bool = True) -> Row:
    say(f"{name}: plain transformers")
    try:
        subject = subject_of()
    except UnsupportedModelError as error:
        return Row(name, is_to_be_served, refusal=str(error))
    results = []
    for path in PATHS:
        say(f"{name}: {path}")
        results.append(run_path(subject, path))
    return Row(
        architecture=name,
        is_to_be_served=is_to_be_served,
        results=tuple(results),
        unreached_windows=_unreached_windows(subject),
        latent_share=_latent_share(subject),
    )


def _model_subject(
    directory: Path, num_prompt_tokens: int | None, tolerance: float, attention: str
) -> Subject:
    wanted_attention = "native" if attention == NATIVE_NAME else "torch"
    loaded = load_model(directory, "float32", _MODEL_BLOCK_SIZE, attention=wanted_attention)
    wanted = num_prompt_tokens or _telling_length(loaded.layout)
    longest = loaded.max_model_tokens - NUM_OUTPUT_TOKENS
    subject = _checked_subject(loaded.model, loaded.layout, min(wanted, longest), attention)
    return replace(subject, tolerance=tolerance)


def _checked_subject(
    model: PreTrainedModel, layout: KVLayout, num_prompt_tokens: int, attention: str
) -> Subject:
    """Refuses what a worker refuses at start; layers are fused where a worker's are."""
    model.set_attn_implementation(attention)
    if attention == NATIVE_NAME:
        fuse_layers(model)
    require_same_as_transformers(ModelRunner(model, layout, min_blocks(layout)), model, layout)
    return make_subject(model, layout, num_prompt_tokens=num_prompt_tokens, attention=attention)


def _telling_length(layout: KVLayout) -> int:
    """A prompt that passes every window, as far as it may be that long."""
    past_windows = [layer.window + 2 * layout.block_size for layer in layout.layers if layer.window]
    return max([MIN_PROMPT_TOKENS, *(length for length in past_windows if length <= _MAX_PROMPT_TOKENS)])


def _unreached_windows(subject: Subject) -> tuple[int, ...]:
    longest = len(subject.long.prompt_ids)
    windows = {layer.window for layer in subject.layout.layers if layer.window and layer.window >= longest}
    return tuple(sorted(windows))


def _latent_share(subject: Subject) -> float | None:
    if not subject.layout.has_latents:
        return None
    expanded = use_paged_attention(subject.model, subject.layout.dtype, subject.block_size)
    return subject.layout.block_bytes / expanded.block_bytes
