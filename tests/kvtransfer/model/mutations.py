"""For each rule that can be left out: the smallest system in which that shows, what breaks there, and by which last step.

The kinds are those of docs/kv-transfer.md, in its order.
"""

from dataclasses import dataclass

from tests.kvtransfer.model.properties import (
    NO_LEAK,
    NO_WAITING_FOR_A_CLOCK,
    books,
    no_needless_failure,
    one_end,
    one_writer,
    right_bytes,
    valid_at_commit,
)
from tests.kvtransfer.model.words import Instance, Mutation


@dataclass(frozen=True, slots=True)
class Kill:
    """How a mutant ends. No trace is shorter than `num_steps`."""

    kind: int
    instance: Instance
    broken: str
    num_steps: int
    last: str


RIGHT_BYTES, ONE_WRITER = right_bytes.__name__, one_writer.__name__
BOOKS, ONE_END = books.__name__, one_end.__name__
TWO = Instance(num_requests=2)

KILLS: dict[Mutation, Kill] = {
    Mutation.FREE_WHILE_WRITTEN: Kill(
        1, Instance(in_place=True, leaves=1), ONE_WRITER, 8, "hear cancel of A0"
    ),
    Mutation.WRITE_AFTER_ABORT: Kill(1, TWO, RIGHT_BYTES, 23, "hear answer (valid) of B0"),
    Mutation.EPOCH_NOT_CHECKED: Kill(
        1, Instance(in_place=True, crashes=1, num_attempts=2), RIGHT_BYTES, 24, "hear wire 1 of A0"
    ),
    Mutation.NO_CHECKSUM: Kill(1, Instance(losses=1), RIGHT_BYTES, 14, "hear answer (valid) of A0"),
    Mutation.COMMIT_UNCONFIRMED: Kill(2, Instance(), valid_at_commit.__name__, 11, "commit A0"),
    Mutation.LATE_RELEASE_IS_VALID: Kill(
        2, Instance(), valid_at_commit.__name__, 14, "hear answer (valid) of A0"
    ),
    Mutation.COMMIT_PARTIAL: Kill(3, Instance(), RIGHT_BYTES, 8, "pull fails A0"),
    Mutation.OLD_RESULTS_COUNT: Kill(3, Instance(crashes=1, num_attempts=2), ONE_END, 24, "hear done of A1"),
    Mutation.ROUTER_OWES_NOTHING: Kill(4, Instance(leaves=1), NO_WAITING_FOR_A_CLOCK, 5, "leave A0"),
    Mutation.NO_DEADLINE: Kill(5, Instance(crashes=1), NO_LEAK, 5, "crash 0"),
    Mutation.PARK_BEFORE_PREFILL: Kill(6, TWO, NO_WAITING_FOR_A_CLOCK, 5, "reserve B0"),
    Mutation.HOLD_AND_WAIT: Kill(
        6, Instance(num_requests=2, prefill_pool=4), NO_WAITING_FOR_A_CLOCK, 10, "reserve one B0"
    ),
    Mutation.ASK_AGAIN: Kill(
        7,
        Instance(num_requests=2, prefill_pool=4, decode_pool=4, grows=True),
        no_needless_failure.__name__,
        22,
        "hear refused of A0",
    ),
    Mutation.PUBLISH_WHEN_SCHEDULED: Kill(
        8,
        Instance(num_requests=2, shares_prefix=True, leaves=1),
        RIGHT_BYTES,
        16,
        "hear answer (valid) of B0",
    ),
    Mutation.FINGERPRINT_NOT_COMPARED: Kill(
        9, Instance(has_odd_worker=True), RIGHT_BYTES, 13, "hear answer (valid) of A0"
    ),
    Mutation.FREE_TWICE: Kill(10, TWO, BOOKS, 10, "hear release (receiver) of A0"),
}
