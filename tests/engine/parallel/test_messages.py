"""What rank 0 says to its followers."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.kv_layout import BlockId
from paceline.core.request import SamplingParams
from paceline.engine.forward_batch import build_forward_batch
from paceline.engine.parallel.messages import (
    Done,
    Pool,
    Start,
    Step,
    decode_to_follower,
    decode_to_leader,
    encode,
    outputs_of,
    step_of,
)
from paceline.engine.step import SampleTask, ScheduledSequence, SchedulerOutput, ScoreTask
from paceline.runtime.pool_memory import SharedMemoryOffer
from tests.factories import BLOCK_SIZE, make_id

TOKENS = st.integers(0, 1 << 18)


@st.composite
def _sequences(draw: st.DrawFn, num_groups: int) -> ScheduledSequence:
    token_ids = tuple(draw(st.lists(TOKENS, min_size=1, max_size=9)))
    start = draw(st.integers(0, 30))
    num_blocks = -(-(start + len(token_ids)) // BLOCK_SIZE)
    first_needed = start // BLOCK_SIZE
    # Blocks behind the window are not there.
    seen = [draw(st.integers(0, first_needed)) for _ in range(num_groups)]
    tables = tuple(
        tuple(None if i < first else BlockId(draw(st.integers(0, 1 << 31))) for i in range(num_blocks))
        for first in seen
    )
    task = SampleTask(SamplingParams(temperature=0.5, seed=3), prompt_ids=(1, 2), num_top_logprobs=2)
    first_row = draw(st.integers(0, len(token_ids) - 1))
    targets = tuple(draw(st.lists(TOKENS, max_size=len(token_ids) - first_row)))
    return ScheduledSequence(
        make_id(),
        token_ids,
        start,
        tables,
        samples=(task,) * draw(st.integers(0, 3)),
        score=draw(st.sampled_from([None, ScoreTask(first_row, targets, 1)])),
    )


OUTPUTS = st.integers(1, 3).flatmap(
    lambda num_groups: st.lists(_sequences(num_groups), min_size=1, max_size=4).map(
        lambda scheduled: SchedulerOutput(tuple(scheduled), ())
    )
)


@given(OUTPUTS)
def test_a_follower_computes_the_batch_that_the_leader_computes(output: SchedulerOutput) -> None:
    """The same tokens at the same places in the same blocks, and the logits of the same rows."""
    message = decode_to_follower(encode(step_of([output])))
    assert isinstance(message, Step)
    ours, theirs = (build_forward_batch(each, BLOCK_SIZE) for each in (output, *outputs_of(message)))
    for name in ("token_ids", "positions", "logit_rows"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
    assert all(map(torch.equal, ours.slot_mappings, theirs.slot_mappings))
    for our_part, their_part in zip(ours.queries, theirs.queries, strict=True):
        assert (our_part.first, our_part.last, our_part.context) == (
            their_part.first,
            their_part.last,
            their_part.context,
        )
        assert all(map(torch.equal, our_part.block_tables, their_part.block_tables))


def test_nothing_of_how_to_sample_is_said() -> None:
    """Two steps that differ in that alone are one message."""
    tasks = (SampleTask(SamplingParams(seed=seed), output_ids=(seed,)) for seed in (1, 2))
    said = [
        encode(
            step_of(
                [SchedulerOutput((ScheduledSequence(make_id(), (5,), 0, ((BlockId(0),),), (task,)),), ())]
            )
        )
        for task in tasks
    ]
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "message",
    [
        Start(1, 2, 1, "/somewhere", 5.0, 1, "/model", "float32", 16, "auto"),
        Pool(7, "int8", SharedMemoryOffer(12, 3, 4096, b"nonce")),
    ],
)
def test_the_other_messages_come_as_they_were_sent(message: Start | Pool) -> None:
    """What a follower needs to begin."""
    assert decode_to_follower(encode(message)) == message


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x81\xa4type\xa4Done", b"\x81\xa4type\xa4Step", b"\xc1"])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    """Bytes are read as messages of the kinds that there are, and as nothing else."""
    with pytest.raises(msgspec.MsgspecError):
        decode_to_follower(data)


def test_a_follower_has_one_answer() -> None:
    """And nothing else is taken for one."""
    assert decode_to_leader(encode(Done())) == Done()
    with pytest.raises(msgspec.MsgspecError):
        decode_to_leader(encode(step_of([])))
