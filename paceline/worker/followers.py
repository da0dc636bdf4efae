"""The other processes of a worker, where several compute one model: started before it loads, watched, and ended with it."""

import asyncio
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

from paceline.core.errors import EngineFailedError
from paceline.engine.parallel.link import Link
from paceline.runtime.log import get_logger
from paceline.runtime.private_dir import private_dir
from paceline.runtime.tether import tethered
from paceline.worker.config import WorkerConfig

if TYPE_CHECKING:
    from paceline.engine.parallel.leader import Followers

# A rank may first have to compile what the others wait for.
_LEAST_TIMEOUT_S = 120.0
_PATIENCE_S, _OWN_WORDS_S = 5.0, 2.0

log = get_logger()
Process = asyncio.subprocess.Process
T = TypeVar("T")
U = TypeVar("U")


class OwnedFollowers:
    """Followers and their processes. `lost` is set when one of those has ended before it was told to."""

    def __init__(self, followers: "Followers", processes: Sequence[Process]) -> None:
        self.followers = followers
        self.lost = asyncio.Event()
        self._processes = processes
        self._is_ending = False

    async def watch(self, rank: int) -> None:
        """Returns when this one has ended."""
        status = await self._processes[rank - 1].wait()
        if not self._is_ending:
            log.error("follower_lost", rank=rank, status=status)
            self.lost.set()

    def kill(self) -> None:
        """Ends them now: whoever waits for one that hangs, in a sum or for an answer, then waits no more."""
        self._is_ending = True
        for process in self._processes:
            if process.returncode is None:
                process.kill()

    async def unless_lost(self, work: Callable[[], T]) -> T:
        """What `work` gives, on a thread of its own; EngineFailedError when a follower is lost meanwhile.

        Then the thread may wait for it for long, and ends with the process.
        """
        working: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        Thread(target=_work, args=(work, working, asyncio.get_running_loop()), daemon=True).start()
        losing = asyncio.create_task(self.lost.wait())
        try:
            await asyncio.wait((working, losing), return_when=asyncio.FIRST_COMPLETED)
            # What ended a follower may be about to end us, with better words.
            await asyncio.wait((working,), timeout=_OWN_WORDS_S)
        finally:
            losing.cancel()
        if not working.done():
            raise EngineFailedError(
                "a process of this worker has ended while the model was loaded; see the log above"
            )
        return working.result()


def _work(work: Callable[[], T], working: "asyncio.Future[T]", loop: asyncio.AbstractEventLoop) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - whoever waits is to hear of it, whatever it is
        _tell(loop, working.set_exception, error)
    else:
        _tell(loop, working.set_result, result)


def _tell(loop: asyncio.AbstractEventLoop, set_outcome: Callable[[U], None], outcome: U) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(set_outcome, outcome)


@asynccontextmanager
async def owned_followers(config: WorkerConfig) -> AsyncIterator[OwnedFollowers | None]:
    """The ranks from 1 on, which end with the body, and with this process however it ends; None where there is no need of any.

    Entered on the main thread: the kernel kills them when the thread ends that has started them.
    """
    num_ranks = config.tp * config.pp
    if num_ranks == 1:
        yield None
        return
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(private_dir(Path(tempfile.gettempdir()), ".paceline-ranks-"))
        started = [await _start(config, rank, stack) for rank in range(1, num_ranks)]
        # Imported here: torch is needed by none but workers of several processes so early, and takes seconds, which they take meanwhile.
        from paceline.engine.parallel.leader import Followers  # noqa: PLC0415

        rendezvous, timeout_s = str(directory / "rendezvous"), max(_LEAST_TIMEOUT_S, config.stall_s)
        followers = Followers(
            [link for link, _ in started], rendezvous, timeout_s, tp=config.tp, pp=config.pp
        )
        owned = OwnedFollowers(followers, [process for _, process in started])
        watches = [asyncio.create_task(owned.watch(rank)) for rank in range(1, num_ranks)]
        try:
            yield owned
        finally:
            for watch in watches:
                watch.cancel()


async def _start(config: WorkerConfig, rank: int, stack: AsyncExitStack) -> tuple[Link, Process]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", "paceline.engine.parallel"]
    with closing(theirs):
        process = await asyncio.create_subprocess_exec(
            *tethered(
                [*command, str(theirs.fileno()), config.worker_id, config.log_level], signal=signal.SIGKILL
            ),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
    link = Link(ours, f"rank {rank}")
    stack.push_async_callback(_end, process)
    # Before that, and so it knows.
    stack.callback(link.close)
    return link, process


async def _end(process: Process) -> None:
    try:
        await asyncio.wait_for(process.wait(), _PATIENCE_S)
    except TimeoutError:
        process.kill()
        await process.wait()
