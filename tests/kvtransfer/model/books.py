"""How a state is changed: blocks are taken and given back, attempts and messages replaced. It decides nothing."""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.kvtransfer.model.words import (
    Attempt,
    Block,
    Budget,
    Content,
    Instance,
    Kind,
    Lease,
    Message,
    Mutation,
    Phase,
    Ref,
    Request,
    State,
    Worker,
)


@dataclass(frozen=True, slots=True)
class Rules:
    """What is explored: a system, and the rule that is left out, if any."""

    instance: Instance
    mutation: Mutation | None = None

    @property
    def slots(self) -> int:
        """Attempts of a request, and its loan."""
        return self.instance.num_attempts + 1

    def initial(self) -> State:
        """Nobody has begun, and every block is free."""
        it = self.instance
        pools = (it.prefill_pool,) * it.num_prefill + (it.decode_pool,) * it.num_decode
        return State(
            requests=(Request(),) * it.num_requests,
            attempts=(None,) * (it.num_requests * self.slots),
            workers=tuple(Worker(0, (Block(),) * pool) for pool in pools),
            network=frozenset(),
            budget=Budget(it.crashes, it.losses, it.disorders, it.leaves),
        )

    def content(self, request: int, ordinal: int, worker: int) -> Content:
        """What a worker would compute for a request's block."""
        it = self.instance
        is_odd = it.has_odd_worker and worker == it.num_prefill + it.num_decode - 1
        is_shared = it.shares_prefix and ordinal == 0
        return (-1 if is_shared else request, ordinal, int(is_odd))

    def is_full(self, ordinal: int) -> bool:
        """Whether a block has a name; a partial last one has none."""
        return ordinal < self.instance.num_blocks - 1


def attempt_of(rules: Rules, state: State, ref: Ref) -> Attempt:
    """One that has been placed."""
    attempt = state.attempts[ref[0] * rules.slots + ref[1]]
    assert attempt is not None, "what is spoken of has been placed"
    return attempt


def placed(rules: Rules, state: State) -> Iterator[tuple[Ref, Attempt]]:
    """Every attempt that has been placed, and every loan."""
    for index, attempt in enumerate(state.attempts):
        if attempt is not None:
            yield divmod(index, rules.slots), attempt


def put(rules: Rules, state: State, ref: Ref, attempt: Attempt) -> State:
    """The attempt is this from now on."""
    index = ref[0] * rules.slots + ref[1]
    attempts = state.attempts
    return state._replace(attempts=(*attempts[:index], attempt, *attempts[index + 1 :]))


def put_request(state: State, number: int, request: Request) -> State:
    """The router thinks this of the request from now on."""
    requests = state.requests
    return state._replace(requests=(*requests[:number], request, *requests[number + 1 :]))


def send(state: State, *messages: Message) -> State:
    """These are on their way too."""
    return state._replace(network=state.network.union(messages))


def drop(state: State, *messages: Message) -> State:
    """These are not on their way any more."""
    return state._replace(network=state.network.difference(messages))


# -- blocks


def put_blocks(state: State, worker: int, blocks: list[Block]) -> State:
    """These are the worker's blocks."""
    workers = state.workers
    changed = workers[worker]._replace(blocks=tuple(blocks))
    return state._replace(workers=(*workers[:worker], changed, *workers[worker + 1 :]))


def find(state: State, worker: int, name: Content) -> int | None:
    """Where the prefix cache of a worker has a block of this name."""
    for index, block in enumerate(state.workers[worker].blocks):
        if block.name == name:
            return index
    return None


def free_blocks(state: State, worker: int) -> list[int]:
    """Those that nobody holds, in the order in which they are taken: cached ones last."""
    free = [(b.name is not None, i) for i, b in enumerate(state.workers[worker].blocks) if not b.holders]
    return [index for _, index in sorted(free)]


def hold(
    state: State, worker: int, ref: Ref, num_blocks: int, cached: int | None
) -> tuple[State, tuple[int, ...]] | None:
    """Blocks for a prompt, the cached first one among them if there is one; all of them, or None."""
    free = [index for index in free_blocks(state, worker) if index != cached]
    fresh = free[: num_blocks - (cached is not None)]
    if len(fresh) + (cached is not None) < num_blocks:
        return None
    blocks = list(state.workers[worker].blocks)
    if cached is not None:
        blocks[cached] = blocks[cached]._replace(holders=blocks[cached].holders | {ref})
    for index in fresh:
        blocks[index] = Block(frozenset([ref]))
    table = (*([] if cached is None else [cached]), *fresh)
    return put_blocks(state, worker, blocks), table


