"""Time as an argument."""

import pytest

from paceline.core.clock import ManualClock, monotonic


def test_a_manual_clock_moves_only_when_told() -> None:
    """Its time is the sum of what it was advanced by."""
    clock = ManualClock(5.0)
    assert clock() == clock() == 5.0
    clock.advance(2.5)
    assert clock() == 7.5


def test_a_manual_clock_never_goes_back() -> None:
    """A negative step is a bug of the test that takes it."""
    with pytest.raises(AssertionError):
        ManualClock().advance(-1)


def test_the_real_clock_never_goes_back() -> None:
    """Later readings are not smaller."""
    readings = [monotonic() for _ in range(100)]
    assert readings == sorted(readings)
