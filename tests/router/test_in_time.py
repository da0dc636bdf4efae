"""Who is refused since it would come too late, or be in the way, and when it may come again."""

from dataclasses import replace

import pytest

from paceline.core.pace import ByClass, Pace
from paceline.core.request import Priority
from router.in_time import Bounds, Refusal, Way, prospects, refusal
from router.views import Ask, WorkerView
from tests.factories import make_worker
from tests.router.test_forecast import PACE, make_queue

STANDARD = Ask(num_prompt_tokens=1000, max_tokens=100)
REALTIME, BATCH = (replace(STANDARD, priority=each) for each in (Priority.REALTIME, Priority.BATCH))
NONE = Bounds()
# Nobody waits for more than ten seconds, and REALTIME requests have their first token within one.
BOUNDS = Bounds(max_delay_s=10.0, realtime_ttft_s=1.0)


def _busy(*normal: int, pace: Pace = PACE, waiting: ByClass = (0, 0, 0), num_running: int = 0) -> WorkerView:
    """So many tokens of each class wait; a thousand take a second."""
    realtime, standard, batch = normal or (0, 0, 0)
    queue = make_queue(normal=(realtime, standard, batch), pace=pace, waiting=waiting)
    return replace(make_worker(num_running=num_running, num_waiting=sum(waiting)), queue=queue)


def _asked(
    ask: Ask,
    *workers: WorkerView,
    time_left_s: float | None = None,
    bounds: Bounds = NONE,
    num_tokens: int = 100,
) -> Refusal | None:
    known = prospects(ask, [Way(worker, num_tokens) for worker in workers])
    return refusal(ask, known, time_left_s, bounds)


def _refused(
    ask: Ask,
    *workers: WorkerView,
    time_left_s: float | None = None,
    bounds: Bounds = NONE,
    num_tokens: int = 100,
) -> Refusal:
    found = _asked(ask, *workers, time_left_s=time_left_s, bounds=bounds, num_tokens=num_tokens)
    assert found is not None
    return found


# -- the own deadline


def test_who_cannot_be_served_before_its_deadline_is_refused_at_once() -> None:
    """With the time after which it could; with more time, or a worker that has some, it is taken."""
    worker = _busy(0, 4900, 0)
    found = _refused(STANDARD, worker, time_left_s=3.0)
    assert found.rule == "deadline"
    assert found.retry_after_s is not None
    assert 2.0 < found.retry_after_s < 3.0
    assert _asked(STANDARD, worker, time_left_s=6.0) is None
    assert _asked(STANDARD, worker, _busy(), time_left_s=3.0) is None
    assert _asked(STANDARD, worker) is None


