"""Turns a transformers model into its exact twin: the same weights, in modules that treat each token alike in any batch.

Linear layers, transformers' Conv1D and activations are replaced. Modules that compute with functions instead, such as the
routers and experts of a mixture, keep their code and have those functions replaced while they run.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel, activations
from transformers.pytorch_utils import Conv1D

from paceline.engine.exact.rungs import aligned
from paceline.engine.exact.tiled import affine, elementwise, in_exact_function, linear, multiply

_ACTIVATIONS: tuple[type[nn.Module], ...] = (
    *(nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Mish, nn.Softplus, nn.ReLU, nn.ReLU6, nn.LeakyReLU),
    *(
        each
        for each in vars(activations).values()
        if isinstance(each, type) and issubclass(each, nn.Module) and each.__module__ == activations.__name__
    ),
)


class ExactLinear(nn.Linear):
    """A linear layer that shares its weights with the one that it replaces."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__(original.in_features, original.out_features, original.bias is not None, "meta")
        self.weight, self.bias = original.weight, original.bias

    def forward(self, x: Tensor) -> Tensor:
        """See nn.Linear."""
        return multiply(linear, x, self.weight, self.bias)


class ExactConv1D(nn.Module):
    """transformers' Conv1D, which is a linear layer with its weights the other way around."""

    def __init__(self, original: Conv1D) -> None:
        super().__init__()
        self.nf, self.nx = original.nf, original.nx
        self.weight, self.bias = original.weight, original.bias

    def forward(self, x: Tensor) -> Tensor:
        """See Conv1D."""
        return multiply(affine, x, self.weight, self.bias)


class ExactActivation(nn.Module):
    """An activation, element by element."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original

    def forward(self, x: Tensor) -> Tensor:
        """The original's value."""
        return elementwise(self.original, x)


class ExactFunctions(TorchFunctionMode):
    """Inside it, the functions that modules compute with are exact."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called by torch in place of every function."""
        # Where one of these modules runs inside another, the outer mode sees what an exact function itself calls. To
        # answer that exactly too would hide from the ladders which heights agree.
        exact = func if in_exact_function.get() else _EXACT_FUNCTIONS.get(func, func)
        return exact(*args, **(kwargs or {}))


def replace_modules(model: PreTrainedModel) -> None:
    """Puts the exact twins of all modules that have one in their places."""
    for parameter in model.parameters():
        parameter.data = aligned(parameter.data)
    for name, module in list(model.named_modules()):
        twin = _exact_twin(module)
        if twin is not None:
            model.set_submodule(name, twin)


def make_functions_exact(module: nn.Module) -> None:
    """While this module runs, its functions are exact."""
    running: list[ExactFunctions] = []

    def enter(*_: Any) -> None:
        running.append(ExactFunctions())
        running[-1].__enter__()  # type: ignore[no-untyped-call] # torch has no annotations here

    def leave(*_: Any) -> None:
        running.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call] # the same

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def _exact_twin(module: nn.Module) -> nn.Module | None:
    # Exactly these types: a subclass computes something of its own.
    if type(module) is nn.Linear:
        return ExactLinear(module)
    if type(module) is Conv1D:
        return ExactConv1D(module)
    is_plain = not any(True for _ in module.parameters())
    if type(module) in _ACTIVATIONS and is_plain:
        return ExactActivation(module)
    return None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return multiply(linear, x, weight, bias)


def _matmul(x: Tensor, weight: Tensor) -> Tensor:
    return multiply(affine, x, weight, None) if weight.dim() == 2 else x @ weight


def _silu(x: Tensor, *, inplace: bool = False) -> Tensor:
    del inplace
    return elementwise(functional.silu, x)


_ELEMENTWISE: Mapping[Callable[[Tensor], Tensor], tuple[Callable[[Tensor], Tensor], ...]] = {
    torch.rsqrt: (torch.Tensor.rsqrt,),
    torch.sigmoid: (torch.Tensor.sigmoid,),
    torch.tanh: (torch.Tensor.tanh, functional.tanh),
}
_EXACT_FUNCTIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    functional.linear: _linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    functional.silu: _silu,
    **{
        name: partial(elementwise, function)
        for function, names in _ELEMENTWISE.items()
        for name in (function, *names)
    },
}
