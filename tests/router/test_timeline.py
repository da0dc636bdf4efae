"""The life of one request in seconds."""

import pytest

from paceline.core.clock import ManualClock
from paceline.v1.prefill_pb2 import PrefillStarted
from router.forecast import Forecast
from router.timeline import RequestTimeline


@pytest.mark.parametrize("start_s", [0.0, 1000.0])
def test_the_phases_add_up(start_s: float) -> None:
    """Queue in router and worker, prefill, decode: together the time from arrival to the last token."""
    clock = ManualClock(start_s)
    timeline = RequestTimeline(clock)
    clock.advance(1)
    timeline.note_dispatch()
    timeline.note_started(PrefillStarted(queued_s=2))
    clock.advance(5)
    timeline.note_tokens()
    clock.advance(4)
    timeline.note_tokens()
    clock.advance(16)
    proto = timeline.to_proto()
    assert (proto.queued_s, proto.prefill_s, proto.decode_s) == (3, 3, 4)
    assert proto.attempts == 1


@pytest.mark.parametrize("start_s", [0.0, 1000.0])
def test_a_later_attempt_changes_no_beginning(start_s: float) -> None:
    """The queue ends with the first dispatch and the prefill with the first token, however many attempts follow."""
    clock = ManualClock(start_s)
    timeline = RequestTimeline(clock)
    timeline.note_dispatch()
    clock.advance(2)
    timeline.note_tokens()
    clock.advance(3)
    timeline.note_dispatch()
    timeline.note_started(PrefillStarted(queued_s=4, num_pulled_blocks=3, num_pulled_bytes=30))
    clock.advance(5)
    timeline.note_tokens()
    proto = timeline.to_proto()
    assert (proto.queued_s, proto.prefill_s, proto.decode_s, proto.attempts) == (0, 2, 8, 2)
    assert (proto.prefix_blocks, proto.prefix_bytes) == (3, 30)


def test_a_request_without_tokens_has_no_phases() -> None:
    """Nothing happened: all zero, nothing negative."""
    proto = RequestTimeline(ManualClock(5)).to_proto()
    assert (proto.queued_s, proto.prefill_s, proto.transfer_s, proto.decode_s) == (0, 0, 0, 0)
    assert proto.attempts == 0


def test_hand_overs_add_up() -> None:
    """Blocks, bytes and seconds of every hand-over, preemptions of every candidate, and who worked on it last."""
    timeline = RequestTimeline(ManualClock())
    timeline.note_transfer(3, 300, 0.5)
    timeline.note_transfer(2, 200, 0.25)
    timeline.prefill_worker, timeline.decode_worker = "p", "d"
    for candidate, num_preemptions in ((0, 1), (1, 1), (0, 3)):
        timeline.note_preemptions(candidate, num_preemptions)
    proto = timeline.to_proto()
    assert (proto.kv_blocks, proto.kv_bytes, proto.transfer_s) == (5, 500, 0.75)
    assert (proto.prefill_worker, proto.decode_worker, proto.preemptions) == ("p", "d", 4)


def test_what_was_predicted_counts_from_the_arrival() -> None:
    """Of the first attempt; where nothing was known nothing is said."""
    clock = ManualClock()
    timeline = RequestTimeline(clock)
    assert not timeline.to_proto().HasField("predicted_ttft_s")
    clock.advance(0.5)
    timeline.note_dispatch(Forecast(2.0, 3.0, 1.0, 1.5, 0.1))
    timeline.note_dispatch(Forecast(9.0, 9.0, 9.0, 9.0, 0.1))
    assert timeline.to_proto().predicted_ttft_s == 2.5
    assert timeline.ttft_s is None
    clock.advance(2.0)
    timeline.note_tokens()
    assert timeline.ttft_s == 2.5
