"""One request on its way through its workers, and what the dispatcher says about it."""

import itertools
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from paceline.core.errors import BadFieldError, PeerLostError
from paceline.core.prefix import WorkerKey
from paceline.core.request import (
    MAX_LABEL_CHARS,
    FinishReason,
    RequestId,
    SequenceId,
    SequenceSpec,
    TokenLogprob,
)
from paceline.v1 import generation_pb2
from router.timeline import RequestTimeline

# In a call's metadata: requests of one session are placed together where nothing is known of their prompts.
SESSION_ID: Final = "paceline-session-id"


@dataclass(frozen=True, slots=True)
class Placed:
    """An attempt's first worker has been asked; `is_local` means that the decode worker computes the prompt.

    `candidate` is the first one of those that it generates.
    """

    attempt: int
    is_local: bool
    # Why the attempt before it ended; empty for the first.
    reason: str
    candidate: int = 0


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """More of the prompt is computed."""

    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """The prompt is computed."""

    num_cached_tokens: int
    worker: str
    # One for each prompt token but the first when they were asked for, else none; as they came, since nobody here reads them.
    prompt_logprobs: tuple[generation_pb2.TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """The next output tokens of one candidate, each exactly once over all attempts."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    # One a token when they were asked for, else none.
    logprobs: tuple[TokenLogprob, ...] = ()
    candidate: int = 0


@dataclass(frozen=True, slots=True)
class Failures:
    """Attempts that have failed: since the last one that got beyond its first tokens, and in all; and why the last one did."""

    num_in_a_row: int = 0
    num_in_all: int = 0
    reason: str = ""

    def and_one(self, reason: str, *, has_advanced: bool) -> "Failures":
        """One more. If it decoded before it failed, the request is on its way, and those before it are forgiven."""
        return Failures(1 if has_advanced else self.num_in_a_row + 1, self.num_in_all + 1, reason)


DispatchEvent = Placed | PromptProgress | PromptComputed | Tokens


@dataclass(slots=True)
class Job:
    """One request on its way: all of its candidates, or after a loss one that goes on by itself.

    `spec` is that of the first attempt.
    """

    spec: SequenceSpec
    deadline_s: float | None
    timeline: RequestTimeline
    # What came of each candidate so far: the input of the next attempt.
    outputs: dict[int, list[int]] = field(init=False)
    # Those of the whole request that have not ended.
    unfinished: set[int] = field(init=False)
    # Whether the client has heard of the computed prompt, and so has its log probabilities.
    is_prompt_told: bool = False
    # Where the prompt of the attempt under way is computed.
    prefill_worker: str = ""
    # Workers that computed the prompt in an attempt that failed, whoever's fault it was; others come first.
    failed_on: set[str] = field(default_factory=set)
    attempt_numbers: Iterator[int] = field(default_factory=itertools.count)
    # What counts it to a worker before it is placed; closed then, or when it ends.
    unplaced: ExitStack = field(default_factory=ExitStack)
    # What the prefix table has said of it before it is placed; None: it is asked then.
    held_blocks: Mapping[WorkerKey, int] | None = None
    # What the client calls the conversation that this belongs to; empty: nothing.
    session_id: str = ""

    def __post_init__(self) -> None:
        self.outputs = {candidate: [] for candidate in self.spec.candidates}
        self.unfinished = set(self.spec.candidates)

    @property
    def request_id(self) -> RequestId:
        """The same in every attempt."""
        return self.spec.sequence_id.request_id

    @property
    def candidates(self) -> tuple[int, ...]:
        """Those of this job that have not ended."""
        return tuple(candidate for candidate in self.spec.candidates if candidate in self.unfinished)

    @property
    def output_ids(self) -> tuple[int, ...]:
        """The tokens that came before the next attempt. Several candidates go together only while they have none."""
        return tuple(self.outputs[self.candidates[0]]) if self.candidates else ()

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all candidates so far."""
        return sum(map(len, self.outputs.values()))

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether the next attempt has to give log probabilities of the prompt."""
        return self.spec.prompt_logprobs and not self.is_prompt_told

    def attempt_spec(self, attempt: int, now_s: float) -> SequenceSpec:
        """What to send to the workers of this attempt."""
        return replace(
            self.spec,
            sequence_id=SequenceId(self.request_id, attempt),
            output_ids=self.output_ids,
            candidates=self.candidates,
            prompt_logprobs=self.owes_prompt_logprobs,
            time_budget_s=self.time_left_s(now_s),
        )

    def at(self, now_s: float, spec: SequenceSpec) -> SequenceSpec:
        """What an attempt sends later than its beginning: the same, with less time left."""
        return spec if self.deadline_s is None else replace(spec, time_budget_s=self.time_left_s(now_s))

    def time_left_s(self, now_s: float) -> float | None:
        """Until its deadline; None without one."""
        return None if self.deadline_s is None else max(0.0, self.deadline_s - now_s)

    def accept(self, first_index: int, token_ids: tuple[int, ...], candidate: int = 0) -> tuple[int, ...]:
        """The tokens that are new: what was seen is dropped, and a gap means that tokens are lost."""
        output_ids = self.outputs[candidate]
        if first_index > len(output_ids):
            raise PeerLostError(f"output token {len(output_ids)} is missing")
        fresh = token_ids[len(output_ids) - first_index :]
        output_ids += fresh
        return fresh

    def end(self, candidate: int) -> None:
        """Nothing more is wanted of a candidate."""
        self.unfinished.discard(candidate)

    def parts(self) -> "list[Job]":
        """What goes on after a loss: all together while there is no output, then each candidate by itself."""
        if len(self.candidates) == 1 or not any(self.outputs[candidate] for candidate in self.candidates):
            return [self]
        return [self._part(candidate) for candidate in self.candidates]

    def _part(self, candidate: int) -> "Job":
        """It has its own failures, and shares with the others what concerns the whole request."""
        part = replace(self, spec=replace(self.spec, candidates=(candidate,)), failed_on=set(self.failed_on))
        part.outputs, part.unfinished = {candidate: self.outputs[candidate]}, self.unfinished
        return part


def session_id_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """What the caller names its conversation, the last of several names; empty when it names none. Raises BadFieldError."""
    said = dict(metadata or ()).get(SESSION_ID, "")
    if len(said) > MAX_LABEL_CHARS:
        problem = f"has {len(said)} characters, and the limit is {MAX_LABEL_CHARS}"
        raise BadFieldError(SESSION_ID, problem)
    return said if isinstance(said, str) else ""


class RequestRunner(Protocol):
    """Whoever carries requests through workers: the dispatcher, and what wraps it."""

    def run(self, job: Job) -> AsyncGenerator[DispatchEvent, None]:
        """See Dispatcher.run."""
        ...
