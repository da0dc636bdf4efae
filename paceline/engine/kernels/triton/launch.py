"""A kernel with all that one call of it needs, as a value: it can be run, or looked at, or compiled where there is no GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Launch:
    """One call: `arguments` by the names of the kernel's parameters, and how many programs, warps and stages."""

    kernel: Any  # what triton.jit made
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 1  # loads that are under way while others are worked on

    @classmethod
    def of(
        cls,
        kernel: Any,
        grid: tuple[int, ...],
        known: Mapping[str, Any],
        *,
        num_warps: int = 4,
        num_stages: int = 1,
    ) -> "Launch":
        """With what the kernel asks for, of what is known to several."""
        arguments = {name: known[name] for name in kernel.arg_names}
        return cls(kernel, grid, arguments, num_warps, num_stages)

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told beside the arguments. Products are fused into sums, whatever a release of Triton does by itself."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}

    def run(self) -> None:
        """Runs it, after what the current stream has to do before; nothing where there is no program."""
        if 0 not in self.grid:
            self.kernel[self.grid](**self.arguments, **self.options)
