"""What a step has to move and to compute, and which part of what a GPU can do it reaches. Plain numbers, no GPU."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one layer, and the bytes of an element of its KV."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_bytes: float


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured here: bytes a second of a copy, read and written, and operations a second of a large product."""

    bytes_a_s: float
    flops_a_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """What a step cannot do without."""

    num_bytes: float
    num_flops: float

    def least_s(self, machine: Machine) -> float:
        """The time that it takes at least: the longer of moving and computing, which go on at once."""
        return max(self.num_bytes / machine.bytes_a_s, self.num_flops / machine.flops_a_s)

    def plus(self, other: "Work", times: int = 1) -> "Work":
        """Both, the other one several times."""
        return Work(self.num_bytes + times * other.num_bytes, self.num_flops + times * other.num_flops)


@dataclass(frozen=True, slots=True)
class Reached:
    """A piece of work as it was measured."""

    name: str
    duration_s: float
    bytes_a_s: float
    flops_a_s: float
    # Of the least time to the time taken: 1 is the roof.
    share: float
    is_bound_by_memory: bool


def reached(name: str, work: Work, duration_s: float, machine: Machine) -> Reached:
    """How near to the roof it came."""
    return Reached(
        name=name,
        duration_s=duration_s,
        bytes_a_s=work.num_bytes / duration_s,
        flops_a_s=work.num_flops / duration_s,
        share=work.least_s(machine) / duration_s,
        is_bound_by_memory=work.num_bytes / machine.bytes_a_s >= work.num_flops / machine.flops_a_s,
    )


def attention_work(shape: AttentionShape, parts: Sequence[tuple[int, int]], element_bytes: int) -> Work:
    """Of sequences with so many query tokens and so long a context each: every key and value once, queries and answers.

    A query meets the tokens up to itself, and each pair of vectors takes a product for its logit and one for its value.
    """
    keys = sum(context for _, context in parts)
    queries = sum(length for length, _ in parts)
    pairs = sum(length * (2 * context - length + 1) // 2 for length, context in parts)
    kv = 2 * keys * shape.num_kv_heads * shape.head_dim * shape.kv_bytes
    rows = 2 * queries * shape.num_heads * shape.head_dim * element_bytes
    return Work(kv + rows, 4 * pairs * shape.num_heads * shape.head_dim)


def weights_work(num_weights: int, num_tokens: int, element_bytes: int) -> Work:
    """Every weight is read once, and multiplied with each token."""
    return Work(num_weights * element_bytes, 2 * num_weights * num_tokens)


def copy_work(num_bytes: int) -> Work:
    """Read once and written once."""
    return Work(2 * num_bytes, 0)


def median(durations: Sequence[float]) -> float:
    """The middle one; of an even number the lower of the two in the middle."""
    return sorted(durations)[(len(durations) - 1) // 2]
