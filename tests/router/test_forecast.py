"""When a request would have its first token, as far as a worker's own words tell."""

from dataclasses import replace

import pytest

from paceline.core.pace import ByClass, FastLane, Pace, PendingTokens
from paceline.core.request import Priority
from router.forecast import Forecast, forecast, soonest
from router.views import Ask, QueueFacts, WorkerView
from tests.factories import make_spec, make_worker

PACE = Pace(step_s=0.01, decode_s=0.001, prompt_token_s=0.001)
NOBODY: ByClass = (0, 0, 0)
LONG = Ask(num_prompt_tokens=1000, max_tokens=100)


def make_queue(
    *,
    pace: Pace = PACE,
    fast: ByClass = NOBODY,
    normal: ByClass = NOBODY,
    waiting: ByClass = NOBODY,
    is_blocked: bool = False,
    max_seats: int = 8,
    lane: FastLane | None = None,
) -> QueueFacts:
    """A worker whose steps take 500 tokens at most."""
    return QueueFacts(
        pace, PendingTokens(fast, normal), waiting, is_blocked, max_seats, 500, lane or FastLane()
    )


def _worker(queue: QueueFacts | None = None, **facts: int) -> WorkerView:
    return replace(make_worker(**facts), queue=queue or make_queue())  # type: ignore[arg-type] # each is its field's


def _ttft_s(worker: WorkerView, ask: Ask = LONG, num_tokens: int = 100) -> float:
    told = forecast(ask, num_tokens, worker)
    assert told is not None
    return told.ttft_s


def test_nothing_is_predicted_of_a_worker_that_says_nothing_of_its_pace() -> None:
    """And then not of several either, since that one may be the best."""
    silent = make_worker()
    assert forecast(LONG, 100, silent) is None
    told = forecast(LONG, 100, _worker())
    assert soonest([told]) == told
    assert soonest([told, None]) is None
    assert soonest([]) is None


def test_alone_a_prompt_takes_its_steps_and_its_tokens() -> None:
    """A prompt of 1,200 tokens takes three steps of 500 at most."""
    assert forecast(LONG, 1200, _worker()) == Forecast(1.23, 1.23, 1.23, 1.23, 0.0)


def test_those_of_an_earlier_class_and_of_the_same_one_come_first() -> None:
    """A REALTIME request waits for no other class but for the half of a step that is under way."""
    worker = _worker(make_queue(normal=(100, 200, 400)))
    begun_s = (0.01 + 0.5) / 2
    waits = [_ttft_s(worker, replace(LONG, priority=priority)) for priority in Priority]
    assert waits == pytest.approx([begun_s + 0.21, begun_s + 0.41, begun_s + 0.82])


def test_what_was_sent_counts_until_it_is_reported() -> None:
    """The higher of the two, of each class."""
    worker = _worker(make_queue(normal=(0, 50, 0)))
    sent = replace(worker, assigned=PendingTokens(NOBODY, (0, 300, 0)))
    reported = _worker(make_queue(normal=(0, 300, 0)))
    assert _ttft_s(worker) < _ttft_s(sent) == _ttft_s(reported)


def test_decodes_make_steps_longer_and_leave_less_room_in_them() -> None:
    """With 300 that decode a step has room for 200 tokens of prompts."""
    queue = make_queue(max_seats=400)
    assert _ttft_s(_worker(queue, num_running=300)) == pytest.approx(0.31 * 1.5 + 0.1)
    assert _ttft_s(_worker(queue, num_running=300), num_tokens=400) == pytest.approx(0.31 * 2.5 + 0.4)


def test_without_a_seat_it_takes_turns() -> None:
    """One for each that waits before it and half a one for itself; of a worker that has seats none."""
    pace = replace(PACE, turn_s=2.0)
    full = _worker(make_queue(pace=pace, waiting=(1, 2, 4)), num_running=8, num_waiting=7)
    own_s = 0.018 + 0.1
    asks = [replace(LONG, priority=priority) for priority in Priority]
    assert [_ttft_s(full, ask) for ask in asks] == pytest.approx([each + own_s for each in (3.0, 7.0, 15.0)])
    assert _ttft_s(_worker(make_queue(pace=pace), num_running=7)) < 1.0
    blocked = _worker(make_queue(pace=pace, is_blocked=True), num_running=1)
    assert _ttft_s(blocked) == pytest.approx(1.0 + 0.011 + 0.1)


def test_the_fast_lane_has_its_part_of_each_step() -> None:
    """A short request does not wait for long ones, but they share the steps; and the other way round."""
    lane = FastLane(share=0.25, prompt_tokens=128, output_tokens=128)
    queue = make_queue(normal=(0, 3000, 0), lane=lane)
    short = Ask(num_prompt_tokens=50, max_tokens=10)
    # 50 tokens of it are computed beside 150 of the others, in one step after half of a full one.
    assert _ttft_s(_worker(queue), short, 50) == pytest.approx(0.255 + 0.01 + 0.2)
    crowded = make_queue(fast=(0, 3000, 0), lane=lane)
    # 300 tokens of it are computed beside 100 of the fast lane.
    assert _ttft_s(_worker(crowded), LONG, 300) == pytest.approx(0.255 + 0.01 + 0.4)


def test_those_who_are_more_urgent_and_will_come_count_too() -> None:
    """If REALTIME requests take half of the time, everybody else takes twice as long."""
    busy = make_queue(pace=replace(PACE, tokens_per_s=(480.0, 0.0, 0.0)))
    assert _ttft_s(_worker(busy)) == pytest.approx(0.11 / (1 - 0.49))
    assert _ttft_s(_worker(busy), replace(LONG, priority=Priority.REALTIME)) == pytest.approx(0.11)


def test_an_answer_takes_as_many_steps_as_it_is_sure_to_have_tokens() -> None:
    """With the prompts that are computed meanwhile."""
    told = forecast(LONG, 100, _worker(), num_after=10)
    assert told is not None
    assert (told.ttft_s, told.end_s) == pytest.approx((0.11, 0.11 + 10 * 0.011))
    queued = forecast(
        replace(LONG, priority=Priority.REALTIME), 100, _worker(make_queue(normal=(0, 200, 0))), 10
    )
    assert queued is not None
    assert queued.end_s - queued.ttft_s == pytest.approx(10 * 0.011 + 0.2)
    assert queued.alone_end_s == told.end_s


def test_an_answer_that_may_end_early_is_sure_of_little() -> None:
    """Of max_tokens only one that ignores its end is sure."""
    assert Ask.of(make_spec(max_tokens=8)).min_output_tokens == 1
    assert Ask.of(make_spec(max_tokens=8, min_tokens=5)).min_output_tokens == 5
    assert Ask.of(make_spec(max_tokens=8, ignore_eos=True)).min_output_tokens == 8
    assert Ask.of(make_spec(max_tokens=8, ignore_eos=True, stop_token_ids=(3,))).min_output_tokens == 1