def pin(state: State, worker: int, ref: Ref, index: int) -> State:
    """One more holds a block."""
    blocks = list(state.workers[worker].blocks)
    blocks[index] = blocks[index]._replace(holders=blocks[index].holders | {ref})
    return put_blocks(state, worker, blocks)


def give_back(state: State, worker: int, ref: Ref, table: tuple[int, ...]) -> State:
    """One less holds these blocks. What is not cached is nobody's any more."""
    if not table:
        return state
    blocks = list(state.workers[worker].blocks)
    for index in table:
        holders, content, name = blocks[index]
        holders -= {ref}
        blocks[index] = Block(holders, content if holders or name is not None else None, name)
    return put_blocks(state, worker, blocks)


def write(state: State, worker: int, index: int, content: Content | None) -> State:
    """These bytes lie in the block now."""
    blocks = list(state.workers[worker].blocks)
    blocks[index] = blocks[index]._replace(content=content)
    return put_blocks(state, worker, blocks)


def publish(state: State, worker: int, index: int, name: Content) -> State:
    """From now on the prefix cache finds the block, unless it has another one of that name."""
    if find(state, worker, name) is not None:
        return state
    blocks = list(state.workers[worker].blocks)
    blocks[index] = blocks[index]._replace(name=name)
    return put_blocks(state, worker, blocks)


def forget(state: State, worker: int, index: int) -> State:
    """The prefix cache does not find a free block any more."""
    blocks = list(state.workers[worker].blocks)
    blocks[index] = Block()
    return put_blocks(state, worker, blocks)


def compute(
    rules: Rules, state: State, worker: int, request: int, table: tuple[int, ...], first: int
) -> State:
    """The blocks of a prompt from `first` on, one after the other. A token sees those before it: rubbish makes rubbish."""
    for ordinal in range(first, rules.instance.num_blocks):
        state = compute_block(rules, state, worker, request, table, ordinal)
    return state


def compute_block(
    rules: Rules, state: State, worker: int, request: int, table: tuple[int, ...], ordinal: int
) -> State:
    """One block, which is published if it is full."""
    blocks = state.workers[worker].blocks
    is_right = all(
        blocks[table[before]].content == rules.content(request, before, worker) for before in range(ordinal)
    )
    content = rules.content(request, ordinal, worker) if is_right else None
    state = write(state, worker, table[ordinal], content)
    if content is not None and rules.is_full(ordinal):
        state = publish(state, worker, table[ordinal], content)
    return state


# -- what is asked often


def owner_lives(state: State, attempt: Attempt) -> bool:
    """Whether the owner is still in the life in which it granted the lease."""
    return state.workers[attempt.owner].epoch == attempt.owner_epoch


def receiver_lives(state: State, attempt: Attempt) -> bool:
    """Whether the receiver is still in the life in which it got the request."""
    return state.workers[attempt.receiver].epoch == attempt.receiver_epoch


def under_way(state: State, ref: Ref, *kinds: Kind) -> list[Message]:
    """What is on its way for an attempt."""
    return [message for message in state.network if message.ref == ref and message.kind in kinds]


def end_lease(rules: Rules, state: State, ref: Ref, how: Lease) -> State:
    """The lease ends, once, and the owner's blocks are its own again."""
    attempt = attempt_of(rules, state, ref)
    state = give_back(state, attempt.owner, ref, attempt.table)
    # The mutant remembers which they were.
    table = attempt.table if rules.mutation is Mutation.FREE_TWICE else ()
    return put(rules, state, ref, attempt._replace(lease=how, table=table, num_ready=0, ticks=0))


def end_receiving(rules: Rules, state: State, ref: Ref) -> State:
    """The receiver holds nothing of this attempt any more."""
    attempt = attempt_of(rules, state, ref)
    state = give_back(state, attempt.receiver, ref, attempt.reserved)
    reserved = attempt.reserved if rules.mutation is Mutation.WRITE_AFTER_ABORT else ()
    ended = attempt._replace(phase=Phase.ENDED, reserved=reserved, num_sent=0, num_arrived=0)
    return put(rules, state, ref, ended)
