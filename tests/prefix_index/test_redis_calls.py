"""Calls that never make their caller wait for long: of a server that answers, of one that hangs, and in a burst."""

import asyncio

import pytest
from structlog.testing import capture_logs

from paceline.prefix_index.redis_calls import NoAnswer, RedisCalls
from tests.virtual_time import VirtualTimeLoop, in_virtual_time, virtual_clock

BUDGET_S = 0.005


def _calls() -> RedisCalls:
    """Nobody is connected before a command is sent."""
    return RedisCalls("redis://127.0.0.1:1", clock=virtual_clock)


async def _answered() -> object:
    """Takes most of the budget."""
    await asyncio.sleep(0.8 * BUDGET_S)
    return 1


async def _hung() -> object:
    """Never comes back."""
    return await asyncio.Event().wait()


@in_virtual_time
async def test_a_burst_waits_for_connections_and_every_call_is_answered() -> None:
    """A call's budget is the server's time: waiting for a connection while others are answered is none of it."""
    calls = _calls()
    answers = await asyncio.gather(*(calls.answer(_answered, BUDGET_S) for _ in range(400)))
    assert answers == [1] * 400
    assert calls.stats().num_failures == 0
    assert not calls.is_away


@in_virtual_time
async def test_a_burst_at_a_server_that_hangs_costs_no_more_than_two_budgets() -> None:
    """Who waits for a connection sees that nobody is answered, and then that nobody is asked any more."""
    calls = _calls()
    begin_s = virtual_clock()
    answers = await asyncio.gather(*(calls.answer(_hung, BUDGET_S) for _ in range(400)))
    assert all(isinstance(answer, NoAnswer) for answer in answers)
    assert virtual_clock() - begin_s <= 2.1 * BUDGET_S
    assert calls.is_away
    await calls.aclose()


@in_virtual_time
async def test_calls_that_are_given_up_leave_their_places() -> None:
    """By their caller, while they wait or are under way: afterwards as many as ever fit."""
    calls = _calls()
    waiting = [asyncio.create_task(calls.answer(_answered, 1.0)) for _ in range(60)]
    await asyncio.sleep(0.001)
    for call in waiting[::2]:
        call.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    begin_s = virtual_clock()
    assert await asyncio.gather(*(calls.answer(_answered, BUDGET_S) for _ in range(16))) == [1] * 16
    assert virtual_clock() - begin_s < BUDGET_S


@in_virtual_time
async def test_a_server_that_answers_one_connection_only_costs_a_few_budgets() -> None:
    """Who waits while the other connections hang gives up, though there are answers; as with a dead shard of a cluster."""
    calls, begin_s = _calls(), virtual_clock()
    hanging = [asyncio.create_task(calls.answer(_hung, BUDGET_S)) for _ in range(15)]
    await asyncio.sleep(0)
    answers = await asyncio.gather(*(calls.answer(_answered, BUDGET_S) for _ in range(400)))
    assert 1 in answers
    assert virtual_clock() - begin_s <= 3.1 * BUDGET_S
    await asyncio.gather(*hanging)
    await calls.aclose()


@in_virtual_time
async def test_nobody_waits_for_a_connection_longer_than_a_call_may_last() -> None:
    """Also when more calls come than a server that answers can answer."""
    calls = RedisCalls("redis://127.0.0.1:1", limit_s=0.1, clock=virtual_clock)
    begin_s = virtual_clock()
    answers = await asyncio.gather(*(calls.answer(_answered, BUDGET_S) for _ in range(1000)))
    assert 300 < answers.count(1) < 500
    assert virtual_clock() - begin_s <= calls.limit_s + 2 * BUDGET_S


@in_virtual_time
async def test_answers_to_callers_who_have_left_show_that_the_server_answers() -> None:
    """Those who wait for a connection are not told that the server is late, since others were cancelled."""
    calls = _calls()
    leaving = [asyncio.create_task(calls.answer(_answered, BUDGET_S)) for _ in range(32)]
    await asyncio.sleep(0)
    staying = [asyncio.create_task(calls.answer(_answered, BUDGET_S)) for _ in range(32)]
    await asyncio.sleep(0.5 * BUDGET_S)
    for call in leaving[:16]:
        call.cancel()
    assert await asyncio.gather(*staying) == [1] * 32
    assert calls.stats().num_failures == 0


