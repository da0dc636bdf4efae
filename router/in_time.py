"""Decides whether a request would have its first token in time, and in nobody more urgent's way: plain data in, plain data out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.core.request import Priority
from router.forecast import Forecast, current_step_s, forecast, num_turns, pending
from router.views import Ask, QueueFacts, WorkerView

# Which bound a request would pass: its own deadline, the longest wait, or what REALTIME requests are promised.
Rule = Literal["deadline", "delay", "realtime"]
# BATCH requests give way from this share of what REALTIME requests are promised.
_BATCH_SHARE = 0.5
# What a worker says of its queue may be any number; a delay that nobody could wait for is as good as a longer one.
_LONGEST_S = 1e9


@dataclass(frozen=True, slots=True)
class Bounds:
    """In seconds: the longest that others may make a request wait, and a REALTIME request's time to first token; 0: none."""

    max_delay_s: float = 0.0
    realtime_ttft_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Way:
    """A worker that could compute the prompt, and how many of its tokens it would have to; a local one generates too."""

    worker: WorkerView
    num_tokens: int
    is_local: bool = True


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not taken, and in how many seconds it would be; None: not even with the workers to itself."""

    rule: Rule
    problem: str
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class Prospect:
    """A way, and what would come of it."""

    forecast: Forecast
    way: Way


def prospects(ask: Ask, ways: Sequence[Way]) -> list[Prospect]:
    """The way with the earliest first token comes first; none if a worker has not said how fast it is, since that may be the best."""
    told = [(_forecast(ask, way), way) for way in ways]
    known = [Prospect(each, way) for each, way in told if each is not None]
    if len(known) < len(told):
        return []
    return sorted(known, key=lambda prospect: prospect.forecast.ttft_s)


def refusal(ask: Ask, known: Sequence[Prospect], time_left_s: float | None, bounds: Bounds) -> Refusal | None:
    """None for a request that is taken, as whoever is of whom nothing is known."""
    if not known:
        return None
    if time_left_s is not None and (found := _too_late(known, time_left_s)) is not None:
        return found
    best = known[0].forecast
    if bounds.max_delay_s and best.wait_s > bounds.max_delay_s:
        problem = f"others are served for {best.wait_s:.3g} s before, and nobody waits for more than {bounds.max_delay_s:g} s"
        return Refusal("delay", problem, _later(best.wait_s - bounds.max_delay_s, best))
    if not bounds.realtime_ttft_s:
        return None
    # One that could not keep it anyway is judged as a STANDARD one.
    alone_s = min(each.forecast.alone_ttft_s for each in known)
    if ask.priority is Priority.REALTIME and alone_s <= bounds.realtime_ttft_s:
        return _late_for_realtime(best, bounds.realtime_ttft_s)
    return _in_the_way(ask, known[0].way, [each.way.worker for each in known], bounds.realtime_ttft_s)


def _forecast(ask: Ask, way: Way) -> Forecast | None:
    """Of what is generated elsewhere the time is not known: only what is computed here counts."""
    num_after = ask.min_output_tokens - 1 if way.is_local else 0
    return forecast(ask, way.num_tokens, way.worker, num_after)


def _too_late(known: Sequence[Prospect], time_left_s: float) -> Refusal | None:
    best = min((each.forecast for each in known), key=lambda each: each.end_s)
    if best.end_s <= time_left_s:
        return None
    problem = (
        f"the shortest answer would take {best.end_s:.3g} s, and the caller waits for {time_left_s:.3g} s"
    )
    if min(each.forecast.alone_end_s for each in known) > time_left_s:
        return Refusal("deadline", problem, None)
    return Refusal("deadline", problem, _later(best.end_s - time_left_s, best))


def _late_for_realtime(best: Forecast, bound_s: float) -> Refusal | None:
    if best.ttft_s <= bound_s:
        return None
    problem = f"the first token would come in {best.ttft_s:.3g} s, and REALTIME requests have theirs in {bound_s:g} s"
    return Refusal("realtime", problem, _later(best.ttft_s - bound_s, best))


# -- whoever is less urgent


def _in_the_way(ask: Ask, way: Way, workers: Sequence[WorkerView], promised_s: float) -> Refusal | None:
    """A request that would leave the next REALTIME one waiting for longer than is promised; BATCH ones are refused before others."""
    bound_s = promised_s * (_BATCH_SHARE if ask.priority is Priority.BATCH else 1.0)
    joined = _with(ask, way.worker)
    after = [joined if worker is way.worker else worker for worker in workers]
    wait_s, worker = min(((_realtime_wait_s(each), each) for each in after), key=lambda pair: pair[0])
    if wait_s <= bound_s:
        return None
    problem = f"REALTIME requests would wait for {wait_s:.3g} s"
    return Refusal("realtime", problem, _rounded(_until_out_of_the_way_s(worker, wait_s, bound_s)))


def _realtime_wait_s(worker: WorkerView) -> float:
    """Of the next one, for those of its class before it and for a seat."""
    facts = _facts(worker)
    queued = pending(worker, facts)
    before_s = facts.pace.compute_s(
        queued.fast[0] + queued.normal[0], worker.num_running, facts.max_step_tokens
    )
    return max(before_s, num_turns(Ask(Priority.REALTIME), worker, facts) * facts.pace.turn_s)


def _until_out_of_the_way_s(worker: WorkerView, wait_s: float, bound_s: float) -> float:
    facts = _facts(worker)
    turns = num_turns(Ask(Priority.REALTIME), worker, facts)
    grain_s = max(current_step_s(worker, facts), facts.pace.turn_s if turns else 0.0)
    if not turns or facts.pace.turn_s <= bound_s:
        # Those who wait now are served meanwhile.
        return wait_s - bound_s + grain_s
    # Any wait for a seat is too long: until there is one more than are needed.
    num_over = worker.num_sequences + 1 - facts.max_seats
    return facts.pace.turn_s * (1 + max(num_over, sum(facts.waiting)))


def _with(ask: Ask, worker: WorkerView) -> WorkerView:
    """A worker that has been given the request."""
    num = ask.num_candidates
    return replace(
        worker,
        num_running=worker.num_running + num,
        num_assigned_sequences=worker.num_assigned_sequences + num,
    )


def _facts(worker: WorkerView) -> QueueFacts:
    assert worker.queue is not None, "nothing is refused before all is known"
    return worker.queue


def _later(seconds: float, best: Forecast) -> float:
    return _rounded(seconds + best.grain_s)


def _rounded(seconds: float) -> float:
    # Up to the next millisecond: who comes a moment too early is refused again.
    return math.ceil(min(seconds, _LONGEST_S) * 1000) / 1000
