"""How long a step and a transfer take: a few numbers, fitted from real steps or taken from a textbook."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.engine.step import ScheduledSequence


@dataclass(frozen=True, slots=True)
class StepWork:
    """What of a step costs time. A chunk is a sequence with more than one token; the others decode.

    `num_decode_context` is the sum over decodes of the tokens that each attends to; `num_chunk_context` the same over the
    tokens of the chunks.
    """

    num_decodes: int
    num_decode_context: int
    num_chunks: int
    num_chunk_tokens: int
    num_chunk_context: int

    @property
    def num_sequences(self) -> int:
        """Sequences in the step."""
        return self.num_decodes + self.num_chunks

    @property
    def num_tokens(self) -> int:
        """Tokens in the step."""
        return self.num_decodes + self.num_chunk_tokens


def work_of(scheduled: Sequence[ScheduledSequence]) -> StepWork:
    """Adds up a step."""
    num_decodes = num_decode_context = num_chunks = num_chunk_tokens = num_chunk_context = 0
    for item in scheduled:
        num_tokens, start = len(item.token_ids), item.start
        if num_tokens == 1:
            num_decodes += 1
            num_decode_context += start + 1
        else:
            num_chunks += 1
            num_chunk_tokens += num_tokens
            # Each token attends to all before it, and to itself.
            num_chunk_context += num_tokens * start + num_tokens * (num_tokens + 1) // 2
    return StepWork(num_decodes, num_decode_context, num_chunks, num_chunk_tokens, num_chunk_context)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step, linear in its work; and what goes on outside of the engine.

    step = base + per decoding sequence + per chunk + per token of a chunk + per token of context, decode and chunk apart.
    """

    name: str
    base_s: float
    decode_s: float
    chunk_token_s: float
    chunk_s: float = 0.0
    decode_context_s: float = 0.0
    chunk_context_s: float = 0.0
    # A hand-over: a round trip before the first byte and one after the last, and the bytes.
    transfer_latency_s: float = 0.0
    transfer_bytes_per_s: float = 1e9
    kv_bytes_per_token: int = 0
    # What real steps took over what is said here, in the order in which they were measured: a simulation goes through these ratios
    # again and again, so that slow moments of a machine are as frequent and as long as they were. Empty: steps take what is said.
    noise: tuple[float, ...] = ()
    # Outside of the engines: before a request reaches a worker, and until a token is with its client.
    request_overhead_s: float = 0.0
    token_overhead_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuses numbers with which time would stand still or run backwards."""
        numbers = [field.name for field in fields(self) if field.name not in {"name", "noise"}]
        for name in numbers:
            value = getattr(self, name)
            # Whole numbers of JSON have no bound.
            if not (isinstance(value, int | float) and 0 <= value <= sys.float_info.max):
                raise ConfigError(f"cost model {self.name}: {name} must be a number from 0 up")
        if not isinstance(self.kv_bytes_per_token, int):
            raise ConfigError(f"cost model {self.name}: kv_bytes_per_token must be a whole number")
        if not all(map(_is_ratio, self.noise)):
            raise ConfigError(f"cost model {self.name}: noise must be ratios above 0")
        if self.transfer_bytes_per_s <= 0:
            raise ConfigError(f"cost model {self.name}: transfer_bytes_per_s must be more than 0")
        if self.base_s + min(self.decode_s, self.chunk_token_s) <= 0:
            raise ConfigError(f"cost model {self.name}: a step must take time; base_s or decode_s is missing")

    def step_s(self, work: StepWork) -> float:
        """How long a step takes."""
        return (
            self.base_s
            + self.decode_s * work.num_decodes
            + self.decode_context_s * work.num_decode_context
            + self.chunk_s * work.num_chunks
            + self.chunk_token_s * work.num_chunk_tokens
            + self.chunk_context_s * work.num_chunk_context
        )

    def transfer_s(self, num_bytes: int) -> float:
        """How long bytes are under way, latency apart."""
        return num_bytes / self.transfer_bytes_per_s


def _is_ratio(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value <= sys.float_info.max


# Decode is bound by memory: weights are read once for all, so that a larger batch costs little more.
TEXTBOOK = CostModel("textbook", base_s=0.005, decode_s=0.0003, chunk_token_s=0.0002)
# Each sequence costs what it would cost alone: batching cannot help.
LINEAR = CostModel("linear", base_s=0.0, decode_s=0.0053, chunk_token_s=0.0002)
NAMED = {model.name: model for model in (TEXTBOOK, LINEAR)}


def load_cost(name_or_file: str) -> CostModel:
    """A named cost model, or one that `./run bench fit` has written; raises ConfigError."""
    if name_or_file in NAMED:
        return NAMED[name_or_file]
    try:
        numbers = json.loads(Path(name_or_file).read_text(encoding="utf-8"))
        # The file of `./run bench fit` has the residuals beside the model.
        model = numbers.get("cost_model", numbers)
        return CostModel(**{**model, "noise": tuple(model.get("noise", ()))})
    except OSError as error:
        known = ", ".join(NAMED)
        raise ConfigError(
            f"--cost {name_or_file}: neither one of {known} nor a file: {error.strerror}"
        ) from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"--cost {name_or_file} is no cost model: {error}") from error
