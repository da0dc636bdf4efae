"""The words of the protocol: who there is, what each of them knows, and what is on its way between them.

Everything is a small frozen value. A `State` is one moment of the whole system; spec.py says which moments may follow it.

A request is tried up to `num_attempts` times. `Ref` names one attempt: (request, attempt). For each there is one `Attempt`,
which holds what its owner knows of it (the lease and the blocks under it) and what its receiver knows (the phase and the
reserved blocks). A loan is an attempt too: the one behind the last.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

Ref = tuple[int, int]
# What lies in a block: the KV of which request's which block, in which layout. None: nothing that anybody wants.
Content = tuple[int, int, int]


def shown(ref: Ref) -> str:
    """An attempt's name: its request, and which attempt of that it is."""
    return f"{'ABCD'[ref[0]]}{ref[1]}"


class Lease(StrEnum):
    """How far the owner is with an attempt. The last six are ends: the owner's blocks are its own again."""

    QUEUED = "queued"  # the prefill waits for room, and holds nothing
    BORROWING = "borrowing"  # it has its blocks, and pulls the first one from a decode worker
    ADMITTED = "admitted"  # it has its blocks, and nothing new is computed yet
    OPEN = "open"  # blocks are computed one after the other; the Prefill stream holds the lease
    COMPLETE = "complete"  # all are there; the lease's clock runs
    CONFIRMED = "confirmed"  # released by the receiver, who had everything, and told VALID
    RELEASED = "released"  # given back by the receiver or by the router
    EXPIRED = "expired"  # its clock ran out
    DROPPED = "dropped"  # the Prefill stream ended without a result, or a loan was revoked
    BROKEN = "broken"  # its owner died while the Prefill stream was open
    LOST = "lost"  # its owner died later


STREAMING = (Lease.QUEUED, Lease.BORROWING, Lease.ADMITTED, Lease.OPEN)
HELD = (Lease.OPEN, Lease.COMPLETE)
LEASE_ENDS = (
    Lease.CONFIRMED,
    Lease.RELEASED,
    Lease.EXPIRED,
    Lease.DROPPED,
    Lease.BROKEN,
    Lease.LOST,
)


class Phase(StrEnum):
    """How far the receiver is with an attempt."""

    UNKNOWN = "unknown"  # no ticket has come
    WAITING = "waiting"  # it has the ticket and no room; it holds nothing
    PULLING = "pulling"  # it has reserved its blocks, all or nothing, and they are being filled
    CONFIRMING = "confirming"  # everything is there; the owner is asked whether the lease held until now
    QUARANTINED = (
        "quarantined"  # given up, but somebody may still write to its blocks: they are not used again
    )
    DECODING = "decoding"  # committed; from now on it is local
    PREEMPTED = "preempted"  # committed, and lost its blocks since
    RECALLING = "recalling"  # has blocks again, and a loan fills the first one
    ENDED = "ended"  # it holds nothing any more


UNDER_WAY = tuple(phase for phase in Phase if phase not in (Phase.UNKNOWN, Phase.ENDED))


class RequestPhase(StrEnum):
    """What the router thinks of a request; the last three are ends."""

    NEW = "new"  # the next attempt is not placed yet
    RUNNING = "running"
    SERVED = "served"
    FAILED = "failed"
    LEFT = "left"


REQUEST_ENDS = (RequestPhase.SERVED, RequestPhase.FAILED, RequestPhase.LEFT)


class Kind(StrEnum):
    """What can be on its way. Only of those in LOSSY may one be lost, damaged or repeated: streams break as a whole."""

    TICKET = "ticket"  # owner, router, receiver: blocks can be pulled
    CANCEL = "cancel"  # router, receiver: nobody wants it any more
    CLOSE = "close"  # router, owner: the Prefill stream ends
    RELEASE = "release"  # receiver or router, owner: the lease ends; `data` says who asks
    ANSWER = "answer"  # owner, receiver: whether it held until now
    PIECE = "piece"  # owner, receiver: a block, by copy
    WIRE = "wire"  # a block, written in place by whatever carries it
    RECEIVED = "received"  # receiver, router: committed
    REFUSED = "refused"  # receiver, router: given up
    DONE = "done"  # receiver, router: the last token


LOSSY = (Kind.RELEASE, Kind.ANSWER, Kind.PIECE)


class Piece(NamedTuple):
    """A block, by copy. `checksum` stands for the bytes that it had when it was computed."""

    ordinal: int
    content: Content | None
    checksum: Content | None


class Wire(NamedTuple):
    """A block that is being written in place: whatever lies at the source when it lands."""

    ordinal: int
    source: int
    target: int
    checksum: Content | None


class Message(NamedTuple):
    """Something on its way. Messages overtake each other as they like, apart from pieces, which are one stream."""

    kind: Kind
    ref: Ref
    data: str | Piece | Wire = ""

    @property
    def piece(self) -> Piece:
        """What a PIECE brings."""
        assert isinstance(self.data, Piece)
        return self.data

    @property
    def wire(self) -> Wire:
        """What a WIRE does."""
        assert isinstance(self.data, Wire)
        return self.data

    def __str__(self) -> str:
        what = (
            f" {self.data.ordinal}"
            if isinstance(self.data, Piece | Wire)
            else f" ({self.data})"
            if self.data
            else ""
        )
        return f"{self.kind}{what} of {shown(self.ref)}"


