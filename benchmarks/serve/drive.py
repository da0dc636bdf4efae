"""Puts a workload on a server, and says when each token came."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from benchmarks.serve.targets import RefusedError, Target
from benchmarks.serve.workloads import Conversation, Turn, Workload
from benchmarks.simulator.records import Mode, RequestRecord
from benchmarks.simulator.trace import TraceRequest
from paceline.core.errors import ConfigError

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Life:
    """One turn, as its user saw it, in seconds since the workload began."""

    group: str
    record: RequestRecord


async def drive(workload: Workload, target: Target, clock: Clock = time.perf_counter) -> list[Life]:
    """All of it, in the order in which turns ended; raises ConfigError for what a server cannot be asked.

    A conversation ends with a turn that fails; the others go on.
    """
    driver, waiting = _Driver(target, clock), list(reversed(workload.conversations))

    async def some() -> None:
        """One conversation after the other."""
        while waiting:
            await driver.converse(waiting.pop())

    async def later(conversation: Conversation) -> None:
        """One when it begins."""
        await asyncio.sleep(conversation.start_s)
        await driver.converse(conversation)

    try:
        async with asyncio.TaskGroup() as group:
            if workload.concurrency is None:
                for conversation in workload.conversations:
                    group.create_task(later(conversation))
            else:
                for _ in range(workload.concurrency):
                    group.create_task(some())
    except ExceptionGroup as several:
        # What one conversation cannot have, none can: the first says it for all.
        raise several.exceptions[0] from several
    return driver.lives


class _Driver:
    """One server under one workload."""

    def __init__(self, target: Target, clock: Clock) -> None:
        self._target = target
        self._clock = clock
        self._start_s = clock()
        self.lives: list[Life] = []

    async def converse(self, conversation: Conversation) -> None:
        history: tuple[int, ...] = ()
        for turn in conversation.turns:
            prompt_ids = history + turn.new_ids
            token_ids = await self._take_turn(conversation.group, prompt_ids, turn)
            if len(token_ids) != turn.num_output_tokens:
                return
            if turn is not conversation.turns[-1] and min(token_ids) < 0:
                raise ConfigError(
                    f"{self._target.name} does not say its tokens' ids, so that no second turn can follow"
                )
            history = prompt_ids + token_ids

    async def _take_turn(self, group: str, prompt_ids: Sequence[int], turn: Turn) -> tuple[int, ...]:
        sent_s = self._clock() - self._start_s
        token_ids, times_s, refusal = list[int](), list[float](), ""
        try:
            async with aclosing(self._target.answer(prompt_ids, turn.num_output_tokens)) as parts:
                async for part in parts:
                    token_ids += part
                    times_s += [self._clock() - self._start_s] * len(part)
        except RefusedError as error:
            refusal = str(error)
        mode: Mode = "local" if len(token_ids) == turn.num_output_tokens else "failed"
        request = TraceRequest(sent_s, len(prompt_ids), turn.num_output_tokens)
        reason = refusal or f"{len(token_ids)} tokens came" if mode == "failed" else ""
        record = RequestRecord(len(self.lives), request, mode, tuple(times_s), reason=reason)
        self.lives.append(Life(group, record))
        return tuple(token_ids)
