"""The protocol: which steps may follow a state. Who decides what is in router.py, owner.py, receiver.py and world.py."""

from collections.abc import Iterator

from tests.kvtransfer.model.books import Rules, drop, placed, send
from tests.kvtransfer.model.owner import hear_close, hear_release, owner_steps
from tests.kvtransfer.model.receiver import (
    hear_answer,
    hear_cancel,
    hear_piece,
    hear_ticket,
    land,
    receiver_steps,
)
from tests.kvtransfer.model.router import hear, router_steps
from tests.kvtransfer.model.words import LOSSY, Cause, Kind, Message, Ref, State, Step
from tests.kvtransfer.model.world import world_steps


def next_steps(rules: Rules, state: State) -> Iterator[Step]:
    """Everything that may happen next."""
    for number in range(len(state.requests)):
        yield from router_steps(rules, state, number)
    for ref, attempt in placed(rules, state):
        yield from owner_steps(rules, state, ref, attempt)
        yield from receiver_steps(rules, state, ref, attempt)
    # In one order, so that the shortest way to a state is always the same one.
    for message in sorted(state.network, key=_order):
        yield from _arrivals(rules, state, message)
    yield from world_steps(rules, state)


def _order(message: Message) -> tuple[str, Ref, str | int]:
    data = message.data
    return message.kind, message.ref, data if isinstance(data, str) else data.ordinal


def _arrivals(rules: Rules, state: State, message: Message) -> Iterator[Step]:
    """A message arrives: any of them, whichever was sent first. One that is repeated is still on its way afterwards."""
    # A cancel follows its ticket on the same stream.
    if message.kind is Kind.CANCEL and Message(Kind.TICKET, message.ref) in state.network:
        return
    arrived = _arrive(rules, drop(state, message), message)
    is_next = message.kind is not Kind.PIECE or not _is_behind_another(state, message)
    if is_next:
        yield Step(Cause.PROTOCOL, "hear", message, arrived)
    if state.budget.disorders and message.kind in LOSSY:
        less = state.budget._replace(disorders=state.budget.disorders - 1)
        if not is_next:
            yield Step(Cause.WORLD, "hear too early", message, arrived._replace(budget=less, is_calm=False))
        again = send(arrived, message)._replace(budget=less, is_calm=False)
        yield Step(Cause.WORLD, "hear, and again later", message, again)


def _is_behind_another(state: State, message: Message) -> bool:
    return any(
        other.kind is Kind.PIECE and other.ref == message.ref and other.piece.ordinal < message.piece.ordinal
        for other in state.network
    )


def _arrive(rules: Rules, state: State, message: Message) -> State:
    match message.kind:
        case Kind.TICKET:
            return hear_ticket(rules, state, message.ref)
        case Kind.CANCEL:
            return hear_cancel(rules, state, message.ref)
        case Kind.CLOSE:
            return hear_close(rules, state, message.ref)
        case Kind.RELEASE:
            return hear_release(rules, state, message)
        case Kind.ANSWER:
            return hear_answer(rules, state, message)
        case Kind.PIECE:
            return hear_piece(rules, state, message)
        case Kind.WIRE:
            return land(rules, state, message)
        case _:
            return hear(rules, state, message)
