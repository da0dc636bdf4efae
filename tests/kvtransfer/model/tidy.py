"""Forgets what cannot matter any more, so that states that differ in nothing else are one state.

Each rule says why nothing that may still happen could tell the difference. A mutant that reads what is forgotten here is
explored as it is.
"""

from tests.kvtransfer.model.books import Rules, attempt_of, drop, owner_lives, placed, receiver_lives
from tests.kvtransfer.model.owner import has_ended
from tests.kvtransfer.model.words import (
    LEASE_ENDS,
    REQUEST_ENDS,
    Block,
    Kind,
    Message,
    Mutation,
    Phase,
    RequestPhase,
    State,
)

READS_THE_PAST = (
    Mutation.WRITE_AFTER_ABORT,
    Mutation.OLD_RESULTS_COUNT,
    Mutation.FREE_TWICE,
    Mutation.EPOCH_NOT_CHECKED,
    Mutation.LATE_RELEASE_IS_VALID,
    Mutation.ASK_AGAIN,
    Mutation.PARK_BEFORE_PREFILL,
)


def tidy(rules: Rules, state: State) -> State:
    """The same state for all that may happen from now on."""
    if rules.mutation in READS_THE_PAST:
        return state
    idle = [message for message in state.network if _says_nothing(rules, state, message)]
    if idle:
        state = drop(state, *idle)
    state = _forget_lives(rules, _forget_attempts(rules, state))
    return state if rules.instance.shares_prefix else _forget_names(state)


def _says_nothing(rules: Rules, state: State, message: Message) -> bool:
    """Whoever gets it would ignore it, now and later: leases and phases only go forward, and so do attempts."""
    attempt = attempt_of(rules, state, message.ref)
    match message.kind:
        case Kind.RELEASE:
            is_over = attempt.lease in LEASE_ENDS or not owner_lives(state, attempt)
            waits = attempt.phase is Phase.CONFIRMING and receiver_lives(state, attempt)
            return is_over and not (waits and message.data == "confirm")
        case Kind.CLOSE:
            return attempt.lease in LEASE_ENDS or not owner_lives(state, attempt)
        case Kind.ANSWER:
            return attempt.phase is not Phase.CONFIRMING or not receiver_lives(state, attempt)
        case Kind.PIECE:
            return attempt.phase is not Phase.PULLING or not receiver_lives(state, attempt)
        case Kind.TICKET | Kind.WIRE:
            return not receiver_lives(state, attempt)
        case Kind.CANCEL:
            return attempt.phase is Phase.ENDED or not receiver_lives(state, attempt)
        case _:
            number, which = message.ref
            request = state.requests[number]
            return request.phase is not RequestPhase.RUNNING or request.attempt != which


def _forget_attempts(rules: Rules, state: State) -> State:
    """Of an attempt that is over on both sides nobody speaks, once its request is over or has another one."""
    if not any(state.attempts):
        return state
    spoken_of = {message.ref for message in state.network}
    # A loan that is not over says to its borrower how it went.
    spoken_of |= {
        (ref[0], loan.parent)
        for ref, loan in placed(rules, state)
        if loan.parent is not None and not has_ended(loan)
    }
    attempts = list(state.attempts)
    for index, attempt in enumerate(attempts):
        number, which = ref = divmod(index, rules.slots)
        request = state.requests[number]
        is_current = request.phase is RequestPhase.RUNNING and request.attempt == which
        if attempt is not None and has_ended(attempt) and not is_current and ref not in spoken_of:
            attempts[index] = None
    return state if tuple(attempts) == state.attempts else state._replace(attempts=tuple(attempts))


def _forget_lives(rules: Rules, state: State) -> State:
    """An epoch tells lives apart. Of a worker that no attempt names any more one life is as good as another."""
    if not any(worker.epoch for worker in state.workers):
        return state
    named = {worker for _, attempt in placed(rules, state) for worker in (attempt.owner, attempt.receiver)}
    workers = tuple(
        worker if number in named else worker._replace(epoch=0) for number, worker in enumerate(state.workers)
    )
    return state if workers == state.workers else state._replace(workers=workers)


def _forget_names(state: State) -> State:
    """Nobody asks for the blocks of a request that is over. Which free block is taken next makes no difference."""
    over = {number for number, request in enumerate(state.requests) if request.phase in REQUEST_ENDS}
    if not over:
        return state
    workers = tuple(
        worker._replace(
            blocks=tuple(
                Block() if block.name is not None and not block.holders and block.name[0] in over else block
                for block in worker.blocks
            )
        )
        for worker in state.workers
    )
    return state if workers == state.workers else state._replace(workers=workers)