@in_virtual_time
async def test_a_standstill_of_the_loop_fails_nobody_who_waits_for_a_connection() -> None:
    """What arrived meanwhile is read first, whether a caller waits for its answer or for its turn."""
    calls = _calls()
    burst = [asyncio.create_task(calls.answer(_answered, BUDGET_S)) for _ in range(100)]
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(_stand_still, 1.5 * BUDGET_S)
    assert await asyncio.gather(*burst) == [1] * 100
    assert calls.stats().num_failures == 0


@in_virtual_time
async def test_nobody_who_waits_for_a_connection_begins_after_the_end() -> None:
    """Once closed no call is made, by those who wait for their turn neither: nothing would close its connection."""
    calls = _calls()
    begun: list[int] = []

    async def hung() -> object:
        """Notes that it was made."""
        begun.append(1)
        return await _hung()

    callers = [asyncio.create_task(calls.answer(hung, 1.0)) for _ in range(20)]
    await asyncio.sleep(0.001)
    # Those who would say that the server is away.
    for caller in callers[:16]:
        caller.cancel()
    await calls.aclose()
    answers = await asyncio.gather(*callers[16:], calls.answer(hung, 1.0))
    assert all(isinstance(answer, NoAnswer) for answer in answers)
    assert (len(begun), calls.under_way) == (16, set())


@in_virtual_time
async def test_a_trial_that_waits_for_a_connection_is_made() -> None:
    """The breaker that is open since before is no reason to leave out the call that shall find out."""
    calls = RedisCalls("redis://127.0.0.1:1", limit_s=1.0, pause_s=0.99, clock=virtual_clock)
    await asyncio.gather(*(calls.answer(_hung, BUDGET_S) for _ in range(16)))
    assert calls.is_away
    await asyncio.sleep(calls.limit_s - 0.001 - virtual_clock())
    assert await calls.answer(_answered, BUDGET_S) == 1
    assert not calls.is_away


@in_virtual_time
async def test_a_call_that_cannot_even_begin_leaves_its_place() -> None:
    """It is a bug of ours and said; afterwards as many calls as ever fit."""
    calls = _calls()
    for _ in range(20):
        with pytest.raises(UnicodeEncodeError):
            await calls.answer(lambda: calls.run_script("return 1", ["\ud800"], []), BUDGET_S)
    begin_s = virtual_clock()
    assert await asyncio.gather(*(calls.answer(_answered, BUDGET_S) for _ in range(16))) == [1] * 16
    assert virtual_clock() - begin_s < BUDGET_S
    await calls.aclose()


def _stand_still(duration_s: float) -> None:
    """Something blocks the loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.stand_still(duration_s)


@in_virtual_time
async def test_who_is_away_for_longer_than_a_pause_is_told_of_once() -> None:
    """A hiccup that only opens the breaker is not; nor is what comes back told of twice, nor a password at all."""
    calls = RedisCalls("redis://paceline:secret@127.0.0.1:1", clock=virtual_clock)

    async def broken() -> object:
        """As of a server that nobody listens at."""
        raise ConnectionRefusedError("nobody listens")

    with capture_logs() as logs:
        for _ in range(3):
            await calls.answer(broken, BUDGET_S)
        assert calls.is_away and logs == []
        for ask in (broken, broken, _answered, _answered):
            await asyncio.sleep(1.1)
            await calls.answer(ask, BUDGET_S)
    assert [(line["event"], line["log_level"]) for line in logs] == [
        ("redis_lost", "warning"),
        ("redis_found", "info"),
    ]
    assert logs[0]["reason"] == "ConnectionRefusedError: nobody listens"
    assert "secret" not in str(logs)


@in_virtual_time
async def test_a_frozen_server_is_told_of_as_late() -> None:
    """It breaks no connection, and there is no other reason to name."""
    calls = _calls()
    with capture_logs() as logs:
        for _ in range(4):
            await calls.answer(_hung, BUDGET_S)
            await asyncio.sleep(1.1)
    assert [(line["event"], line["reason"]) for line in logs] == [("redis_lost", "no answer in time")]
    await calls.aclose()
