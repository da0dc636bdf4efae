"""Chooses the workers of a request: small functions on plain data, without clock, network or state."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

from paceline.core.errors import NoEndpointError
from paceline.core.prefix import PrefixHint, PrefixOwner
from router.costs import (
    Lendable,
    RouteCosts,
    apart_cost,
    batch_cost,
    lendable,
    local_cost,
    prefill_cost,
)
from router.policies import POLICIES, Choice, Option, PlacementPolicy
from router.views import PromptFacts, WorkerView

DisaggregateMode = Literal["always", "auto", "never"]

# An answer is expected to be no longer than this; room for more is found when it is needed.
_EXPECTED_TOKENS: Final = 256


@dataclass(frozen=True, slots=True)
class Rules:
    """By what requests are placed; the same from the start to the end of a router."""

    mode: DisaggregateMode = "auto"
    policy: PlacementPolicy = "prefix-aware"
    costs: RouteCosts = field(default_factory=RouteCosts)


@dataclass(frozen=True, slots=True)
class Turn:
    """What changes from request to request: how many came before, and in which order its key meets the workers of each tier.

    Whoever is not in the order comes after those that are.
    """

    number: int = 0
    prefill_order: tuple[str, ...] = ()
    decode_order: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes; without a prefill worker the decode worker computes the prompt itself.

    `hint` names who may have more of the prompt than the one that computes it; `num_tokens` are those that it has to compute, as
    far as the prefix table knows.
    """

    prefill: WorkerView | None
    decode: WorkerView
    hint: PrefixHint | None = None
    num_tokens: int = 0

    @property
    def computing(self) -> WorkerView:
        """Who computes the prompt."""
        return self.prefill or self.decode


def place(
    prompt: PromptFacts,
    prefill: Sequence[WorkerView],
    decode: Sequence[WorkerView],
    rules: Rules,
    turn: Turn,
) -> Route:
    """The route of one request; raises NoEndpointError when a tier that it needs has nobody who takes requests."""
    everybody = (*prefill, *decode)
    lent = lendable(prompt, everybody, rules.costs)
    apart = _choose_prefill(prompt, prefill, rules, turn)
    chosen = _choose_decode(prompt, apart, decode, lent, rules, turn)
    if apart is not None and rules.mode == "auto":
        local = local_cost(prompt, chosen, lent, rules.costs)
        apart = apart if apart_cost(prompt, apart, chosen, lent, rules.costs) < local else None
    computing = apart or chosen
    hint = prefix_hint(prompt, computing, everybody)
    return Route(apart, chosen, hint, prompt.num_uncached_tokens(computing))


def can_compute(
    prompt: PromptFacts, prefill: Sequence[WorkerView], decode: Sequence[WorkerView], mode: DisaggregateMode
) -> list[WorkerView]:
    """The workers of both tiers at which the prompt may be computed."""
    apart = [] if mode == "never" else first_class(prefill, prompt.failed_on)
    here = [] if mode == "always" else first_class(decode, prompt.failed_on)
    return apart + here


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


# -- who computes, if it is not the decode worker


def _choose_prefill(
    prompt: PromptFacts, prefill: Sequence[WorkerView], rules: Rules, turn: Turn
) -> WorkerView | None:
    if rules.mode == "never":
        return None
    taking = first_class(prefill, prompt.failed_on)
    if not taking:
        if rules.mode == "always":
            raise NoEndpointError("no prefill worker is there; start one, or use --disaggregate auto")
        return None
    return _choose(
        taking,
        turn.prefill_order,
        load=lambda worker: worker.num_queued_tokens,
        cost=partial(prefill_cost, prompt),
        policy=rules.policy,
        size=prompt.num_tokens,
        turn=turn.number,
        is_cold=_is_cold(prompt, taking),
    )


# -- who generates


def _choose_decode(
    prompt: PromptFacts,
    apart: WorkerView | None,
    decode: Sequence[WorkerView],
    lent: Lendable,
    rules: Rules,
    turn: Turn,
) -> WorkerView:
    taking = first_class(decode, prompt.failed_on)
    if not taking:
        raise NoEndpointError("no decode worker is there; start one or wait until it is up")

    def cost(worker: WorkerView) -> float:
        """That of the cheapest way to have the request there."""
        ways = []
        if apart is not None:
            ways.append(apart_cost(prompt, apart, worker, lent, rules.costs))
        if apart is None or rules.mode == "auto":
            ways.append(local_cost(prompt, worker, lent, rules.costs))
        return min(ways) + batch_cost(worker, rules.costs)

    return _choose(
        [worker for worker in taking if has_room(prompt, worker)] or taking,
        turn.decode_order,
        load=lambda worker: worker.num_sequences,
        cost=cost,
        policy=rules.policy,
        size=prompt.num_candidates,
        turn=turn.number,
        is_cold=apart is None and _is_cold(prompt, taking),
    )


def has_room(prompt: PromptFacts, worker: WorkerView) -> bool:
    """Whether there are blocks for what it misses, for the answer, and for the next block of everybody who is there."""
    answer = -(-min(prompt.max_tokens, _EXPECTED_TOKENS) // worker.block_size)
    growth = answer * prompt.num_candidates + worker.num_sequences
    return worker.num_free_blocks >= prompt.num_missing_blocks(worker) + growth


# -- both


def first_class(workers: Iterable[WorkerView], failed_on: frozenset[str]) -> list[WorkerView]:
    """Those that take requests and that there is least against; one thing is worse than all that come after it."""

    def objections(worker: WorkerView) -> tuple[bool, bool, bool]:
        has_failed = worker.key.worker_id in failed_on
        return has_failed, not worker.is_load_known, worker.cooling_down

    taking = [worker for worker in workers if not worker.draining]
    least = min(map(objections, taking), default=None)
    return [worker for worker in taking if objections(worker) == least]


def _is_cold(prompt: PromptFacts, workers: Sequence[WorkerView]) -> bool:
    return not any(prompt.num_held(worker) for worker in workers)


def _choose(
    workers: Sequence[WorkerView],
    order: Sequence[str],
    *,
    load: Callable[[WorkerView], int],
    cost: Callable[[WorkerView], float],
    policy: PlacementPolicy,
    size: int,
    turn: int,
    is_cold: bool,
) -> WorkerView:
    """What the policy says of these workers."""
    place_of = {name: index for index, name in enumerate(order)}
    on_ring = sorted(workers, key=lambda w: (place_of.get(w.key.worker_id, len(order)), w.key))
    options = tuple(Option(worker.key, load(worker), cost(worker)) for worker in on_ring)
    chosen = POLICIES[policy](Choice(options, size, turn, is_cold))
    return next(worker for worker in workers if worker.key == chosen.key)
