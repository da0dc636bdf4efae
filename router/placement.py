"""Chooses the workers of a request: small functions on plain data, without clock, network or state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import NoEndpointError
from paceline.core.prefix import PrefixHint, PrefixOwner, WorkerKey

DisaggregateMode = Literal["always", "auto", "never"]


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
    """What placement knows of a request: its length, and how many leading blocks, of its own size, each worker holds."""

    num_tokens: int
    held_blocks: Mapping[WorkerKey, int]
    # Names of prefill workers where an earlier attempt failed; one that answers nothing may still seem to be there.
    failed_on: frozenset[str] = frozenset()

    def num_uncached_tokens(self, worker: WorkerView) -> int:
        """Tokens that this worker would have to compute."""
        return self.num_tokens - worker.block_size * self.num_held(worker)

    def num_held(self, worker: WorkerView) -> int:
        """Leading blocks that this worker holds."""
        return self.held_blocks.get(worker.key, 0)


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes; without a prefill worker the decode worker computes the prompt itself.

    `hint` names who may have more of the prompt than the one that computes it.
    """

    prefill: WorkerView | None
    decode: WorkerView
    hint: PrefixHint | None = None


def place(
    prompt: PromptFacts,
    prefill: Sequence[WorkerView],
    decode: Sequence[WorkerView],
    mode: DisaggregateMode,
    local_prefill_tokens: int,
) -> Route:
    """The route of one request; raises NoEndpointError when a tier that it needs has nobody who takes requests."""
    prefill_taking = _others_first([worker for worker in prefill if not worker.draining], prompt.failed_on)
    decode_taking = [worker for worker in decode if not worker.draining]
    if not decode_taking:
        raise NoEndpointError("no decode worker is there; start one or wait until it is up")
    if mode == "always" and not prefill_taking:
        raise NoEndpointError("no prefill worker is there; start one, or use --disaggregate auto")
    chosen = min(decode_taking, key=lambda worker: decode_cost(prompt, worker))
    is_short = prompt.num_uncached_tokens(chosen) <= local_prefill_tokens
    everybody = (*prefill, *decode)
    if mode == "never" or not prefill_taking or (mode == "auto" and is_short):
        return Route(None, chosen, prefix_hint(prompt, chosen, everybody))
    computing = min(prefill_taking, key=lambda worker: prefill_cost(prompt, worker))
    return Route(computing, chosen, prefix_hint(prompt, computing, everybody))


def prefix_hint(
    prompt: PromptFacts, computing: WorkerView, everybody: Sequence[WorkerView]
) -> PrefixHint | None:
    """Who holds most of the prompt, if that is more than the worker holds that computes it; also one that drains.

    Of several the one that is least busy. Whoever cuts its blocks in another way lends none.
    """
    alike = [worker for worker in everybody if worker.fingerprint == computing.fingerprint]
    owner = max(alike, key=lambda worker: (prompt.num_held(worker), -worker.num_sequences, worker.key))
    if prompt.num_held(owner) <= prompt.num_held(computing):
        return None
    num_tokens = prompt.num_held(owner) * owner.block_size
    return PrefixHint(PrefixOwner(owner.key.worker_id, owner.address, owner.key.boot_epoch), num_tokens)


def _others_first(workers: list[WorkerView], failed_on: frozenset[str]) -> list[WorkerView]:
    return [worker for worker in workers if worker.key.worker_id not in failed_on] or workers


def prefill_cost(prompt: PromptFacts, worker: WorkerView) -> tuple[bool, int, WorkerKey]:
    """First whether it asks for less work, then the tokens to compute until this prompt is done there.

    Equal costs go to the same worker, so that prefixes gather.
    """
    num_tokens = worker.num_queued_tokens + prompt.num_uncached_tokens(worker)
    return worker.cooling_down, num_tokens, worker.key


def decode_cost(prompt: PromptFacts, worker: WorkerView) -> tuple[bool, bool, int, int, WorkerKey]:
    """First whether the worker asks for less work, then whether the prompt has to wait for room, then the batch it joins.

    What has to travel there comes last.
    """
    missing_blocks = -(-prompt.num_tokens // worker.block_size) - prompt.num_held(worker)
    has_no_room = worker.num_free_blocks < missing_blocks
    return worker.cooling_down, has_no_room, worker.num_sequences, missing_blocks, worker.key