def test_whoever_waits_as_long_as_it_was_told_is_taken() -> None:
    """After that time so much less is queued."""
    found = _refused(STANDARD, _busy(0, 4900, 0), time_left_s=3.0)
    assert found.retry_after_s is not None
    left = 4900 - int(500 * (found.retry_after_s // 0.51))
    assert _asked(STANDARD, _busy(0, left, 0), time_left_s=3.0) is None


def test_a_delay_is_told_up_to_the_next_millisecond() -> None:
    """Whoever comes a moment too early is refused again."""
    worker, time_left_s = _busy(0, 4900, 0), 2.9996
    found = _refused(STANDARD, worker, time_left_s=time_left_s)
    (best,) = prospects(STANDARD, [Way(worker, 100)])
    exact_s = best.forecast.end_s - time_left_s + best.forecast.grain_s
    assert found.retry_after_s is not None
    assert exact_s < found.retry_after_s < exact_s + 0.001


def test_for_what_idle_workers_could_not_do_there_is_no_time_to_come_again() -> None:
    """A prompt of five seconds does not fit into three, whenever it comes."""
    assert _refused(STANDARD, _busy(), time_left_s=3.0, num_tokens=5000).retry_after_s is None


def test_an_answer_whose_length_is_certain_must_fit_too() -> None:
    """A hundred tokens at eleven milliseconds each; of a hand-over only the prompt is judged."""
    ask = replace(STANDARD, min_output_tokens=100)
    assert _refused(ask, _busy(), time_left_s=1.0).retry_after_s is None
    assert _asked(ask, _busy(), time_left_s=1.5) is None
    assert refusal(ask, prospects(ask, [Way(_busy(), 100, is_local=False)]), 1.0, NONE) is None


# -- the longest wait


def test_nobody_waits_for_longer_than_the_bound_and_batch_reaches_it_first() -> None:
    """Whoever comes later in turn has more before it."""
    worker = _busy(1000, 7000, 7000)
    assert _asked(STANDARD, worker, bounds=replace(BOUNDS, realtime_ttft_s=0)) is None
    found = _refused(BATCH, worker, bounds=replace(BOUNDS, realtime_ttft_s=0))
    assert found.rule == "delay"
    assert found.retry_after_s == pytest.approx(5.0 + 0.51, abs=0.1)


def test_what_takes_long_by_itself_does_not_count_as_waiting() -> None:
    """A prompt of a minute is taken where nobody else is."""
    assert _asked(STANDARD, _busy(), bounds=BOUNDS, num_tokens=60_000) is None


# -- what REALTIME requests are promised


def test_a_realtime_request_is_refused_only_when_it_would_be_late() -> None:
    """Others do not keep it from anything but the half of a step."""
    assert _asked(REALTIME, _busy(500, 6000, 9000), bounds=BOUNDS) is None
    found = _refused(REALTIME, _busy(2000, 0, 0), bounds=BOUNDS)
    assert found.rule == "realtime"
    assert found.retry_after_s == pytest.approx(0.9 + 0.51, abs=0.1)


def test_others_are_refused_while_realtime_requests_are_late_batch_before_standard() -> None:
    """At half of what is promised, and at all of it."""
    early, late = _busy(700, 0, 0), _busy(1500, 0, 0)
    assert _asked(STANDARD, early, bounds=BOUNDS) is None
    assert _refused(BATCH, early, bounds=BOUNDS).rule == "realtime"
    found = _refused(STANDARD, late, bounds=BOUNDS)
    assert found.rule == "realtime"
    assert found.retry_after_s == pytest.approx(0.53 + 0.51, abs=0.1)
    # Another worker has time for the next REALTIME request.
    assert _asked(STANDARD, late, _busy(), bounds=BOUNDS) is None


def test_the_last_seat_is_kept_where_waiting_for_one_takes_too_long() -> None:
    """Of eight seats seven are taken, and a turn takes three seconds: the eighth is for a REALTIME request."""
    pace = replace(PACE, turn_s=3.0)
    assert _asked(STANDARD, _busy(pace=pace, num_running=6), bounds=BOUNDS) is None
    found = _refused(STANDARD, _busy(pace=pace, num_running=7), bounds=BOUNDS)
    assert (found.rule, found.retry_after_s) == ("realtime", 6.0)
    assert _asked(REALTIME, _busy(pace=pace, num_running=7), bounds=BOUNDS) is None
    # Where turns are short enough seats are everybody's.
    assert _asked(STANDARD, _busy(pace=replace(PACE, turn_s=0.4), num_running=7), bounds=BOUNDS) is None


def test_a_realtime_request_that_is_too_long_for_the_promise_is_judged_like_a_standard_one() -> None:
    """It is not refused for ever."""
    assert _asked(REALTIME, _busy(), bounds=BOUNDS, num_tokens=5000) is None
    assert _refused(REALTIME, _busy(1500, 0, 0), bounds=BOUNDS, num_tokens=5000).rule == "realtime"


def test_a_delay_can_be_told_however_much_is_queued() -> None:
    """Whatever number a worker says: a RetryInfo holds no more than ten thousand years."""
    found = _refused(BATCH, _busy(0, 2**64 - 1, 0), bounds=BOUNDS)
    assert found.retry_after_s == 1e9


# -- what is not known


def test_who_may_be_served_in_time_as_far_as_anybody_knows_is_taken() -> None:
    """A worker that says nothing of its pace may be the best; and without bounds and deadline nobody is refused."""
    late = _busy(9000, 9000, 9000)
    assert _asked(BATCH, late, make_worker(), time_left_s=0.1, bounds=BOUNDS) is None
    assert _asked(BATCH, time_left_s=0.1, bounds=BOUNDS) is None
    assert _asked(BATCH, late) is None
