"""Clients that never rest: each sends one request after the other and compares what comes with what came when all was quiet."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from benchmarks.chaos.answers import Answer, BrokenStreamError, Reading
from benchmarks.chaos.requests import Asked, with_stop
from paceline.client import GenerateOptions, PacelineClient
from paceline.client_error import PacelineRpcError
from paceline.core.clock import Clock, monotonic

# A request that takes longer is lost: nothing that is done to the cluster lasts so long.
_TIMEOUT_S = 120.0
_NOT_NOW = ("QUEUE_FULL", "RATE_LIMITED")
_LEAVES = 0.05  # share of requests that their client gives up


@dataclass(slots=True)
class Outcome:
    """What came of all requests."""

    num_requests: int = 0
    num_migrated: int = 0
    # Told to come again later, and given up by their client: neither is lost.
    num_refused: int = 0
    num_left: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Expected:
    """A request, and its answer from a cluster that nobody disturbed."""

    asked: Asked
    answer: Answer


async def quiet_answers(client: PacelineClient, requests: Sequence[Asked], seed: int) -> list[Expected]:
    """Asks each one once, and some of them again with a stop that their answer contains."""
    rng = random.Random(seed)  # noqa: S311 - to be drawn again, no secret
    expected = [Expected(asked, await ask(client, asked, Reading())) for asked in requests]
    for each in list(expected):
        first = each.answer.candidates[0]
        stopped = with_stop(each.asked, first.text, first.token_ids, rng) if rng.random() < 0.4 else None
        if stopped is not None:
            expected.append(Expected(stopped, await ask(client, stopped, Reading())))
    return expected


async def ask(client: PacelineClient, asked: Asked, reading: Reading) -> Answer:
    """The whole answer."""
    options: GenerateOptions = {**asked.options, "timeout_s": _TIMEOUT_S}
    async with aclosing(client.generate(asked.prompt, **options)) as events:
        return await reading.read(events)


class Load:
    """So many clients at once, until they are told to stop."""

    def __init__(
        self, client: PacelineClient, expected: Sequence[Expected], seed: int, clock: Clock = monotonic
    ) -> None:
        self._client = client
        self._expected = expected
        self._seed = seed
        self._clock = clock
        self._stopping = asyncio.Event()
        self.outcome = Outcome()

    async def run(self, num_clients: int) -> None:
        """Returns once they have been stopped, and each has what it asked for last."""
        async with asyncio.TaskGroup() as group:
            for number in range(num_clients):
                rng = random.Random(f"{self._seed}-{number}")  # noqa: S311 - as above
                group.create_task(self._client_loop(rng))

    def stop(self) -> None:
        """Nobody sends another request."""
        self._stopping.set()

    async def _client_loop(self, rng: random.Random) -> None:
        while not self._stopping.is_set():
            each = rng.choice(self._expected)
            self.outcome.num_requests += 1
            if rng.random() < _LEAVES:
                await self._leave(each.asked, rng.randint(1, 20))
            else:
                await self._compare(each)

    async def _compare(self, each: Expected) -> None:
        reading, outcome = Reading(self._clock), self.outcome
        try:
            answer = await ask(self._client, each.asked, reading)
        except PacelineRpcError as error:
            if error.reason in _NOT_NOW:
                outcome.num_refused += 1
                await asyncio.sleep(min(error.retry_after_s or 1.0, 5.0))
            else:
                outcome.lost.append(f"{error} after {reading.num_migrations} migrations: {each.asked}")
        except BrokenStreamError as error:
            outcome.wrong.append(f"{error}: {each.asked}")
        else:
            if answer != each.answer:
                outcome.wrong.append(f"{each.asked}\n  expected {each.answer}\n  got      {answer}")
        outcome.num_migrated += reading.num_migrations > 0
        outcome.gaps_s += reading.gaps_s

    async def _leave(self, asked: Asked, num_events: int) -> None:
        """Reads so many events, and goes."""
        self.outcome.num_left += 1
        options: GenerateOptions = {**asked.options, "timeout_s": _TIMEOUT_S}
        try:
            async with aclosing(self._client.generate(asked.prompt, **options)) as events:
                async for event in events:
                    if event.seq + 1 >= num_events:
                        return
        except PacelineRpcError as error:
            if error.reason not in _NOT_NOW:
                self.outcome.lost.append(f"{error}: {asked}")
