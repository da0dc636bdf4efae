"""What rank 0 of a worker says to its followers, and how that is written: plain numbers and names, by msgspec, never pickle.

Each message is answered by one `Done`. A follower computes what the leader computes and chooses no tokens: of a step it is told which
tokens stand where, and after which of them logits are needed, and nothing of how to sample.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

from paceline.core.kv_layout import BlockId
from paceline.core.request import RequestId, SamplingParams, SequenceId
from paceline.engine.step import BlockTable, SampleTask, ScheduledSequence, SchedulerOutput, ScoreTask
from paceline.runtime.pool_memory import SharedMemoryOffer


class Start(Struct, frozen=True, tag=True):
    """The model, and this process's place among those that compute it. Done: it is loaded, and computes what it should."""

    rank: int
    tp: int
    pp: int
    # A file by which the ranks find each other, in a directory of this user's.
    rendezvous: str
    # Of each step of all ranks together.
    timeout_s: float
    num_threads: int
    model: str
    dtype: str
    block_size: int
    attention: str


class Pool(Struct, frozen=True, tag=True):
    """Where all blocks of the worker lie, and what they keep. Done: it is mapped."""

    num_blocks: int
    kv_dtype: str
    memory: SharedMemoryOffer


class SequenceWork(Struct, frozen=True, gc=False, array_like=True):
    """What a follower needs of a ScheduledSequence, by the same names."""

    token_ids: tuple[int, ...]
    start: int
    block_tables: tuple[tuple[int | None, ...], ...]
    num_samples: int
    # Rows of `token_ids` whose logits are scored.
    first_scored: int
    num_scored: int


class Step(Struct, frozen=True, gc=False, tag=True):
    """One step, in batches that are computed one after the other. Done: their keys and values are in the pool."""

    batches: tuple[tuple[SequenceWork, ...], ...]
    # Of each rank: a worker may have been lent cores.
    num_threads: int


class Done(Struct, frozen=True, tag=True):
    """The last message has been done."""


ToFollower = Start | Pool | Step

_ENCODER = Encoder()
_TO_FOLLOWER: Decoder[ToFollower] = Decoder(ToFollower)
_TO_LEADER: Decoder[Done] = Decoder(Done)

# Nobody looks at what it stands for.
_NOBODY = SequenceId(RequestId("step"), 0)
_SAMPLE = SampleTask(SamplingParams())


def encode(message: ToFollower | Done) -> bytes:
    """The message as bytes."""
    return _ENCODER.encode(message)


def decode_to_follower(data: bytes) -> ToFollower:
    """Raises msgspec.DecodeError for what is no message."""
    return _TO_FOLLOWER.decode(data)


def decode_to_leader(data: bytes) -> Done:
    """The same for what followers say."""
    return _TO_LEADER.decode(data)


def step_of(batches: Sequence[SchedulerOutput], num_threads: int = 1) -> Step:
    """What followers need of a step."""
    return Step(tuple(tuple(map(_work, batch.scheduled)) for batch in batches), num_threads)


def outputs_of(step: Step) -> Iterator[SchedulerOutput]:
    """Batches that compute the same, with other tasks: their number counts, and nobody looks at what comes of them."""
    return (SchedulerOutput(tuple(map(_scheduled, batch)), ()) for batch in step.batches)


def _work(item: ScheduledSequence) -> SequenceWork:
    score = item.score
    return SequenceWork(
        token_ids=item.token_ids,
        start=item.start,
        block_tables=item.block_tables,
        num_samples=len(item.samples),
        first_scored=0 if score is None else score.first_row,
        num_scored=0 if score is None else len(score.target_ids),
    )


def _scheduled(work: SequenceWork) -> ScheduledSequence:
    return ScheduledSequence(
        sequence_id=_NOBODY,
        token_ids=work.token_ids,
        start=work.start,
        block_tables=tuple(map(_table, work.block_tables)),
        samples=(_SAMPLE,) * work.num_samples,
        score=ScoreTask(work.first_scored, (0,) * work.num_scored, 0) if work.num_scored else None,
    )


def _table(block_ids: tuple[int | None, ...]) -> BlockTable:
    return tuple(None if block_id is None else BlockId(block_id) for block_id in block_ids)
