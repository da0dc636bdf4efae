"""What an owner may do: take room, compute, grant the lease, send while it holds, and end it once.

The owner is a prefill worker or, of a loan, whoever has a cached prefix.
"""

from collections.abc import Iterator

from tests.kvtransfer.model.books import (
    Rules,
    attempt_of,
    compute_block,
    drop,
    end_lease,
    find,
    give_back,
    hold,
    owner_lives,
    pin,
    publish,
    put,
    receiver_lives,
    send,
)
from tests.kvtransfer.model.words import (
    HELD,
    LEASE_ENDS,
    STREAMING,
    Attempt,
    Cause,
    Kind,
    Lease,
    Message,
    Mutation,
    Phase,
    Piece,
    Ref,
    State,
    Step,
    Wire,
)


def owner_steps(rules: Rules, state: State, ref: Ref, attempt: Attempt) -> Iterator[Step]:
    """What may come next at the owner of one attempt."""
    if not owner_lives(state, attempt):
        return
    if attempt.lease is Lease.QUEUED:
        yield from _admit(rules, state, ref, attempt)
    elif attempt.lease in (Lease.ADMITTED, Lease.OPEN):
        yield from _compute(rules, state, ref, attempt)
    if attempt.lease in HELD and attempt.phase is Phase.PULLING:
        yield from _send(rules, state, ref, attempt)
    if attempt.lease is Lease.COMPLETE:
        yield _tick(rules, state, ref, attempt)
        if attempt.parent is not None:
            yield Step(Cause.PROTOCOL, "revoke", ref, end_lease(rules, state, ref, Lease.DROPPED))


def _admit(rules: Rules, state: State, ref: Ref, attempt: Attempt) -> Iterator[Step]:
    """The blocks of the whole prompt, or none. Nothing is published before it is computed."""
    owner, name = attempt.owner, rules.content(ref[0], 0, attempt.owner)
    cached = find(state, owner, name)
    taken = hold(state, owner, ref, attempt.num_blocks, cached)
    if taken is None:
        return
    after, table = taken
    if rules.mutation is Mutation.PUBLISH_WHEN_SCHEDULED:
        after = publish(after, owner, table[0], name)
    admitted = attempt._replace(lease=Lease.ADMITTED, table=table, num_ready=int(cached is not None))
    yield Step(Cause.PROTOCOL, "admit", ref, put(rules, after, ref, admitted))
    if rules.instance.has_loans and cached is None:
        borrowing = put(rules, after, ref, admitted._replace(lease=Lease.BORROWING))
        for lender in range(rules.instance.num_prefill, len(state.workers)):
            loan = lend(rules, borrowing, ref, lender, owner, table[0])
            if loan is not None:
                yield Step(Cause.PROTOCOL, "borrow", ref, loan)


def _compute(rules: Rules, state: State, ref: Ref, attempt: Attempt) -> Iterator[Step]:
    """The next block. With the first one the lease is granted, with the last one its clock starts."""
    after = compute_block(rules, state, attempt.owner, ref[0], attempt.table, attempt.num_ready)
    num_ready = attempt.num_ready + 1
    is_last = num_ready == attempt.num_blocks
    lease, ticks = (Lease.COMPLETE, rules.instance.ttl_ticks) if is_last else (Lease.OPEN, 0)
    after = put(rules, after, ref, attempt._replace(lease=lease, num_ready=num_ready, ticks=ticks))
    if attempt.lease is Lease.ADMITTED and rules.mutation is not Mutation.PARK_BEFORE_PREFILL:
        after = send(after, Message(Kind.TICKET, ref))
    yield Step(Cause.PROTOCOL, f"compute block {attempt.num_ready} of", ref, after)


