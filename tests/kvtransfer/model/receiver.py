"""What a receiver may do: take the ticket, reserve, check what comes, confirm, commit; or give up, and free only what is safe.

A receiver that gives up says at once that it has, and says of its memory whether it may be used again: if somebody may
still write to it, it is quarantined until that is settled. After commit a sequence is local.
"""

from collections.abc import Iterator

from tests.kvtransfer.model.books import (
    Rules,
    attempt_of,
    compute,
    drop,
    end_receiving,
    find,
    free_blocks,
    give_back,
    hold,
    owner_lives,
    placed,
    publish,
    put,
    receiver_lives,
    send,
    under_way,
    write,
)
from tests.kvtransfer.model.owner import lend
from tests.kvtransfer.model.words import (
    LEASE_ENDS,
    STREAMING,
    Attempt,
    Cause,
    Kind,
    Lease,
    Message,
    Mutation,
    Phase,
    Ref,
    State,
    Step,
)


def receiver_steps(rules: Rules, state: State, ref: Ref, attempt: Attempt) -> Iterator[Step]:
    """What may come next at the receiver of one attempt."""
    if not receiver_lives(state, attempt):
        return
    match attempt.phase:
        case Phase.WAITING:
            yield from _reserve(rules, state, ref, attempt)
            yield from _heartbeat(rules, state, ref, attempt)
        case Phase.PULLING:
            yield from _confirm(rules, state, ref, attempt)
            yield from _pull_fails(rules, state, ref, attempt)
            yield from _heartbeat(rules, state, ref, attempt)
        case Phase.CONFIRMING:
            yield from _answer_is_lost(rules, state, ref)
        case Phase.QUARANTINED:
            yield from _settle(rules, state, ref)
        case Phase.DECODING:
            yield from _decode(rules, state, ref, attempt)
        case Phase.PREEMPTED:
            yield from _come_back(rules, state, ref, attempt)
        case _:
            return


# -- the way in


def hear_ticket(rules: Rules, state: State, ref: Ref) -> State:
    """The request is taken, unless owner and receiver would not compute the same."""
    attempt = attempt_of(rules, state, ref)
    if attempt.phase is not Phase.UNKNOWN or not receiver_lives(state, attempt):
        return state
    is_same = rules.content(0, 0, attempt.owner) == rules.content(0, 0, attempt.receiver)
    if is_same or rules.mutation is Mutation.FINGERPRINT_NOT_COMPARED:
        return put(rules, state, ref, attempt._replace(phase=Phase.WAITING))
    return give_up(rules, state._replace(is_calm=False), ref)


def _reserve(rules: Rules, state: State, ref: Ref, attempt: Attempt) -> Iterator[Step]:
    """All blocks of the prompt, or none; those that it has are neither pulled nor written."""
    if rules.mutation is Mutation.HOLD_AND_WAIT:
        yield from _reserve_one(rules, state, ref, attempt)
        return
    cached = find(state, attempt.receiver, rules.content(ref[0], 0, attempt.receiver))
    taken = hold(state, attempt.receiver, ref, attempt.num_blocks, cached)
    if taken is not None:
        after, table = taken
        num_held = int(cached is not None)
        pulling = attempt._replace(
            phase=Phase.PULLING, reserved=table, num_sent=num_held, num_arrived=num_held
        )
        yield Step(Cause.PROTOCOL, "reserve", ref, put(rules, after, ref, pulling))


def _reserve_one(rules: Rules, state: State, ref: Ref, attempt: Attempt) -> Iterator[Step]:
    taken = hold(state, attempt.receiver, ref, 1, None)
    if taken is not None:
        after, table = taken
        reserved = (*attempt.reserved, *table)
        phase = Phase.PULLING if len(reserved) == attempt.num_blocks else Phase.WAITING
        after = put(rules, after, ref, attempt._replace(phase=phase, reserved=reserved))
        yield Step(Cause.PROTOCOL, "reserve one", ref, after)


def _heartbeat(rules: Rules, state: State, ref: Ref, attempt: Attempt) -> Iterator[Step]:
    """The lease's clock starts anew; or it has ended, and what is read under it could not be committed. The dead say nothing."""
    if not owner_lives(state, attempt):
        return
    if attempt.lease in LEASE_ENDS:
        yield Step(Cause.CLOCK, "hear of the end", ref, give_up(rules, state, ref))
    elif attempt.lease is Lease.COMPLETE and attempt.ticks < rules.instance.ttl_ticks:
        renewed = attempt._replace(ticks=rules.instance.ttl_ticks)
        yield Step(Cause.CLOCK, "renew", ref, put(rules, state, ref, renewed))


# -- what comes


