"""What a request costs on a worker, so that ways can be compared: tokens that could be computed in the same time.

The numbers are few and plain, and docs/routing.md says where each comes from.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from router.views import PromptFacts, WorkerView

# More than any queue: whoever's load is not known is taken for busy.
_UNKNOWN_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class RouteCosts:
    """The exchange rates, all in tokens of a prompt that could be computed meanwhile."""

    # A hand-over apart from its blocks: round trips, and a step of its own where a chunk would have joined one.
    handover_tokens: int = 16
    # To move the KV of one token between workers.
    moved_token: float = 0.02
    # How much it weighs that one decoding sequence waits while a token of somebody's prompt is computed.
    disturbance: float = 0.25
    # What it costs to share decode steps with one more sequence, over a whole answer.
    sequence_tokens: int = 100
    # Whether workers pull from each other what they have cached, instead of computing it.
    pulls: bool = True


# How many of a prompt's tokens somebody could lend, by the fingerprint of those that can use them.
Lendable = Mapping[bytes, int]


def lendable(prompt: PromptFacts, everybody: Iterable[WorkerView], costs: RouteCosts) -> Lendable:
    """What can be pulled; also from one that drains."""
    most: dict[bytes, int] = {}
    for worker in everybody if costs.pulls else ():
        most[worker.fingerprint] = max(most.get(worker.fingerprint, 0), prompt.num_held_tokens(worker))
    return most


def local_cost(prompt: PromptFacts, decode: WorkerView, lent: Lendable, costs: RouteCosts) -> float:
    """The decode worker computes the prompt.

    Its queue, what is to be pulled and computed, and the wait of those that decode there meanwhile: one more than are there now,
    since somebody may come. The prompt's last token holds nobody up: it is computed as each of theirs is.
    """
    computed, pulled = _work(prompt, decode, lent)
    waiting = (computed - 1) * (decode.num_sequences + 1)
    return _queue(decode) + computed + waiting * costs.disturbance + pulled * costs.moved_token


def apart_cost(
    prompt: PromptFacts,
    prefill: WorkerView,
    decode: WorkerView,
    lent: Lendable,
    costs: RouteCosts,
) -> float:
    """A prefill worker computes the prompt: its queue, its work, the hand-over and the blocks that decode does not hold."""
    computed, pulled = _work(prompt, prefill, lent)
    num_moved = pulled + prompt.num_uncached_tokens(decode)
    return _queue(prefill) + computed + costs.handover_tokens + num_moved * costs.moved_token


def prefill_cost(prompt: PromptFacts, worker: WorkerView) -> float:
    """Of a worker of the prefill tier: tokens until this prompt is computed.

    What it could pull counts as to be computed, so that a prefix stays where it is until that is worth less than a queue.
    """
    return worker.num_queued_tokens + prompt.num_uncached_tokens(worker)


def batch_cost(worker: WorkerView, costs: RouteCosts) -> float:
    """What the company on a decode worker costs."""
    return worker.num_sequences * costs.sequence_tokens


def num_computed(prompt: PromptFacts, worker: WorkerView, lent: Lendable) -> int:
    """Tokens that it computes, once what can be pulled is there."""
    return _work(prompt, worker, lent)[0]


def _queue(worker: WorkerView) -> int:
    return worker.num_queued_tokens + (0 if worker.is_load_known else _UNKNOWN_TOKENS)


def _work(prompt: PromptFacts, worker: WorkerView, lent: Lendable) -> tuple[int, int]:
    """How many tokens it computes, and how many it pulls from whoever holds most."""
    own = prompt.num_held_tokens(worker)
    most = max(own, lent.get(worker.fingerprint, 0))
    return prompt.num_tokens - most, most - own
