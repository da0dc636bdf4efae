"""What engines are writing into which of the receiver's blocks, whether anybody still waits for it or not."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from paceline.core.kv_layout import BlockId

T = TypeVar("T")


class InFlight:
    """Owned by the event loop. A writing that has begun goes on when its pull is given up, and only its own end ends it."""

    def __init__(self) -> None:
        self._targets: dict[asyncio.Task[Any], frozenset[BlockId]] = {}

    def __len__(self) -> int:
        return len(self._targets)

    async def until_written(self, writing: Coroutine[Any, Any, T], into: Iterable[BlockId]) -> T:
        """Begins to write, and returns with it. A cancel ends the waiting only."""
        task = asyncio.create_task(writing)
        self._targets[task] = frozenset(into)
        task.add_done_callback(self._note_end)
        await asyncio.wait({task})
        return task.result()

    def settling(self, into: Sequence[BlockId]) -> "asyncio.Future[Any] | None":
        """See KVTransport.settling."""
        tasks = [task for task, targets in self._targets.items() if not targets.isdisjoint(into)]
        # However they end, they write no more.
        return asyncio.gather(*tasks, return_exceptions=True) if tasks else None

    async def until_empty(self) -> None:
        """Returns when nothing is written any more."""
        while self._targets:
            await asyncio.wait(set(self._targets))

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        del self._targets[task]
        # Whoever has given up does not ask how it ended.
        if not task.cancelled():
            task.exception()
