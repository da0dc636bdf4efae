"""What preemptions and waiting teach: the cushion, pauses, and how batch requests give way."""

from paceline.engine.overload import BatchMode, Overload
from paceline.engine.pressure import Pressure
from paceline.engine.scheduler_config import SchedulerConfig


def _config(max_num_seqs: int = 64, **settings: int) -> SchedulerConfig:
    return SchedulerConfig(16, max_num_seqs, **settings)  # type: ignore[arg-type] # each has its field's type


def _steps(pressure: Pressure, *preempted: bool, num_running: int = 10) -> None:
    for each in preempted:
        pressure.note_step(preempted=each, num_running=num_running)


def test_the_watermark_rises_with_preemptions_and_falls_when_all_is_calm() -> None:
    """Between its two bounds."""
    pressure = Pressure(_config(cool_down_after=100))
    _steps(pressure, *[True] * 3)
    assert 0.22 < pressure.watermark < 0.25
    _steps(pressure, *[True] * 30)
    assert pressure.watermark == 0.25
    _steps(pressure, *[False] * 1000)
    assert pressure.watermark == 0.2


def test_preempting_steps_close_together_begin_a_pause() -> None:
    """Three among eight do, three far apart do not; a pause has its length and lowers the seats."""
    pressure = Pressure(_config(cool_down_after=3, cool_down_window=8, cool_down_steps=4))
    _steps(pressure, *[True, *[False] * 7] * 3)
    assert pressure.max_seats == 64
    _steps(pressure, True, False, True, True)
    assert pressure.max_seats == 9
    cooling = []
    for _ in range(5):
        cooling.append(pressure.is_cooling)
        _steps(pressure, False)
    assert cooling == [True] * 4 + [False]


def test_seats_come_back_one_by_one_and_never_go_below_one() -> None:
    """However often there is a pause, one sequence may run, and calm gives all seats back."""
    pressure = Pressure(_config(16, cool_down_after=1, cool_down_window=8, cool_down_steps=4))
    _steps(pressure, *[True] * 50, num_running=1)
    assert pressure.max_seats == 1
    _steps(pressure, *[False] * 4)
    assert pressure.max_seats == 2
    _steps(pressure, *[False] * 100)
    assert pressure.max_seats == 16


def test_batch_gives_way_by_how_long_urgent_requests_wait() -> None:
    """At the limit static, at four times the limit refused."""
    overload = Overload(1.0)
    for wait_s, mode in ((0.9, BatchMode.CONTINUOUS), (1.0, BatchMode.STATIC), (4.0, BatchMode.REFUSED)):
        overload.note_wait(wait_s, now_s=10.0)
        assert overload.mode is mode
    assert overload.num_switches == 2


def test_it_comes_back_a_step_at_a_time_after_calm() -> None:
    """Calm is as long as the limit; a wait of half the limit is none, and begins it anew."""
    overload = Overload(1.0)
    overload.note_wait(5.0, now_s=0.0)
    overload.note_wait(0.1, now_s=1.0)
    overload.note_wait(0.6, now_s=1.5)
    overload.note_wait(0.1, now_s=2.0)
    modes = []
    for now_s in (2.9, 3.0, 3.9, 4.0):
        overload.note_wait(0.1, now_s=now_s)
        modes.append(overload.mode)
    assert modes == [BatchMode.REFUSED, BatchMode.STATIC, BatchMode.STATIC, BatchMode.CONTINUOUS]
    assert overload.num_switches == 3
