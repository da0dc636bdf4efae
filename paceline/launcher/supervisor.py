"""Keeps child processes as it was told to: started in stages, restarted when they die, stopped in reverse.

It knows no service; what a process runs and when it is ready stands in its spec.
"""

import asyncio
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.clock import Clock, monotonic
from paceline.core.errors import ProcessLostError
from paceline.launcher.process import ManagedProcess, ProcessSpec

Say = Callable[[str], None]

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often and how soon a process that died is started again; 0 attempts: never."""

    max_attempts: int = 5
    first_delay_s: float = 0.5
    max_delay_s: float = 8.0
    # One that ran for so long died of something new, and has all its attempts again.
    stable_s: float = 60.0

    def delay_s(self, attempt: int) -> float:
        """How long to wait before attempt 1, 2, ...: twice as long each time."""
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** (attempt - 1))


class Supervisor:
    """Owns the processes of one cluster. `start` each stage, then `guard`; `stop` ends everything, always.

    The thread that starts a process must outlive it: the kernel sends the orphan's signal when that thread ends.
    """

    def __init__(
        self,
        log_dir: Path,
        *,
        say: Say,
        policy: RestartPolicy | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._log_dir = log_dir
        self._say = say
        self._given_up: set[str] = set()
        self._policy = policy or RestartPolicy()
        self._clock = clock
        self._stages: list[tuple[str, ...]] = []
        self._processes: dict[str, ManagedProcess] = {}
        self._up: set[str] = set()
        self._all_up = asyncio.Event()
        self._guards: list[asyncio.Task[None]] = []
        self._lost: asyncio.Future[ProcessLostError] = asyncio.get_running_loop().create_future()

    # --- what is there ------------------------------------------------------------------------------------

    @property
    def pids(self) -> dict[str, int]:
        """The processes that run now, by name."""
        return {name: process.pid for name, process in self._processes.items() if process.running}

    @property
    def ready(self) -> bool:
        return self._all_up.is_set()

    async def until_ready(self) -> None:
        """Return when every process is up, again."""
        await self._all_up.wait()

    async def until_lost(self) -> ProcessLostError:
        """Return when the last vital process died too often to be started again."""
        return await asyncio.shield(self._lost)

    # --- starting -----------------------------------------------------------------------------------------

    async def start(self, stage: Sequence[ProcessSpec], *, timeout_s: float) -> None:
        """Start these together, and return when all are ready.

        Raises ProcessLostError when that takes too long, or as soon as any process dies, of this stage or before.
        """
        self._stages.append(tuple(spec.name for spec in stage))
        for spec in stage:
            self._processes[spec.name] = await ManagedProcess.start(spec, self._log_dir)
        started = [self._processes[spec.name] for spec in stage]
        coming_up = asyncio.create_task(self._all_come_up(started))
        deaths = [asyncio.create_task(process.wait()) for process in self._processes.values()]
        try:
            await _first([coming_up, *deaths], timeout_s)
            if coming_up.done():
                await coming_up
        finally:
            await _cancel([coming_up, *deaths])
        self._require_up(started, timeout_s)

    def _require_up(self, started: Iterable[ManagedProcess], timeout_s: float) -> None:
        for process in self._processes.values():
            if not process.running:
                raise ProcessLostError(process.spec.name, process.obituary())
        for process in started:
            if process.spec.name not in self._up:
                raise ProcessLostError(process.spec.name, f"is not ready after {timeout_s:.0f} s")

    async def _all_come_up(self, processes: Iterable[ManagedProcess]) -> None:
        async with asyncio.TaskGroup() as group:
            for process in processes:
                group.create_task(self._come_up(process))

    async def _come_up(self, process: ManagedProcess) -> None:
        started = self._clock()
        while not await process.spec.ready():  # noqa: ASYNC110 - another process has no event to wait for
            await asyncio.sleep(_POLL_S)
        self._say(f"{process.spec.name} is ready after {self._clock() - started:.1f} s")
        self._mark(process.spec.name, up=True)

    def _mark(self, name: str, *, up: bool) -> None:
        (self._up.add if up else self._up.discard)(name)
        if self._up == self._processes.keys():
            self._all_up.set()
        else:
            self._all_up.clear()

    # --- keeping ------------------------------------------------------------------------------------------

    def guard(self) -> None:
        """From now on a process that dies is started again."""
        self._guards = [asyncio.create_task(self._keep(name)) for name in self._processes]
        for guard in self._guards:
            guard.add_done_callback(self._guard_ended)

    def _guard_ended(self, guard: "asyncio.Task[None]") -> None:
        """A guard that cannot go on (no process left to fork, no place to log) ends the cluster, loudly."""
        if not guard.cancelled() and (error := guard.exception()) and not self._lost.done():
            self._lost.set_exception(error)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a process a deadly signal, as a test of what the others do."""
        self._mark(name, up=False)
        self._processes[name].send(number)

    async def _keep(self, name: str) -> None:
        attempt = 0
        while True:
            born = self._clock()
            await self._processes[name].wait()
            self._mark(name, up=False)
            attempt = 1 if self._clock() - born > self._policy.stable_s else attempt + 1
            if attempt > self._policy.max_attempts:
                self._give_up(self._processes[name])
                return
            await self._restart(name, attempt)

    async def _restart(self, name: str, attempt: int) -> None:
        """Start it again; return when it is up, or has died once more."""
        dead, delay_s = self._processes[name], self._policy.delay_s(attempt)
        self._say(f"{name} {dead.obituary()}; starting it again in {delay_s:.1f} s (attempt {attempt})")
        await asyncio.sleep(delay_s)
        process = self._processes[name] = await ManagedProcess.start(dead.spec, self._log_dir)
        ends = [asyncio.create_task(self._come_up(process)), asyncio.create_task(process.wait())]
        try:
            await _first(ends)
        finally:
            await _cancel(ends)

    def _give_up(self, process: ManagedProcess) -> None:
        lost = ProcessLostError(process.spec.name, f"{process.obituary()}; it is not started again")
        self._given_up.add(process.spec.name)
        vital = {name for name, each in self._processes.items() if each.spec.vital}
        if not process.spec.vital or not vital <= self._given_up:
            self._say(str(lost))
        elif not self._lost.done():
            self._lost.set_result(lost)

    # --- stopping -----------------------------------------------------------------------------------------

    async def stop(self, grace_s: float) -> None:
        """End everything, the last stage first, each within `grace_s` seconds. Cancelled, it kills at once."""
        try:
            await _cancel(self._guards)
            for stage in reversed(self._stages):
                processes = [self._processes[name] for name in stage if name in self._processes]
                await asyncio.gather(*(process.stop(grace_s) for process in processes))
        finally:
            await self._kill_all()

    async def _kill_all(self) -> None:
        for process in self._processes.values():
            process.send(signal.SIGKILL)
        for process in self._processes.values():
            await process.wait()


async def _first(tasks: "Iterable[asyncio.Task[None]]", timeout_s: float | None = None) -> None:
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def _cancel(tasks: "Iterable[asyncio.Task[None]]") -> None:
    """Cancel tasks and wait until they are gone; what they have to say is not of interest any more."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
