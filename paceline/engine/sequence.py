"""A request's state inside an engine. Only the engine thread touches it."""

import enum
import math
from dataclasses import dataclass, field, replace

from paceline.core.block_hash import BlockHash
from paceline.core.request import FinishReason, Priority, SequenceId, SequenceSpec
from paceline.engine.block_tables import SequenceBlocks
from paceline.engine.cached_prefix import TokenChain
from paceline.engine.fairness import Account
from paceline.engine.step import SampleTask
from paceline.engine.swap import SavedPlace


class SequenceStatus(enum.Enum):
    """Where a sequence stands."""

    WAITING = "waiting"  # holds no block
    WAITING_FOR_KV = "waiting_for_kv"  # its blocks are reserved and are being filled from outside
    RUNNING = "running"
    PREEMPTED = "preempted"  # lost its blocks; waits to be computed again
    FINISHED = "finished"


class SequenceRole(enum.Enum):
    """What a sequence is here for."""

    GENERATE = "generate"  # compute the prompt and generate
    PREFILL_ONLY = "prefill_only"  # compute the prompt, give one token, hold the blocks until released
    AWAIT_KV = "await_kv"  # the prompt's KV comes from outside; becomes GENERATE when it is there
    LEND = "lend"  # hold what is cached of the prompt until released; compute nothing


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens so far, how many of them have KV, and the blocks that hold it.

        token_ids      [ prompt ............ | output (earlier attempts, then ours) ]
                       [ computed ...... | to compute .... ]
                         num_computed_tokens              num_tokens

    A sequence is scheduled until `num_computed_tokens` reaches `num_tokens`; then a token is sampled, which makes
    `num_tokens` one larger.

    Several `candidates` are one sequence, a family, until their known tokens are computed. Then each becomes its own.
    """

    spec: SequenceSpec
    role: SequenceRole
    # What the chain of its block hashes starts from.
    root: BlockHash
    blocks: SequenceBlocks
    account: Account
    eos_token_ids: frozenset[int]
    # Tells this life of its id from another one, should the id come twice.
    number: int
    arrival_s: float
    candidates: tuple[int, ...] = field(init=False)
    # The first of them, which names the sequence among its family.
    candidate: int = field(init=False)
    token_ids: list[int] = field(init=False)
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    # The round of preemptions that took its blocks last; 0: none.
    victim_of: int = 0
    # Hashes of the full blocks of token_ids; grows as blocks fill up. Empty when the cache is bypassed.
    block_hashes: list[BlockHash] = field(default_factory=list)
    started_s: float | None = None
    announced: bool = False
    num_announced_blocks: int = 0
    # Leading prompt tokens whose log probability has been told; the first one has none.
    num_scored_tokens: int = 1
    # Admissions that passed it by, since it did not fit.
    num_overtaken: int = 0
    # When it was refused for lack of room: blocks available then, in which step, and how many of its own were cached.
    refused_with: int | None = None
    refused_at_step: int = 0
    num_prefix_blocks: int = 0
    # How the next token is sampled, as long as that stays the same from token to token.
    lasting_tasks: tuple[SampleTask, ...] | None = None
    # Its KV in host memory, while it is swapped out.
    saved: list[SavedPlace] = field(default_factory=list)
    # The experts that computed its last token, a bit each; 0 while nobody tells.
    experts: int = 0
    # Leading tokens that another worker has computed, and may still have; whether they are asked for when it comes in.
    num_remote_tokens: int = 0
    is_recallable: bool = False
    # Blocks that came from there before its first chunk.
    num_pulled_blocks: int = 0
    # Which token would end it how, and how long it may become.
    ends: dict[int, FinishReason] = field(init=False)
    max_num_tokens: int = field(init=False)
    # Request and attempt, and the prompt's length; of the spec, but asked for in every step.
    sequence_id: SequenceId = field(init=False)
    num_prompt_tokens: int = field(init=False)
    # What names its blocks; it sees the lists above as they grow.
    chain: TokenChain = field(init=False)

    def __post_init__(self) -> None:
        spec = self.spec
        self.candidates = spec.candidates
        self.candidate = spec.candidates[0]
        self.token_ids = list(spec.known_ids)
        self.ends = {} if spec.ignore_eos else dict.fromkeys(self.eos_token_ids, FinishReason.EOS)
        self.ends.update(dict.fromkeys(spec.stop_token_ids, FinishReason.STOP))
        self.chain = TokenChain(self.root, self.block_hashes, self.token_ids)
        self.sequence_id = spec.sequence_id
        self.num_prompt_tokens = len(spec.prompt_ids)
        self.max_num_tokens = self.num_prompt_tokens + spec.max_tokens

    @property
    def turn_class(self) -> Priority:
        """The class in which it waits: a BATCH request that has begun, here or elsewhere, is not turned away any more."""
        has_begun = self.num_preemptions > 0 or self.spec.output_ids or self.role is SequenceRole.AWAIT_KV
        is_batch = self.spec.priority is Priority.BATCH
        return Priority.STANDARD if is_batch and has_begun else self.spec.priority

    @property
    def num_seats(self) -> int:
        """Sequences that will be of it: one a candidate, unless they go on elsewhere."""
        return 1 if self.role is SequenceRole.PREFILL_ONLY else len(self.candidates)

    @property
    def is_held(self) -> bool:
        """Whether its prompt is computed and others may read the blocks."""
        return self.role is SequenceRole.PREFILL_ONLY and self.status is SequenceStatus.FINISHED

    @property
    def awaited_hash(self) -> BlockHash | None:
        """The first block of it that was not cached when it was refused; once another one has computed that, it needs less room."""
        hashes = self.block_hashes
        return hashes[self.num_prefix_blocks] if self.num_prefix_blocks < len(hashes) else None

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is missing; 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Output so far, of earlier attempts too."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_to_grow(self) -> int:
        """Blocks that all its candidates may yet ask for, beyond those of the known tokens."""
        if self.role is SequenceRole.PREFILL_ONLY:
            return 0
        return self.num_seats * self.blocks.num_to_grow(len(self.token_ids), self.max_num_tokens - 1)

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether log probabilities of prompt tokens are still to be told; whoever computes the prompt elsewhere tells them."""
        is_ours = self.spec.prompt_logprobs and self.role is not SequenceRole.AWAIT_KV
        return is_ours and self.num_scored_tokens < len(self.spec.prompt_ids)

    @property
    def deadline_s(self) -> float:
        """When the caller stops waiting, on the scheduler's clock."""
        budget = self.spec.time_budget_s
        return math.inf if budget is None else self.arrival_s + budget

    @property
    def phase(self) -> str:
        """What a deadline that passes now has interrupted."""
        if self.role is SequenceRole.AWAIT_KV:
            return "transfer"
        if self.status is SequenceStatus.WAITING:
            return "queued"
        return "decode" if self.num_output_tokens > len(self.spec.output_ids) else "prefill"

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Tokens that may not be sampled next: those that would end the output before its least length."""
        return tuple(sorted(self.ends)) if self.num_output_tokens < self.spec.min_tokens else ()

    def end_with(self, token_id: int) -> FinishReason | None:
        """Whether, and how, `token_id` as the next token would end it."""
        reason = self.ends.get(token_id)
        if reason is None and len(self.token_ids) + 1 >= self.max_num_tokens:
            return FinishReason.LENGTH
        return reason

    def keep(self, candidates: tuple[int, ...]) -> None:
        """From now on it stands for these candidates only."""
        self.candidates = candidates
        self.candidate = candidates[0]
        self.lasting_tasks = None

    def fork(self, candidate: int, blocks: SequenceBlocks) -> "Sequence":
        """One candidate of a computed family as a sequence of its own, with these blocks."""
        other = replace(self, blocks=blocks, block_hashes=list(self.block_hashes), saved=[])
        other.keep((candidate,))
        return other

    def forget_blocks(self) -> None:
        """Gives up the blocks, and with them everything computed."""
        self.blocks.release()
        self.num_computed_tokens = 0
