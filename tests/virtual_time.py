"""An event loop whose time jumps to the next timer as soon as everyone waits: a minute of time-outs takes no time."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits: where a real loop would sleep, time has passed instead."""

    now_s = 0.0
    quiet: "asyncio.Future[None] | None" = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if self.quiet is not None:
            quiet, self.quiet = self.quiet, None
            quiet.set_result(None)
            return ready
        assert timeout is not None, "a deadlock: everyone waits, and no timer is set"
        self.now_s += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For code that does no input or output; its `time` is a clock to pass on."""

    def __init__(self) -> None:
        self._virtual = _JumpingSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._virtual.now_s

    def stand_still(self, duration_s: float) -> None:
        """Time passes in which the loop does nothing, as if something blocked it."""
        self._virtual.now_s += duration_s

    async def settle(self) -> None:
        """Returns when everybody has done what takes no time. One waits for that at a time."""
        assert self._virtual.quiet is None
        self._virtual.quiet = self.create_future()
        await self._virtual.quiet


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end on a loop of its own."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Decorates an async test whose time-outs shall take no time."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_in_virtual_time(test(*args, **kwargs))

    return run


def virtual_clock() -> float:
    """The running loop's time."""
    return asyncio.get_running_loop().time()
