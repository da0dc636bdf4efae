"""What must hold of every state of the protocol, and from where what must be reachable."""

from collections import Counter
from collections.abc import Callable

from tests.kvtransfer.model.books import Rules, owner_lives, placed, receiver_lives
from tests.kvtransfer.model.owner import has_ended
from tests.kvtransfer.model.words import LEASE_ENDS, REQUEST_ENDS, Kind, Lease, Phase, RequestPhase, State


def right_bytes(rules: Rules, state: State) -> bool:
    """Whoever decodes has the KV of its own prompt in each of its blocks, and in its own layout."""
    return all(
        state.workers[attempt.receiver].blocks[index].content
        == rules.content(ref[0], ordinal, attempt.receiver)
        for ref, attempt in placed(rules, state)
        if attempt.phase is Phase.DECODING and receiver_lives(state, attempt)
        for ordinal, index in enumerate(attempt.reserved)
    )


def one_writer(rules: Rules, state: State) -> bool:
    """What is being written in place goes to a block that its own attempt holds, in the life that it was meant for."""
    attempts = dict(placed(rules, state))
    for message in state.network:
        if message.kind is Kind.WIRE:
            attempt, target = attempts[message.ref], message.wire.target
            holders = state.workers[attempt.receiver].blocks[target].holders
            if receiver_lives(state, attempt) and message.ref not in holders:
                return False
    return True


def valid_at_commit(rules: Rules, state: State) -> bool:
    """Nobody has committed whose owner did not say, after the last byte, that the lease held until then."""
    return all(
        attempt.lease is Lease.CONFIRMED
        for _, attempt in placed(rules, state)
        if attempt.phase in (Phase.DECODING, Phase.PREEMPTED, Phase.RECALLING)
    )


def books(rules: Rules, state: State) -> bool:
    """A block is held by exactly those whose tables name it; all others are free."""
    held: Counter[tuple[int, int, object]] = Counter()
    for ref, attempt in placed(rules, state):
        if attempt.lease not in LEASE_ENDS and owner_lives(state, attempt):
            held.update((attempt.owner, index, ref) for index in attempt.table)
        if attempt.phase is not Phase.ENDED and receiver_lives(state, attempt):
            held.update((attempt.receiver, index, ref) for index in attempt.reserved)
    noted = {
        (number, index, ref)
        for number, worker in enumerate(state.workers)
        for index, block in enumerate(worker.blocks)
        for ref in block.holders
    }
    return noted == held.keys()


def one_end(rules: Rules, state: State) -> bool:
    """A request ends once."""
    return all(request.num_ends == (request.phase in REQUEST_ENDS) for request in state.requests)


def no_needless_failure(rules: Rules, state: State) -> bool:
    """Where nothing has gone wrong no attempt fails."""
    return not state.is_calm or all(
        request.attempt == 0 and request.phase is not RequestPhase.FAILED for request in state.requests
    )


Property = Callable[[Rules, State], bool]
SAFETY: tuple[Property, ...] = (
    right_bytes,
    one_writer,
    valid_at_commit,
    books,
    one_end,
    no_needless_failure,
)


def is_quiet(rules: Rules, state: State) -> bool:
    """Every request has ended, nothing is on its way, nobody waits, and every pool is whole."""
    return (
        all(request.phase in REQUEST_ENDS for request in state.requests)
        and not state.network
        and all(
            has_ended(attempt)
            or (attempt.phase is Phase.UNKNOWN and attempt.lease not in (Lease.OPEN, Lease.COMPLETE))
            for _, attempt in placed(rules, state)
        )
        and not any(block.holders for worker in state.workers for block in worker.blocks)
    )


# What is_quiet must be reachable by; the explorer checks both.
NO_LEAK = "no_leak"  # from every state, by the protocol and its clocks
NO_WAITING_FOR_A_CLOCK = (
    "no_waiting_for_a_clock"  # from every state in which nothing has gone wrong, by the protocol alone
)
