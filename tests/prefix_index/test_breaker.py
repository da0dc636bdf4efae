"""When to stop asking, and when to ask again."""

import pytest

from paceline.core.clock import ManualClock
from paceline.prefix_index.breaker import CircuitBreaker


@pytest.fixture
def clock() -> ManualClock:
    """Time that moves when told to."""
    return ManualClock()


@pytest.fixture
def breaker(clock: ManualClock) -> CircuitBreaker:
    """Opens after three failures, for a second."""
    return CircuitBreaker(max_failures=3, pause_s=1.0, clock=clock)


def test_it_opens_after_failures_in_a_row(breaker: CircuitBreaker) -> None:
    """Failures with a success between them are bad luck; three in a row open it."""
    for outcome in (False, False, True, False, False):
        assert breaker.allows_call()
        breaker.record_success() if outcome else breaker.record_failure()
    assert breaker.allows_call()
    breaker.record_failure()
    assert not breaker.allows_call()


def test_it_lets_one_trial_through_each_pause(breaker: CircuitBreaker, clock: ManualClock) -> None:
    """While open, one call a pause finds out whether things are better."""
    _open(breaker)
    clock.advance(1.0)
    assert [breaker.allows_call(), breaker.allows_call()] == [True, False]
    breaker.record_failure()
    assert not breaker.allows_call()
    clock.advance(1.0)
    assert breaker.allows_call()


def test_a_success_closes_it(breaker: CircuitBreaker, clock: ManualClock) -> None:
    """After a trial that went well every call is made again."""
    _open(breaker)
    clock.advance(1.0)
    assert breaker.allows_call()
    breaker.record_success()
    assert not breaker.is_open
    assert all(breaker.allows_call() for _ in range(10))


def test_a_trial_that_never_reports_back_does_not_keep_it_open(
    breaker: CircuitBreaker, clock: ManualClock
) -> None:
    """A cancelled trial costs one pause, not the table."""
    _open(breaker)
    clock.advance(1.0)
    assert breaker.allows_call()
    clock.advance(1.0)
    assert breaker.allows_call()


def _open(breaker: CircuitBreaker) -> None:
    for _ in range(3):
        breaker.record_failure()
