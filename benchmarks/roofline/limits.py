"""What the machine can do: how fast memory is read, and how fast bfloat16 matrices are multiplied."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.roofline.work import Shape
from paceline.core.errors import ConfigError

# So large that no cache holds a part of it worth mentioning.
_STREAM_BYTES = 1 << 30
_NUM_PASSES = 3
# Of a matrix product, as of a long chunk.
_NUM_ROWS = 2048
# Larger than those of small models: what the processor reaches when nothing but arithmetic counts.
_LARGE = Shape(4096, 4096)
_GEMM_S = 0.03


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes and floating-point operations a second, the highest that were seen; and those of each kind of measurement."""

    memory_by_threads: Mapping[int, float]
    gemm_by_shape: Mapping[Shape, float]

    @property
    def memory(self) -> float:
        return max(self.memory_by_threads.values())

    @property
    def gemm(self) -> float:
        return max(self.gemm_by_shape.values())


def measure_limits(num_threads: int, shapes: Sequence[Shape]) -> Limits:
    """Of so many threads; of these shapes, and of a large one."""
    try:
        memory = {each: _memory_rate(each) for each in range(1, num_threads + 1)}
    finally:
        torch.set_num_threads(num_threads)
    return Limits(memory, {shape: _gemm_rate(shape) for shape in dict.fromkeys((*shapes, _LARGE))})


def _memory_rate(num_threads: int) -> float:
    """Of a sum over memory that was written to: the fastest pass, since what disturbs one is others' traffic."""
    torch.set_num_threads(num_threads)
    stream = torch.ones(_STREAM_BYTES // 4)
    stream.sum()
    return _STREAM_BYTES / min(_timed(stream.sum) for _ in range(_NUM_PASSES))


@torch.inference_mode()
def _gemm_rate(shape: Shape) -> float:
    """Of oneDNN with its weight laid out beforehand: the fastest of some."""
    rows = torch.randn(_NUM_ROWS, shape.in_features, dtype=torch.bfloat16)
    weight = torch.randn(shape.out_features, shape.in_features, dtype=torch.bfloat16)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _NUM_ROWS)  # noqa: SLF001 - as packed layers do
    except (AttributeError, RuntimeError) as error:
        raise ConfigError(f"this build of torch has no bfloat16 product of oneDNN: {error}") from error

    def multiply() -> None:
        """Once."""
        torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")  # noqa: SLF001 - the same

    multiply()
    fastest_s = multiply_s = _timed(multiply)
    for _ in range(int(_GEMM_S / multiply_s)):
        fastest_s = min(fastest_s, _timed(multiply))
    return 2.0 * _NUM_ROWS * shape.num_weights / fastest_s


def _timed(call: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s
