"""What the world may do to everybody: lose, damage and repeat messages, end workers, make clients leave. Within a budget."""

from collections.abc import Iterator

from tests.kvtransfer.model.books import Rules, drop, forget, placed, put_request, send
from tests.kvtransfer.model.router import end, leave_attempt
from tests.kvtransfer.model.words import (
    HELD,
    LOSSY,
    STREAMING,
    Attempt,
    Block,
    Cause,
    Kind,
    Lease,
    Message,
    Phase,
    RequestPhase,
    State,
    Step,
    Worker,
)


def world_steps(rules: Rules, state: State) -> Iterator[Step]:
    """What may go wrong next; disorder is where messages arrive."""
    budget = state.budget
    if budget.losses:
        yield from _lose_or_damage(state)
    if budget.crashes:
        for worker in range(len(state.workers)):
            if _has_something(rules, state, worker):
                yield Step(Cause.WORLD, "crash", worker, _crash(rules, state, worker))
    if rules.instance.has_loans:
        yield from _evict(rules, state)
    if budget.leaves:
        for number, request in enumerate(state.requests):
            if request.phase in (RequestPhase.NEW, RequestPhase.RUNNING):
                ref = (number, request.attempt)
                yield Step(Cause.WORLD, "leave", ref, _leave(rules, state, number))


def _lose_or_damage(state: State) -> Iterator[Step]:
    budget = state.budget
    less = state._replace(budget=budget._replace(losses=budget.losses - 1), is_calm=False)
    for message in state.network:
        if message.kind in LOSSY:
            yield Step(Cause.WORLD, "lose", message, drop(less, message))
        if message.kind is Kind.PIECE:
            yield Step(Cause.WORLD, "damage", message, _damage(less, message))


def _evict(rules: Rules, state: State) -> Iterator[Step]:
    """Somebody else has needed the room: the prefix cache forgets what nobody holds."""
    for number, worker in enumerate(state.workers):
        for index, block in enumerate(worker.blocks):
            if block.name is not None and not block.holders:
                after = forget(state, number, index)
                yield Step(Cause.WORLD, "evict at", number, after)


def _damage(state: State, message: Message) -> State:
    return send(drop(state, message), message._replace(data=message.piece._replace(content=None)))


def _leave(rules: Rules, state: State, number: int) -> State:
    """The client goes. The router ends what is under way, and the request has come to its end."""
    request = state.requests[number]
    state = state._replace(budget=state.budget._replace(leaves=state.budget.leaves - 1))
    if request.phase is RequestPhase.RUNNING:
        state = leave_attempt(rules, state, (number, request.attempt))
    return put_request(state, number, end(request, RequestPhase.LEFT))


def _has_something(rules: Rules, state: State, worker: int) -> bool:
    """Whether it makes a difference that a worker dies: somebody names it, or it has something cached."""
    is_named = any(worker in (attempt.owner, attempt.receiver) for _, attempt in placed(rules, state))
    return is_named or any(block.name is not None for block in state.workers[worker].blocks)


def _crash(rules: Rules, state: State, number: int) -> State:
    """The worker is killed and comes back in another life: leases, sequences and cache are gone."""
    worker = state.workers[number]
    reborn = Worker(worker.epoch + 1, (Block(),) * len(worker.blocks))
    workers = (*state.workers[:number], reborn, *state.workers[number + 1 :])
    attempts = tuple(attempt and _forget(attempt, number, worker.epoch) for attempt in state.attempts)
    budget = state.budget._replace(crashes=state.budget.crashes - 1)
    return state._replace(workers=workers, attempts=attempts, budget=budget, is_calm=False)


def _forget(attempt: Attempt, worker: int, epoch: int) -> Attempt:
    if (attempt.owner, attempt.owner_epoch) == (worker, epoch) and attempt.lease in (*STREAMING, *HELD):
        lease = Lease.BROKEN if attempt.lease in STREAMING else Lease.LOST
        attempt = attempt._replace(lease=lease, table=(), num_ready=0, ticks=0)
    if (attempt.receiver, attempt.receiver_epoch) == (worker, epoch):
        attempt = attempt._replace(phase=Phase.ENDED, reserved=(), num_sent=0, num_arrived=0)
    return attempt
