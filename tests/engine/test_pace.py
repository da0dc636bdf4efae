"""How fast an engine finds itself to be."""

import random

import pytest

from paceline.core.pace import Pace
from paceline.core.request import Priority
from paceline.engine.pace import PaceMeter
from paceline.engine.step_report import Admission

TRUE = Pace(step_s=0.005, decode_s=0.0003, prompt_token_s=0.0002)


def _duration_s(num_decodes: int, num_tokens: int, pace: Pace = TRUE) -> float:
    return pace.step_s + pace.decode_s * num_decodes + pace.prompt_token_s * num_tokens


def _watch(meter: PaceMeter, num_steps: int, pace: Pace = TRUE, *, noise: float = 0.0, seed: int = 1) -> None:
    """Steps of every kind; some of them take longer than they should."""
    chance = random.Random(seed)
    for _ in range(num_steps):
        num_decodes, num_tokens = chance.randrange(64), chance.choice((0, 0, 20, 200, 500))
        duration_s = _duration_s(num_decodes, num_tokens, pace) * (1 + chance.uniform(-noise, noise))
        if num_decodes + num_tokens:
            meter.note_step(num_decodes, num_tokens, duration_s)


def _known(meter: PaceMeter, now_s: float = 0.0) -> Pace:
    pace = meter.pace(now_s)
    assert pace is not None
    return pace


def _newcomer(num_tokens: int = 100, num_cached: int = 0) -> Admission:
    return Admission(Priority.STANDARD, 0.0, num_tokens, num_cached)


def test_nothing_is_said_before_some_prompts_were_computed() -> None:
    """Neither at the start nor after decodes alone: unknown is not nought."""
    meter = PaceMeter()
    assert meter.pace(0.0) is None
    for _ in range(1000):
        meter.note_step(3, 0, 0.006)
    assert meter.pace(0.0) is None
    _watch(meter, 40)
    assert meter.pace(0.0) is not None


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_what_a_step_takes_is_found(noise: float) -> None:
    """The three numbers come out of steps in which they are mixed, and noise makes them a little worse."""
    meter = PaceMeter()
    _watch(meter, 400, noise=noise)
    for num_decodes, num_tokens in ((1, 0), (60, 0), (0, 500), (30, 200)):
        predicted_s = _duration_s(num_decodes, num_tokens, _known(meter))
        assert predicted_s == pytest.approx(_duration_s(num_decodes, num_tokens), rel=0.001 + noise / 2)


def test_another_pace_is_learned() -> None:
    """A machine that has become slower is known to be so after some hundred steps."""
    meter, slower = PaceMeter(), Pace(0.01, 0.0006, 0.0004)
    _watch(meter, 400)
    _watch(meter, 1200, slower)
    assert _known(meter).prompt_token_s == pytest.approx(0.0004, rel=0.05)
    assert _known(meter).step_s == pytest.approx(0.01, rel=0.1)


def test_prompts_are_not_forgotten_while_only_decodes_are_computed() -> None:
    """After any number of decodes the next prompt is predicted as before."""
    meter = PaceMeter()
    _watch(meter, 400)
    for _ in range(10_000):
        meter.note_step(8, 0, _duration_s(8, 0))
    assert _known(meter).prompt_token_s == pytest.approx(TRUE.prompt_token_s, rel=0.01)


def test_steps_that_are_all_alike_are_predicted() -> None:
    """Where nothing tells the numbers apart none is negative, and together they are what a step takes."""
    meter = PaceMeter()
    for _ in range(50):
        meter.note_step(0, 512, _duration_s(0, 512))
    pace = _known(meter)
    assert min(pace.step_s, pace.decode_s, pace.prompt_token_s) >= 0
    assert _duration_s(0, 512, pace) == pytest.approx(_duration_s(0, 512), rel=0.001)


def test_a_turn_is_the_time_between_newcomers_while_there_is_no_room() -> None:
    """Time in which everybody has room does not count."""
    meter = PaceMeter()
    _watch(meter, 40)
    for second in range(20):
        meter.note_turns([_newcomer()], is_blocked=False, now_s=float(second))
    assert _known(meter, 19.0).turn_s == 0.0
    meter.note_turns([], is_blocked=True, now_s=20.0)
    for turn in range(1, 40):
        meter.note_turns([_newcomer()], is_blocked=True, now_s=20.0 + 0.5 * turn)
    assert meter.is_blocked
    assert _known(meter, 39.5).turn_s == pytest.approx(0.5, rel=0.1)


def test_a_turn_that_does_not_come_becomes_longer() -> None:
    """While nobody gets in the wait is at least as long as it has lasted."""
    meter = PaceMeter()
    _watch(meter, 40)
    for second in range(10):
        meter.note_turns([], is_blocked=True, now_s=float(second))
    assert _known(meter, 9.0).turn_s == 9.0


def test_what_comes_in_is_counted_by_class_and_without_what_is_cached() -> None:
    """In tokens a second of late."""
    meter = PaceMeter()
    _watch(meter, 40)
    for step in range(600):
        meter.note_turns([_newcomer(100, 60)] if step % 10 == 0 else [], is_blocked=False, now_s=step * 0.1)
    realtime, standard, batch = _known(meter, 60.0).tokens_per_s
    assert (realtime, batch) == (0.0, 0.0)
    assert standard == pytest.approx(40.0, rel=0.1)
    assert meter.cached_share == pytest.approx(0.6)