def hear_piece(rules: Rules, state: State, message: Message) -> State:
    """The very next block is written and checked. Any other one, or one of an attempt that is over, is refused unwritten."""
    ref, (ordinal, content, checksum) = message.ref, message.piece
    attempt = attempt_of(rules, state, ref)
    if not receiver_lives(state, attempt):
        return state
    if attempt.phase is not Phase.PULLING:
        if rules.mutation is Mutation.WRITE_AFTER_ABORT and attempt.reserved:
            return write(state, attempt.receiver, attempt.reserved[ordinal], content)
        return state
    if ordinal != attempt.num_arrived:
        return give_up(rules, state, ref)
    state = write(state, attempt.receiver, attempt.reserved[ordinal], content)
    return _check(rules, state, ref, is_right=content == checksum)


def land(rules: Rules, state: State, message: Message) -> State:
    """Something is written in place: whatever lies at the source now. Nobody asks the receiver before."""
    ref, (_, source, target, checksum) = message.ref, message.wire
    attempt = attempt_of(rules, state, ref)
    if not receiver_lives(state, attempt) and rules.mutation is not Mutation.EPOCH_NOT_CHECKED:
        return state
    content = state.workers[attempt.owner].blocks[source].content if owner_lives(state, attempt) else None
    state = write(state, attempt.receiver, target, content)
    if attempt.phase is not Phase.PULLING:
        return state
    return _check(rules, state, ref, is_right=content == checksum)


def _check(rules: Rules, state: State, ref: Ref, *, is_right: bool) -> State:
    """The block as it lies in the receiver's memory against the checksum from when it was computed."""
    if not is_right and rules.mutation is not Mutation.NO_CHECKSUM:
        return give_up(rules, state, ref)
    attempt = attempt_of(rules, state, ref)
    return put(rules, state, ref, attempt._replace(num_arrived=attempt.num_arrived + 1))


def _pull_fails(rules: Rules, state: State, ref: Ref, attempt: Attempt) -> Iterator[Step]:
    """The owner says that the lease has ended; or nothing comes any more, which only a time-out finds out."""
    after = (
        _commit(rules, state, ref)
        if rules.mutation is Mutation.COMMIT_PARTIAL
        else give_up(rules, state, ref)
    )
    if owner_lives(state, attempt):
        if attempt.lease in LEASE_ENDS:
            yield Step(Cause.PROTOCOL, "pull fails", ref, after)
            return
        is_silent = attempt.num_sent > attempt.num_arrived
    else:
        is_silent = True
    nothing_comes = not under_way(state, ref, Kind.PIECE, Kind.WIRE)
    if is_silent and nothing_comes and rules.mutation is not Mutation.NO_DEADLINE:
        yield Step(Cause.CLOCK, "pull stalls", ref, after)


# -- commit


def _confirm(rules: Rules, state: State, ref: Ref, attempt: Attempt) -> Iterator[Step]:
    """Everything is there. Only the owner knows whether the lease held until now."""
    if attempt.num_arrived < attempt.num_blocks or attempt.lease in STREAMING:
        return
    if rules.mutation is Mutation.COMMIT_UNCONFIRMED:
        after = send(_commit(rules, state, ref), Message(Kind.RELEASE, ref, "receiver"))
        yield Step(Cause.PROTOCOL, "commit", ref, after)
        return
    after = put(rules, state, ref, attempt._replace(phase=Phase.CONFIRMING))
    yield Step(Cause.PROTOCOL, "confirm", ref, send(after, Message(Kind.RELEASE, ref, "confirm")))


def hear_answer(rules: Rules, state: State, message: Message) -> State:
    """Only on VALID everything that came is the request's."""
    attempt = attempt_of(rules, state, message.ref)
    if attempt.phase is not Phase.CONFIRMING or not receiver_lives(state, attempt):
        return state
    if message.data == "valid":
        return _commit(rules, state, message.ref)
    return give_up(rules, state, message.ref)


def _answer_is_lost(rules: Rules, state: State, ref: Ref) -> Iterator[Step]:
    """Who was not told VALID cannot know that what it read was still the prompt's."""
    asked = [message for message in under_way(state, ref, Kind.RELEASE) if message.data == "confirm"]
    if asked or under_way(state, ref, Kind.ANSWER) or rules.mutation is Mutation.NO_DEADLINE:
        return
    yield Step(Cause.CLOCK, "no answer comes", ref, give_up(rules, state, ref))


def _commit(rules: Rules, state: State, ref: Ref) -> State:
    """From now on the request is local, and its blocks can be found."""
    attempt = attempt_of(rules, state, ref)
    if attempt.parent is not None:
        return _end_loan(rules, state, ref, has_come=True)
    name = rules.content(ref[0], 0, attempt.receiver)
    state = publish(state, attempt.receiver, attempt.reserved[0], name)
    state = put(rules, state, ref, attempt._replace(phase=Phase.DECODING, num_sent=0, num_arrived=0))
    return send(state, Message(Kind.RECEIVED, ref))


# -- giving up


