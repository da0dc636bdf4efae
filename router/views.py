"""What placement decides by: plain facts about workers and about a prompt."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.core.pace import ByClass, FastLane, Pace, PendingTokens
from paceline.core.prefix import WorkerKey
from paceline.core.request import Priority, SequenceSpec


@dataclass(frozen=True, slots=True)
class Ask:
    """What a worker's scheduler will know a request by."""

    priority: Priority = Priority.STANDARD
    num_prompt_tokens: int = 0
    max_tokens: int = 0
    num_candidates: int = 1
    # Output tokens that it is sure to have, if it has any.
    min_output_tokens: int = 1

    @classmethod
    def of(cls, spec: SequenceSpec) -> "Ask":
        """What is asked for."""
        surely = spec.max_tokens if spec.ignore_eos and not spec.stop_token_ids else max(1, spec.min_tokens)
        return cls(spec.priority, len(spec.prompt_ids), spec.max_tokens, len(spec.candidates), surely)

    def is_fast_in(self, lane: FastLane) -> bool:
        """As in paceline/engine/admission.py."""
        return (
            lane.share > 0
            and self.num_prompt_tokens <= lane.prompt_tokens
            and self.max_tokens <= lane.output_tokens
            and self.num_candidates == 1
            and self.priority is not Priority.BATCH
        )


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """What a worker has said that a prediction needs: how fast it is, and what comes before a newcomer."""

    pace: Pace
    pending: PendingTokens
    # Sequences that have not begun.
    waiting: ByClass
    is_blocked: bool
    max_seats: int
    max_step_tokens: int
    fast_lane: FastLane


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What placement knows of a worker: who it is, its last load report, and what was sent to it since."""

    key: WorkerKey
    address: str
    # The digest of its fingerprint, and tokens in a block: workers with another one cut the same KV into other blocks.
    fingerprint: bytes
    block_size: int
    num_blocks: int
    num_free_blocks: int
    num_running: int
    num_waiting: int
    num_pending_tokens: int
    draining: bool
    # What this router has sent there and what is not done yet; reports lag behind these.
    num_assigned_tokens: int
    num_assigned_sequences: int
    # It admits nobody for now, and asks for less work.
    cooling_down: bool = False
    # Whether its last report is a fresh one. What is not known counts as high, never as nothing.
    is_load_known: bool = True
    # What this router has sent, by lane and class; and None where a worker has not said how fast it is.
    assigned: PendingTokens = field(default_factory=PendingTokens)
    queue: QueueFacts | None = None

    @property
    def num_queued_tokens(self) -> int:
        """Tokens to be computed before a new request's turn; the higher of what is reported and what was sent."""
        return max(self.num_pending_tokens, self.num_assigned_tokens)

    @property
    def num_sequences(self) -> int:
        """Sequences that a new request would share the worker with; the higher of what is reported and what was sent."""
        return max(self.num_running + self.num_waiting, self.num_assigned_sequences)


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """What placement knows of a request: its lengths, and how many leading blocks, of its own size, each worker holds."""

    num_tokens: int
    held_blocks: Mapping[WorkerKey, int]
    # Names of workers that computed it in an attempt that failed; one that answers nothing may still seem to be there.
    failed_on: frozenset[str] = frozenset()
    # The most output tokens that may follow, for each candidate.
    max_tokens: int = 0
    num_candidates: int = 1
    # Where it stands on the ring: what its prompt begins with, or its session.
    ring_key: bytes = b""

    def num_held(self, worker: WorkerView) -> int:
        """Leading blocks that this worker holds."""
        return self.held_blocks.get(worker.key, 0)

    def num_held_tokens(self, worker: WorkerView) -> int:
        """Leading tokens that this worker need not compute; the last one is always computed."""
        return min(self.num_held(worker) * worker.block_size, self.num_tokens - 1)

    def num_uncached_tokens(self, worker: WorkerView) -> int:
        """Tokens that this worker would have to compute."""
        return self.num_tokens - self.num_held_tokens(worker)

    def num_missing_blocks(self, worker: WorkerView) -> int:
        """Blocks of the prompt that this worker would have to find room for."""
        return max(0, -(-self.num_tokens // worker.block_size) - self.num_held(worker))
