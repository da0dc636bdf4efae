"""What the router may do: place an attempt, hear how it went, try again, leave. It owes the owner a release on every exit."""

from collections.abc import Iterator

from tests.kvtransfer.model.books import (
    Rules,
    attempt_of,
    drop,
    owner_lives,
    placed,
    put,
    put_request,
    receiver_lives,
    send,
)
from tests.kvtransfer.model.words import (
    STREAMING,
    UNDER_WAY,
    Attempt,
    Cause,
    Kind,
    Lease,
    Message,
    Mutation,
    Ref,
    Request,
    RequestPhase,
    State,
    Step,
    Worker,
)


def router_steps(rules: Rules, state: State, number: int) -> Iterator[Step]:
    """What may come next for one request."""
    phase = state.requests[number].phase
    if phase is RequestPhase.NEW:
        yield from _place(rules, state, number)
    elif phase is RequestPhase.RUNNING:
        yield from _notice_a_death(rules, state, number)


def _place(rules: Rules, state: State, number: int) -> Iterator[Step]:
    """An attempt begins, on any two workers. Requests are alike, so they begin in order, and so do workers."""
    if number and state.requests[number - 1] == (RequestPhase.NEW, 0, False, 0):
        return
    it, request = rules.instance, state.requests[number]
    ref = (number, request.attempt)
    for owner in _candidates(rules, state, range(it.num_prefill)):
        for receiver in _candidates(rules, state, range(it.num_prefill, it.num_prefill + it.num_decode)):
            attempt = Attempt(
                owner, state.workers[owner].epoch, receiver, state.workers[receiver].epoch, it.num_blocks
            )
            after = put_request(state, number, request._replace(phase=RequestPhase.RUNNING))
            after = put(rules, after, ref, attempt)
            if rules.mutation is Mutation.PARK_BEFORE_PREFILL:
                after = send(after, Message(Kind.TICKET, ref))
            yield Step(Cause.PROTOCOL, f"place on P{owner} and D{receiver - it.num_prefill}:", ref, after)


def _candidates(rules: Rules, state: State, workers: range) -> Iterator[int]:
    """Those that have something to do with somebody; and of the others that are in the same state, the first one."""
    known = {worker for _, attempt in placed(rules, state) for worker in (attempt.owner, attempt.receiver)}
    seen: set[Worker] = set()
    for worker in workers:
        if worker not in known and not rules.instance.has_odd_worker:
            if state.workers[worker] in seen:
                continue
            seen.add(state.workers[worker])
        yield worker


def _notice_a_death(rules: Rules, state: State, number: int) -> Iterator[Step]:
    """A stream breaks with the worker at its other end: that of the prefill while it computes, that of decode always."""
    ref = (number, state.requests[number].attempt)
    attempt = attempt_of(rules, state, ref)
    if attempt.lease is Lease.BROKEN or not receiver_lives(state, attempt):
        yield Step(Cause.PROTOCOL, "notice a death", ref, try_again(rules, state, ref))


def try_again(rules: Rules, state: State, ref: Ref) -> State:
    """The attempt has failed. The next one has another number, or there is none."""
    number, attempt = ref
    state = leave_attempt(rules, state, ref)
    request = state.requests[number]
    if attempt + 1 < rules.instance.num_attempts:
        return put_request(
            state, number, request._replace(phase=RequestPhase.NEW, attempt=attempt + 1, has_kv=False)
        )
    return put_request(state, number, end(request, RequestPhase.FAILED))


def leave_attempt(rules: Rules, state: State, ref: Ref) -> State:
    """Neither tier goes on with it: the stream is closed, the sequence cancelled, the lease released."""
    attempt = attempt_of(rules, state, ref)
    ticket = Message(Kind.TICKET, ref)
    # A ticket that has not been passed on never will be; otherwise the cancel comes behind it.
    if ticket in state.network and rules.mutation is not Mutation.PARK_BEFORE_PREFILL:
        state = drop(state, ticket)
    elif receiver_lives(state, attempt) and (attempt.phase in UNDER_WAY or ticket in state.network):
        state = send(state, Message(Kind.CANCEL, ref))
    if attempt.lease in STREAMING:
        state = send(state, Message(Kind.CLOSE, ref))
    owes = not state.requests[ref[0]].has_kv and owner_lives(state, attempt)
    if owes and rules.mutation is not Mutation.ROUTER_OWES_NOTHING:
        state = send(state, Message(Kind.RELEASE, ref, "router"))
    return state


def end(request: Request, phase: RequestPhase) -> Request:
    """The client hears how it ended."""
    return request._replace(phase=phase, num_ends=request.num_ends + 1)


def hear(rules: Rules, state: State, message: Message) -> State:
    """Something a receiver says. What an old attempt says counts no more."""
    number, attempt = message.ref
    request = state.requests[number]
    is_current = request.phase is RequestPhase.RUNNING and request.attempt == attempt
    if message.kind is Kind.DONE and (is_current or rules.mutation is Mutation.OLD_RESULTS_COUNT):
        return put_request(state, number, end(request, RequestPhase.SERVED))
    if not is_current:
        return state
    if message.kind is Kind.RECEIVED:
        return put_request(state, number, request._replace(has_kv=True))
    return try_again(rules, state, message.ref)