def give_up(rules: Rules, state: State, ref: Ref, *, tell: bool = True) -> State:
    """The attempt fails here. Its lease is given back; its memory is free at once only if nobody writes to it any more."""
    attempt = attempt_of(rules, state, ref)
    state = send(state, Message(Kind.RELEASE, ref, "receiver"))
    if tell and attempt.parent is None:
        state = send(state, Message(Kind.REFUSED, ref))
    if under_way(state, ref, Kind.WIRE) and rules.mutation is not Mutation.FREE_WHILE_WRITTEN:
        return put(rules, state, ref, attempt._replace(phase=Phase.QUARANTINED, num_sent=0, num_arrived=0))
    return _end_receiving(rules, state, ref)


def _settle(rules: Rules, state: State, ref: Ref) -> Iterator[Step]:
    """Whatever writes has acknowledged that it does not any more, or is known to be dead."""
    after = drop(state, *under_way(state, ref, Kind.WIRE))
    yield Step(Cause.PROTOCOL, "settle", ref, _end_receiving(rules, after, ref))


def hear_cancel(rules: Rules, state: State, ref: Ref) -> State:
    """Nobody wants it any more."""
    attempt = attempt_of(rules, state, ref)
    if not receiver_lives(state, attempt):
        return state
    if attempt.phase in (Phase.WAITING, Phase.PULLING, Phase.CONFIRMING):
        return give_up(rules, state, ref, tell=False)
    if attempt.phase in (Phase.DECODING, Phase.PREEMPTED, Phase.RECALLING):
        return end_receiving(rules, state, ref)
    return state


def _end_receiving(rules: Rules, state: State, ref: Ref) -> State:
    if attempt_of(rules, state, ref).parent is not None:
        return _end_loan(rules, state, ref, has_come=False)
    return end_receiving(rules, state, ref)


# -- after commit


def _decode(rules: Rules, state: State, ref: Ref, attempt: Attempt) -> Iterator[Step]:
    """To the last token. Who lacks a block for that takes it from one that runs; those that are being filled keep theirs."""
    if not rules.instance.grows or free_blocks(state, attempt.receiver):
        after = send(end_receiving(rules, state, ref), Message(Kind.DONE, ref))
        yield Step(Cause.PROTOCOL, "finish", ref, after)
        return
    for other, victim in placed(rules, state):
        if (
            victim.phase is Phase.DECODING
            and victim.receiver == attempt.receiver
            and receiver_lives(state, victim)
        ):
            after = give_back(state, victim.receiver, other, victim.reserved)
            after = put(rules, after, other, victim._replace(phase=Phase.PREEMPTED, reserved=()))
            yield Step(Cause.PROTOCOL, "preempt", other, after)


def _come_back(rules: Rules, state: State, ref: Ref, attempt: Attempt) -> Iterator[Step]:
    """A preempted sequence computes its prompt, or borrows the beginning. Its lease is over and is not asked for again."""
    if rules.mutation is Mutation.ASK_AGAIN:
        yield Step(
            Cause.PROTOCOL, "ask again", ref, put(rules, state, ref, attempt._replace(phase=Phase.WAITING))
        )
        return
    cached = find(state, attempt.receiver, rules.content(ref[0], 0, attempt.receiver))
    taken = hold(state, attempt.receiver, ref, attempt.num_blocks, cached)
    if taken is None:
        return
    after, table = taken
    computed = compute(rules, after, attempt.receiver, ref[0], table, int(cached is not None))
    decoding = attempt._replace(phase=Phase.DECODING, reserved=table)
    yield Step(Cause.PROTOCOL, "recompute", ref, put(rules, computed, ref, decoding))
    if rules.instance.has_loans and cached is None and owner_lives(state, attempt):
        recalling = put(rules, after, ref, attempt._replace(phase=Phase.RECALLING, reserved=table))
        loan = lend(rules, recalling, ref, attempt.owner, attempt.receiver, table[0])
        if loan is not None:
            yield Step(Cause.PROTOCOL, "recall", ref, loan)


def _end_loan(rules: Rules, state: State, ref: Ref, *, has_come: bool) -> State:
    """Nobody writes to the block any more. Whoever borrowed goes on, and computes what has not come."""
    loan = attempt_of(rules, state, ref)
    state = end_receiving(rules, state, ref)
    assert loan.parent is not None
    borrower = (ref[0], loan.parent)
    attempt = attempt_of(rules, state, borrower)
    if attempt.phase is Phase.RECALLING and attempt.receiver == loan.receiver:
        state = compute(rules, state, attempt.receiver, ref[0], attempt.reserved, int(has_come))
        return put(rules, state, borrower, attempt._replace(phase=Phase.DECODING))
    if attempt.lease is Lease.BORROWING and attempt.owner == loan.receiver:
        if has_come:
            state = publish(state, attempt.owner, attempt.table[0], rules.content(ref[0], 0, attempt.owner))
        return put(rules, state, borrower, attempt._replace(lease=Lease.ADMITTED, num_ready=int(has_come)))
    return state
