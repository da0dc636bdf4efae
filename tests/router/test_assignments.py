"""What was sent counts from the moment of placing to its end, and then leaves nothing behind."""

import pytest

from paceline.core.errors import PeerLostError
from router.assignments import Assignments
from router.placement import Route
from router.views import Ask
from tests.factories import make_worker

PREFILL, DECODE = make_worker("p0"), make_worker("d0")


def test_tokens_count_until_the_prompt_is_done_and_the_sequence_until_its_end() -> None:
    """The prefill worker has the tokens, the decode worker the sequence, each for its own time."""
    assignments = Assignments()
    with assignments.assign(Route(PREFILL, DECODE, num_tokens=40)) as assigned:
        assert (assignments.num_tokens(PREFILL.key), assignments.num_tokens(DECODE.key)) == (40, 0)
        assert (assignments.num_sequences(PREFILL.key), assignments.num_sequences(DECODE.key)) == (0, 1)
        assigned.prompt_done()
        assigned.prompt_done()
        assert (assignments.num_tokens(PREFILL.key), assignments.num_sequences(DECODE.key)) == (0, 1)
    assert assignments.num_sequences(DECODE.key) == 0


def test_a_local_prompt_counts_to_the_decode_worker() -> None:
    """Without a prefill worker the decode worker has both, and several add up."""
    assignments = Assignments()
    with (
        assignments.assign(Route(None, DECODE, num_tokens=40)),
        assignments.assign(Route(None, DECODE, num_tokens=2)),
    ):
        assert (assignments.num_tokens(DECODE.key), assignments.num_sequences(DECODE.key)) == (42, 2)
    assert (assignments.num_tokens(DECODE.key), assignments.num_sequences(DECODE.key)) == (0, 0)


def test_an_attempt_that_fails_counts_no_more() -> None:
    """However the body ends, everything is taken back."""
    assignments = Assignments()
    with pytest.raises(PeerLostError), assignments.assign(Route(PREFILL, DECODE, num_tokens=40)):
        raise PeerLostError("prefill-0 is lost")
    assert (assignments.num_tokens(PREFILL.key), assignments.num_sequences(DECODE.key)) == (0, 0)


def test_lives_of_workers_come_and_go_without_a_trace() -> None:
    """A worker that starts again is another one to count for; nothing is kept of those before."""
    assignments = Assignments()
    for epoch in range(50):
        worker = make_worker(epoch=epoch)
        with assignments.assign(Route(None, worker, num_tokens=3)), assignments.expect(worker, Ask(), 2):
            assert assignments.num_tokens(worker.key) == 5
        assert (assignments.num_tokens(worker.key), assignments.num_sequences(worker.key)) == (0, 0)
    assert (len(assignments._tokens), len(assignments._sequences)) == (0, 0)