class Block(NamedTuple):
    """One block of a worker's pool. It is free when nobody holds it; the prefix cache may still find it by its name."""

    holders: frozenset[Ref] = frozenset()
    content: Content | None = None
    name: Content | None = None


class Worker(NamedTuple):
    """A worker in one of its lives."""

    epoch: int
    blocks: tuple[Block, ...]


class Request(NamedTuple):
    """What the router knows."""

    phase: RequestPhase = RequestPhase.NEW
    attempt: int = 0
    # Whether the receiver has said that it committed: then the router owes the owner no release.
    has_kv: bool = False
    num_ends: int = 0


class Attempt(NamedTuple):
    """One attempt at a request, as its two workers know it."""

    owner: int
    owner_epoch: int
    receiver: int
    receiver_epoch: int
    num_blocks: int
    # At the owner. `table` is the blocks under the lease, `ticks` what is left of its time.
    lease: Lease = Lease.QUEUED
    table: tuple[int, ...] = ()
    num_ready: int = 0
    ticks: int = 0
    # At the receiver.
    phase: Phase = Phase.UNKNOWN
    reserved: tuple[int, ...] = ()
    num_sent: int = 0
    num_arrived: int = 0
    # Of a loan: the attempt that borrows.
    parent: int | None = None


class Budget(NamedTuple):
    """How much may still go wrong."""

    crashes: int
    losses: int
    disorders: int
    leaves: int


class State(NamedTuple):
    """One moment. `attempts` has a place for each attempt, and for the loan, of each request."""

    requests: tuple[Request, ...]
    attempts: tuple[Attempt | None, ...]
    workers: tuple[Worker, ...]
    network: frozenset[Message]
    budget: Budget
    # Whether nothing has gone wrong so far. That a client leaves is nothing wrong.
    is_calm: bool = True


class Cause(StrEnum):
    """What makes a step happen."""

    PROTOCOL = "protocol"  # somebody does what is next
    CLOCK = "clock"  # time passes: a heartbeat, an expiry, a time-out
    WORLD = "world"  # what nobody may rely on: crashes, losses, repetitions, clients that leave


class Step(NamedTuple):
    """Something that may happen in a state, and the state after it."""

    cause: Cause
    name: str
    about: Ref | Message | int
    state: State

    def __str__(self) -> str:
        about = self.about
        return f"{self.name} {shown(about) if isinstance(about, tuple) and not isinstance(about, Message) else about}"


class Mutation(StrEnum):
    """One rule of the protocol left out. The explorer must find each; mutations.py says what breaks then."""

    FREE_WHILE_WRITTEN = "a receiver that gives up frees its blocks though somebody may still write to them"
    WRITE_AFTER_ABORT = "a piece is written wherever its attempt once had its blocks"
    EPOCH_NOT_CHECKED = "what was meant for a worker's last life is written in its next one"
    NO_CHECKSUM = "a block is not checked"
    COMMIT_UNCONFIRMED = "the receiver commits when the last byte is there, and gives the lease back later"
    LATE_RELEASE_IS_VALID = "the owner answers VALID to whoever releases, whether or not the lease still held"
    COMMIT_PARTIAL = "what came before a failure is decoded on"
    OLD_RESULTS_COUNT = "the router takes the last token from any attempt"
    ROUTER_OWES_NOTHING = "the router leaves without a release"
    NO_DEADLINE = "a receiver waits for ever for a dead owner, or for an answer that was lost"
    PARK_BEFORE_PREFILL = "the receiver reserves before the prefill has room"
    HOLD_AND_WAIT = "a receiver takes blocks one by one, as they come free"
    ASK_AGAIN = "a preempted sequence is handed over again, by its old ticket"
    PUBLISH_WHEN_SCHEDULED = "a block can be found as soon as it is reserved"
    FINGERPRINT_NOT_COMPARED = "workers of different layouts hand over to each other"
    FREE_TWICE = "a release frees the blocks again that the lease once held"


@dataclass(frozen=True, slots=True)
class Instance:
    """How large a system is explored, and how much may go wrong in it."""

    num_prefill: int = 1
    num_decode: int = 1
    num_requests: int = 1
    num_attempts: int = 1
    # Of a prompt; all are full but the last.
    num_blocks: int = 2
    prefill_pool: int = 2
    decode_pool: int = 2
    # Whether a sequence needs one block more before its last token.
    grows: bool = False
    # Whether blocks are written in place by whatever carries them; else they come as pieces that the receiver writes.
    in_place: bool = False
    # Whether the prompts begin alike.
    shares_prefix: bool = False
    has_loans: bool = False
    # Whether the last decode worker has another layout.
    has_odd_worker: bool = False
    ttl_ticks: int = 1
    crashes: int = 0
    losses: int = 0
    # Messages that come twice, and pieces that overtake the one before them.
    disorders: int = 0
    leaves: int = 0
