"""What is asked for: by a client (`Request`), and of a worker (`SequenceSpec`). All frozen, all valid."""

import enum
from dataclasses import dataclass
from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
LeaseId = NewType("LeaseId", str)
BootEpoch = NewType("BootEpoch", int)


class SequenceId(NamedTuple):
    """One attempt at one request; a retry is another sequence, so that stale work is told apart."""

    request_id: RequestId
    attempt: int


class FinishReason(enum.Enum):
    """Why a candidate ended, as the client sees it."""

    STOP = "stop"
    LENGTH = "length"
    EOS = "eos"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str


# Text, token ids, or the messages of a chat.
Prompt = str | tuple[int, ...] | tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Temperature 0 is greedy; the other defaults change nothing.

    They apply in the order logit_bias, penalties, temperature, top_k, top_p, min_p.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    # (token id, what is added to its logit), by token id.
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def has_penalties(self) -> bool:
        """Whether the choice depends on the tokens seen so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a candidate ends. `max_tokens` None means the server's default."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for. `sampling.seed` is minted where the client gave none."""

    prompt: Prompt
    sampling: SamplingParams
    stopping: StopConditions
    client_request_id: str = ""
    bypass_cache: bool = False
    # The most probable alternatives to return with each token; None: no log probabilities at all.
    num_top_logprobs: int | None = None
    # Log probabilities of the prompt's tokens too.
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One sequence for a worker to compute.

    `output_ids` were generated, and sent to the client, by earlier attempts: they are input now, but they still
    count as output for limits, positions and usage.
    """

    sequence_id: SequenceId
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    output_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_top_logprobs: int | None = None
    prompt_logprobs: bool = False
    bypass_cache: bool = False
    cache_scope: str = ""
    time_budget_s: float | None = None

    @property
    def known_ids(self) -> tuple[int, ...]:
        """Prompt and earlier output: every token whose KV must be computed before a new one can be sampled."""
        return self.prompt_ids + self.output_ids


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How probable a token was, and the most probable ones at its place: (token id, log probability), best first.

    Of the model's own distribution: before bias, penalties, temperature and filters.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The token that a prefill ends with, and whether it already ends the candidate."""

    token_id: int
    finish_reason: FinishReason | None = None
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a request may ask for; the router adds the model's own lengths to these."""

    max_model_tokens: int
    max_output_tokens: int
    vocab_size: int
    max_prompt_bytes: int = 1 << 20
    max_n: int = 1
    max_stop_count: int = 16
    max_stop_chars: int = 256
    max_logit_bias: int = 1024

    @property
    def max_prompt_tokens(self) -> int:
        """A prompt must leave room for one output token."""
        return self.max_model_tokens - 1
