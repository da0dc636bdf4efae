"""One request on its way through its workers, and what the dispatcher says about it."""

from dataclasses import dataclass, field, replace

from paceline.core.errors import PeerLostError
from paceline.core.request import FinishReason, SequenceId, SequenceSpec, TokenLogprob
from paceline.v1 import generation_pb2
from router.timeline import RequestTimeline


@dataclass(frozen=True, slots=True)
class Placed:
    """An attempt has its workers; `is_local` means that the decode worker computes the prompt."""

    attempt: int
    is_local: bool
    # Why the attempt before it ended; empty for the first.
    reason: str


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
    """The next output tokens, each exactly once over all attempts."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    # One a token when they were asked for, else none.
    logprobs: tuple[TokenLogprob, ...] = ()


DispatchEvent = Placed | PromptProgress | PromptComputed | Tokens


@dataclass(slots=True)
class Job:
    """One request on its way. `spec.output_ids` of an attempt are the tokens that came before it."""

    spec: SequenceSpec
    deadline_s: float | None
    timeline: RequestTimeline
    output_ids: list[int] = field(default_factory=list)
    # Whether the client has heard of the computed prompt, and so has its log probabilities.
    is_prompt_told: bool = False
    # Prefill workers whose attempt failed, whoever's fault it was; others come first.
    failed_on: set[str] = field(default_factory=set)

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether the next attempt has to give log probabilities of the prompt."""
        return self.spec.prompt_logprobs and not self.is_prompt_told

    def attempt_spec(self, attempt: int, now_s: float) -> SequenceSpec:
        """What to send to the workers of this attempt."""
        return replace(
            self.spec,
            sequence_id=SequenceId(self.spec.sequence_id.request_id, attempt),
            output_ids=tuple(self.output_ids),
            prompt_logprobs=self.owes_prompt_logprobs,
            time_budget_s=None if self.deadline_s is None else self.deadline_s - now_s,
        )

    def accept(self, first_index: int, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens that are new: what was seen is dropped, and a gap means that tokens are lost."""
        if first_index > len(self.output_ids):
            raise PeerLostError(f"output token {len(self.output_ids)} is missing")
        fresh = token_ids[len(self.output_ids) - first_index :]
        self.output_ids += fresh
        return fresh
