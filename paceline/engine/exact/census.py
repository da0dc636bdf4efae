"""Watches one forward pass of a model and finds every operation that exact mode has no reason to trust.

An operation is trusted when it moves numbers, computes each element by one correctly rounded step or by a function that
is seen to give the same bits at any place, or reduces along the last axis, where that belongs to one token. The others must
be part of an exact function. Taking a number out of the tensors is not trusted either: it could steer the whole batch.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, PreTrainedModel

from paceline.core.errors import UnsupportedModelError
from paceline.engine.exact.modules import make_functions_exact
from paceline.engine.exact.tiled import in_exact_function, placeless

_CENSUS_NAME = "paceline_census"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NUM_TOKENS = 11  # of the forward pass; an axis of this size is that of the tokens

# They move numbers, make them from nothing, compare them, or cast them.
_MOVES = _words(
    """
    _to_copy arange bitwise_and bitwise_not bitwise_or cat clone constant_pad_nd copy_ detach embedding empty
    empty_like eq expand fill_ full full_like ge gather gt index index_put_ index_select isin le lift_fresh
    logical_and logical_not lt masked_fill masked_fill_ ne new_empty new_full new_ones new_zeros ones ones_like
    repeat repeat_interleave roll scalar_tensor scatter scatter_ slice sort split stack topk tril triu where zero_
    zeros zeros_like _unsafe_view
    """
)
# One rounding, or none, for each element.
_STEPS = _words(
    """
    abs add add_ clamp clamp_min div div_ floor maximum minimum mul mul_ neg reciprocal relu rsub sqrt sub sub_
    """
)
_REDUCTIONS = _words(
    """
    _fused_rms_norm _is_all_true _log_softmax _softmax all amax amin aminmax any argmax linalg_vector_norm max mean
    min native_layer_norm sum
    """
)
_PRODUCTS = frozenset({"bmm", "mm"})
# Experts loop over the tokens that are theirs, in the order of the experts; a token comes once to each.
_IN_EXPERTS = frozenset({"_local_scalar_dense", "index_add_", "nonzero"})


class Census(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch has no annotations here
    """Notes each operation that is not trusted, with the innermost module that ran it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # the same
        self.found: set[tuple[str, nn.Module]] = set()
        self._running: list[nn.Module] = []

    def enter(self, module: nn.Module, *_: Any) -> None:
        """A module begins."""
        self._running.append(module)

    def leave(self, *_: Any) -> None:
        """It ends."""
        self._running.pop()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called by torch for every operation."""
        out = func(*args, **(kwargs or {}))
        name, module = func._schema.name.partition("::")[2], self._running[-1]  # noqa: SLF001 - no public name
        is_plain = (kwargs or {}).get("alpha", 1) == 1  # a sum with a factor may be rounded once or twice
        if not (in_exact_function.get() or (is_plain and _is_trusted(func, name, module, args, out))):
            self.found.add((name, module))
        return out


def require_trusted(model: PreTrainedModel) -> None:
    """Makes the functions exact of modules that need it; raises UnsupportedModelError for what cannot be helped."""
    for module in {module for _, module in take_census(model)}:
        make_functions_exact(module)
    left = {f"{name} in {type(module).__name__}" for name, module in take_census(model)}
    if left:
        places = ", ".join(sorted(left))
        raise UnsupportedModelError(
            f"exact mode cannot serve {type(model).__name__}: what a token gets from {places} may depend on its batch"
        )


@torch.no_grad()
def take_census(model: PreTrainedModel) -> set[tuple[str, nn.Module]]:
    """The operations of one forward pass that are not trusted, each with the module that ran it."""
    census = Census()
    handles = [
        handle
        for module in model.modules()
        for handle in (
            module.register_forward_pre_hook(census.enter),
            module.register_forward_hook(census.leave, always_call=True),
        )
    ]
    name = model.config._attn_implementation  # noqa: SLF001 - transformers has no public name for it
    AttentionInterface.register(_CENSUS_NAME, _no_attention)
    model.set_attn_implementation(_CENSUS_NAME)
    token_ids, positions = torch.arange(_NUM_TOKENS)[None], torch.arange(_NUM_TOKENS)[None]
    try:
        with census:
            model(input_ids=token_ids, position_ids=positions, use_cache=False)
    finally:
        model.set_attn_implementation(name)
        for handle in handles:
            handle.remove()
    return census.found


def _is_trusted(func: Any, name: str, module: nn.Module, args: tuple[Any, ...], out: Any) -> bool:
    """Whether the operation gives a token the same bits in any batch."""
    tensors = [each for each in (*args, out) if isinstance(each, Tensor)]
    are_integers = not any(each.is_floating_point() for each in tensors)
    if hasattr(module, "num_experts") and (name in _IN_EXPERTS or (name in _REDUCTIONS and are_integers)):
        return True
    if name in _REDUCTIONS:
        return _NUM_TOKENS in args[0].shape[:-1] and _is_last_axis(name, args)
    if name in _PRODUCTS:
        return int(args[0].shape[-1]) == 1
    if func.is_view or name in _MOVES | _STEPS:
        return True
    if are_integers:
        return torch.Tag.pointwise in func.tags
    return name in placeless(tensors[0].dtype)


def _no_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    del module, key
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


def _is_last_axis(name: str, args: tuple[Any, ...]) -> bool:
    """Those over no named axis reduce all of them."""
    x, rest = args[0], args[1:]
    if name in {"native_layer_norm", "_fused_rms_norm"}:
        return len(rest[0]) == 1
    if name == "linalg_vector_norm":
        rest = rest[1:]
    axes = rest[0] if rest else None
    axes = [axes] if isinstance(axes, int) else axes
    return axes is not None and [axis % x.dim() for axis in axes] == [x.dim() - 1]