def _send(rules: Rules, state: State, ref: Ref, attempt: Attempt) -> Iterator[Step]:
    """The next block that is ready. The lease is asked in the same step in which the block is read."""
    ordinal = attempt.num_sent
    if ordinal >= attempt.num_ready or not receiver_lives(state, attempt):
        return
    source = attempt.table[ordinal]
    content = state.workers[attempt.owner].blocks[source].content
    # The checksum is that of the block when it was computed.
    if rules.instance.in_place:
        message = Message(Kind.WIRE, ref, Wire(ordinal, source, attempt.reserved[ordinal], content))
    else:
        message = Message(Kind.PIECE, ref, Piece(ordinal, content, content))
    after = put(rules, state, ref, attempt._replace(num_sent=ordinal + 1))
    yield Step(Cause.PROTOCOL, f"send block {ordinal} of", ref, send(after, message))


def _tick(rules: Rules, state: State, ref: Ref, attempt: Attempt) -> Step:
    """Time passes, on the owner's clock."""
    if attempt.ticks > 1:
        return Step(
            Cause.CLOCK, "tick", ref, put(rules, state, ref, attempt._replace(ticks=attempt.ticks - 1))
        )
    after = end_lease(rules, state, ref, Lease.EXPIRED)
    return Step(Cause.CLOCK, "expire", ref, after._replace(is_calm=False))


def hear_release(rules: Rules, state: State, message: Message) -> State:
    """Ends the lease, once. Whoever asks because all has come hears whether it held until now; all others need not know."""
    ref = message.ref
    attempt = attempt_of(rules, state, ref)
    is_held = attempt.lease in HELD and owner_lives(state, attempt)
    is_confirm = message.data == "confirm"
    if is_held:
        state = end_lease(rules, state, ref, Lease.CONFIRMED if is_confirm else Lease.RELEASED)
    elif (
        rules.mutation is Mutation.FREE_TWICE and attempt.lease in LEASE_ENDS and owner_lives(state, attempt)
    ):
        state = _free_again(state, attempt)
    if not is_confirm:
        return state
    is_valid = is_held or rules.mutation is Mutation.LATE_RELEASE_IS_VALID
    return send(state, Message(Kind.ANSWER, ref, "valid" if is_valid else "expired"))


def _free_again(state: State, attempt: Attempt) -> State:
    """One reference less on each block that the lease once held, whoever has it now."""
    for index in attempt.table:
        for holder in state.workers[attempt.owner].blocks[index].holders:
            state = give_back(state, attempt.owner, holder, (index,))
    return state


def hear_close(rules: Rules, state: State, ref: Ref) -> State:
    """The Prefill stream has ended. A complete lease is not concerned: its reader or its clock ends it."""
    attempt = attempt_of(rules, state, ref)
    if attempt.lease not in STREAMING or not owner_lives(state, attempt):
        return state
    return end_lease(rules, state, ref, Lease.DROPPED)


# -- loans


def lend(rules: Rules, state: State, parent: Ref, owner: int, receiver: int, target: int) -> State | None:
    """A lease, complete at once, on the first block of a prompt, if the owner has it cached; then it is being pulled."""
    number, ref = parent[0], (parent[0], rules.instance.num_attempts)
    name = rules.content(number, 0, receiver)
    source = find(state, owner, name)
    busy = state.attempts[ref[0] * rules.slots + ref[1]]
    if source is None or (busy is not None and not has_ended(busy)):
        return None
    loan = Attempt(
        owner=owner,
        owner_epoch=state.workers[owner].epoch,
        receiver=receiver,
        receiver_epoch=state.workers[receiver].epoch,
        num_blocks=1,
        lease=Lease.COMPLETE,
        table=(source,),
        num_ready=1,
        ticks=rules.instance.ttl_ticks,
        phase=Phase.PULLING,
        reserved=(target,),
        parent=parent[1],
    )
    # What an earlier loan still has on its way is not taken for this one's: each pull is a stream of its own.
    state = drop(state, *[message for message in state.network if message.ref == ref])
    state = pin(pin(state, owner, ref, source), receiver, ref, target)
    return put(rules, state, ref, loan)


def has_ended(attempt: Attempt) -> bool:
    """Whether neither side has anything of it any more."""
    return attempt.lease in LEASE_ENDS and attempt.phase is Phase.ENDED
