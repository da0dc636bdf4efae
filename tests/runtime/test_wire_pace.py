"""How fast a worker is, as messages."""

from math import inf, nan

import pytest

from paceline.core.pace import FastLane, Pace, PendingTokens
from paceline.runtime.wire_pace import fast_lane_of, pace_of, pace_to_proto, pending_of, pending_to_proto
from paceline.v1 import worker_pb2

PACE = Pace(0.005, 0.0003, 0.0002, 0.5, (1.0, 2.0, 3.0))


def test_what_is_said_is_understood() -> None:
    """Every number comes out where it went in."""
    load = worker_pb2.WatchLoadResponse(
        pace=pace_to_proto(PACE),
        pending_fast=pending_to_proto((1, 2, 0)),
        pending_normal=pending_to_proto((3, 4, 5)),
    )
    assert pace_of(load) == PACE
    assert pending_of(load) == PendingTokens((1, 2, 0), (3, 4, 5))
    info = worker_pb2.GetInfoResponse(
        fast_lane_share=0.3, fast_lane_prompt_tokens=128, fast_lane_output_tokens=64
    )
    assert fast_lane_of(info) == FastLane(0.3, 128, 64)


@pytest.mark.parametrize("field", ["step_s", "decode_s", "prompt_token_s", "turn_s", "batch_tokens_per_s"])
@pytest.mark.parametrize("number", [nan, inf, -1.0, 1e300])
def test_what_is_no_time_is_not_known(field: str, number: float) -> None:
    """Nobody is refused for a number that a worker cannot have measured."""
    said = pace_to_proto(PACE)
    setattr(said, field, number)
    assert pace_of(worker_pb2.WatchLoadResponse(pace=said)) is None


def test_silence_is_not_nought() -> None:
    """A worker that says nothing, or that nothing takes time, is not known."""
    assert pace_of(worker_pb2.WatchLoadResponse()) is None
    assert pace_of(worker_pb2.WatchLoadResponse(pace=worker_pb2.Pace())) is None


@pytest.mark.parametrize("share", [-0.1, 1.0, nan])
def test_a_share_that_is_none_is_no_lane(share: float) -> None:
    """Nothing is divided by it."""
    assert fast_lane_of(worker_pb2.GetInfoResponse(fast_lane_share=share)).share == 0.0
