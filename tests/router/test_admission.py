"""The door of the router."""

import pytest

from paceline.core.errors import DrainingError, QueueFullError
from router.admission import AdmissionController


def test_places_are_counted_from_zero() -> None:
    """Each request hears how many were there before it."""
    admission = AdmissionController(3)
    with admission.admit() as first, admission.admit() as second:
        assert (first, second) == (0, 1)
        assert admission.stats().num_active == 2
    assert admission.stats().num_active == 0


def test_a_full_router_refuses_and_says_when_to_come_back() -> None:
    """The bound is exact: the last place is given, one more is refused, and a place that becomes free is given again."""
    admission = AdmissionController(2)
    with admission.admit():
        with admission.admit(), pytest.raises(QueueFullError) as caught, admission.admit():
            pass
        assert caught.value.retry_after_s > 0
        with admission.admit() as position:
            assert position == 1
    stats = admission.stats()
    assert (stats.num_active, stats.num_admitted, stats.num_refused) == (0, 3, 1)


def test_a_place_comes_back_however_the_request_ends() -> None:
    """After an exception nothing is held."""
    admission = AdmissionController(1)
    for _ in range(2):
        with pytest.raises(ValueError, match="a bug"), admission.admit():
            raise ValueError("a bug")
    assert admission.stats().num_active == 0


def test_a_closed_door_takes_nobody_and_leaves_those_inside() -> None:
    """While draining, new requests hear DRAINING, and those under way keep their places."""
    admission = AdmissionController(2)
    with admission.admit():
        admission.close()
        with pytest.raises(DrainingError), admission.admit():
            pass
        assert admission.stats().num_active == 1
    assert admission.stats().num_active == 0
