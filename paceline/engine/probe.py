"""Finds out how a model attends, by one short forward pass in which each layer shows what it stores and may see."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from paceline.core.errors import UnsupportedModelError
from paceline.core.kv_layout import WHOLE_VIEW, LayerKV, View
from paceline.engine.attention import read_rules
from paceline.engine.latent import NotedCache

_PROBE_NAME = "paceline_probe"

# (batch, head, query position, key position) -> whether the query may look at the key; works on whole tensors.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# (layers of this process by their number, how many the model has) -> those of all processes.
Gather = Callable[[dict[int, LayerKV], int], dict[int, LayerKV]]


def probe_layers(
    model: PreTrainedModel, max_tokens: int, mla: str = "expanded", gather: Gather | None = None
) -> tuple[LayerKV, ...]:
    """The KV geometry of each layer, for contexts of at most `max_tokens`; of the latents, if `mla` is "latent".

    Where the model here has some of its layers only, `gather` brings those of all.

    Raises UnsupportedModelError when a layer never asks for attention (it would silently ignore our KV cache), sees
    anything but all tokens before it or a window of them, or has no latents though they are asked for.
    """
    cache = NotedCache() if mla == "latent" else None
    probe = _Probe(model, max_tokens, cache)
    AttentionInterface.register(_PROBE_NAME, probe.attend)
    AttentionMaskInterface.register(_PROBE_NAME, probe.build_mask)
    try:
        model.set_attn_implementation(_PROBE_NAME)
        with torch.inference_mode():
            _short_pass(model, cache)
    except UnsupportedModelError:
        raise
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise UnsupportedModelError(
            f"{name_of(model)} cannot run one ragged forward pass: {type(error).__name__}: {first_line}"
        ) from error
    return probe.layers(gather)


def takes_rows(model: PreTrainedModel) -> bool:
    """Whether the model computes the logits of given positions only."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def name_of(model: PreTrainedModel) -> str:
    """What messages call the model."""
    return type(model).__name__


def view_of(visible: MaskFunction, max_tokens: int) -> View:
    """What a mask lets each query see: all tokens before it, or a window of them and the first ones.

    Raises ValueError for a mask that is neither. Two queries tell a window from attention in chunks: the next one
    sees as much through a window, and more or less in a chunk.
    """
    last = max_tokens - 1
    before, seen = (_seen_by(visible, query, max_tokens) for query in (last - 1, last))
    view = _view_behind(seen)
    if before[last] or not torch.equal(seen, _seen_through(view, last, max_tokens)):
        raise ValueError("it has gaps, or looks ahead")
    if not torch.equal(before, _seen_through(view, last - 1, max_tokens)):
        raise ValueError("it is cut into chunks")
    return view


def _seen_by(visible: MaskFunction, query: int, max_tokens: int) -> Tensor:
    """[max_tokens], True for what the query may see."""
    none, keys = torch.tensor(0), torch.arange(max_tokens)
    return visible(none, none, torch.tensor(query), keys).expand(max_tokens)


def _view_behind(seen: Tensor) -> View:
    """The view that the last token would have: what it sees up to the first hidden token, and from behind the last."""
    hidden = (~seen).nonzero().flatten().tolist()
    return View(len(seen) - 1 - hidden[-1], hidden[0]) if hidden else WHOLE_VIEW


def _seen_through(view: View, query: int, max_tokens: int) -> Tensor:
    keys = torch.arange(max_tokens)
    return (keys <= query) & ((keys >= view.first_visible(query)) | (keys < view.num_sink_tokens))


def _short_pass(model: PreTrainedModel, cache: NotedCache | None) -> None:
    """As a model runner calls the model: some models take shortcuts otherwise."""
    ids = torch.arange(3, device=model.device)
    more: dict[str, Any] = {"logits_to_keep": ids} if takes_rows(model) else {}
    if cache is not None:
        more["cache"] = cache
    model(input_ids=ids[None], position_ids=ids[None], use_cache=False, **more)


class _Probe:
    """Stands in for attention and for the making of masks, and keeps what it is asked for.

    The mask that a layer is given is the truth about what it sees; eager attention goes by nothing else.
    """

    def __init__(self, model: PreTrainedModel, max_tokens: int, cache: NotedCache | None) -> None:
        self._model = model
        self._cache = cache
        self._max_tokens = max_tokens
        self._layers: dict[int, LayerKV] = {}
        # These are kept, so that no later tensor can be taken for one of them.
        self._masks: list[tuple[Tensor, MaskFunction]] = []
        self._states: list[tuple[int, Tensor, Tensor]] = []

    def build_mask(
        self, *, batch_size: int, q_length: int, kv_length: int, mask_function: MaskFunction, **_: Any
    ) -> Tensor:
        """A mask of zeros that stands for its function."""
        mask = torch.zeros(batch_size, 1, q_length, kv_length, device=self._model.device)
        self._masks.append((mask, mask_function))
        return mask

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Notes the layer; what it answers has the right shape and nothing more."""
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in self._layers:
            raise UnsupportedModelError(f"{name_of(self._model)} calls attention more than once a layer")
        view, shared_with = self._view(index, attention_mask), self._owner(key, value)
        layer = LayerKV(key.shape[1], key.shape[3], value.shape[3], shared_with=shared_with)
        if self._cache is not None:
            layer = self._cache.latent_layer(index, key, value) or layer
        layer = replace(layer, window=view.window, num_sink_tokens=view.num_sink_tokens)
        read_rules(layer, kwargs, query.shape[-1])
        self._layers[index] = layer
        self._states.append((index, key, value))
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    def layers(self, gather: Gather | None) -> tuple[LayerKV, ...]:
        """What was seen, if it is all of the model."""
        num_layers = self._model.config.get_text_config().num_hidden_layers
        if gather is not None:
            self._layers = gather(self._layers, num_layers)
        if sorted(self._layers) != list(range(num_layers)):
            raise UnsupportedModelError(
                f"{name_of(self._model)} asks for attention in {len(self._layers)} of its {num_layers} layers; layers "
                "that attend by themselves, or keep a state of another kind, cannot be served"
            )
        if self._cache is not None and not any(layer.is_latent for layer in self._layers.values()):
            raise UnsupportedModelError(
                f"{name_of(self._model)} offers no latents that could be cached; serve it with --mla expanded"
            )
        return tuple(self._layers[index] for index in range(num_layers))

    def _view(self, index: int, mask: Tensor | None) -> View:
        visible = next((function for ours, function in self._masks if ours is mask), None)
        if visible is None:
            raise UnsupportedModelError(
                f"{name_of(self._model)} makes the attention mask of layer {index} by itself; it cannot be served"
            )
        try:
            return view_of(visible, self._max_tokens)
        except ValueError as error:
            raise UnsupportedModelError(
                f"{name_of(self._model)} has an attention mask in layer {index} that cannot be served: {error}"
            ) from error

    def _owner(self, key: Tensor, value: Tensor) -> int | None:
        return next((index for index, k, v in self._states if k is key and v is value), None)
