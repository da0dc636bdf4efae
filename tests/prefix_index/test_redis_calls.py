"""Calls that never make their caller wait for long: of a server that answers, of one that hangs, and in a burst."""

import asyncio

from paceline.prefix_index.redis_calls import NoAnswer, RedisCalls
from tests.virtual_time import in_virtual_time, virtual_clock

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
