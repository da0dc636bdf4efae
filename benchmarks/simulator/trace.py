"""What users send: when, how long, and what of it they share. It knows no file format."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paceline.core.request import Priority, RequestId, SamplingParams, SequenceId, SequenceSpec

_GREEDY = SamplingParams(temperature=0.0)
# Real models' ids, when a trace is only simulated: any number will do that all requests agree on.
ANY_VOCAB_SIZE = 32_000
# Of one prompt or output; no model reads more, and a prompt's tokens are made up in memory.
MAX_TOKENS = 10_000_000
# Beyond this a short step is lost in the rounding of the clock. Seconds since 1970 are well within.
MAX_ARRIVAL_S = 1e10


class PrefixPart(NamedTuple):
    """Tokens that requests share: parts of one name begin alike, as far as the shorter one goes."""

    name: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. Its prompt begins with the parts of `prefix`, in order; what follows them is nobody else's.

    `prompt_ids` is empty where the trace has lengths only. The client of one with a `time_budget_s` waits no longer.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix: tuple[PrefixPart, ...] = ()
    priority: Priority = Priority.STANDARD
    tenant: str = ""
    prompt_ids: tuple[int, ...] = ()
    time_budget_s: float | None = None

    def __post_init__(self) -> None:
        assert self.num_prompt_tokens >= 1 and self.num_output_tokens >= 1
        assert not self.prompt_ids or len(self.prompt_ids) == self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival, the first at 0 s or later."""

    name: str
    requests: tuple[TraceRequest, ...]

    @property
    def duration_s(self) -> float:
        """From 0 to the last arrival."""
        return self.requests[-1].arrival_s

    @property
    def request_rate(self) -> float:
        """Requests a second, over the time in which they arrive; 0 when all come at once."""
        return (len(self.requests) - 1) / self.duration_s if self.duration_s else 0.0


def prompt_ids(request: TraceRequest, number: int, vocab_size: int = ANY_VOCAB_SIZE) -> tuple[int, ...]:
    """The prompt of request `number`: the same names and numbers always give the same tokens."""
    if request.prompt_ids:
        return request.prompt_ids
    ids: list[int] = []
    for part in request.prefix:
        ids += _tokens(f"prefix/{part.name}", part.num_tokens, vocab_size)
    ids += _tokens(f"request/{number}", request.num_prompt_tokens - len(ids), vocab_size)
    return tuple(ids[: request.num_prompt_tokens])


def spec_of(request: TraceRequest, number: int, vocab_size: int = ANY_VOCAB_SIZE) -> SequenceSpec:
    """What a worker is asked for: greedy output of exactly the trace's length."""
    return SequenceSpec(
        sequence_id=SequenceId(RequestId(f"r{number}"), 0),
        prompt_ids=prompt_ids(request, number, vocab_size),
        sampling=_GREEDY,
        max_tokens=request.num_output_tokens,
        ignore_eos=True,
        priority=request.priority,
        tenant=request.tenant,
        time_budget_s=request.time_budget_s,
    )


def _tokens(name: str, num_tokens: int, vocab_size: int) -> Sequence[int]:
    """As many digits of an endless digest; ids up to 2 are left out, since models keep them for special tokens."""
    if num_tokens <= 0:
        return ()
    # A name in JSON may hold half a character.
    digits = hashlib.shake_128(name.encode(errors="surrogatepass")).digest(4 * num_tokens)
    ids: list[int] = (np.frombuffer(digits, "<u4") % (vocab_size - 3) + 3).tolist()
    return ids
