"""One child process: started on a tether, its output in a log file, ended with a grace period."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.runtime.tether import tethered

# Says whether the process can do its work yet; asked again and again, it must answer soon.
Probe = Callable[[], Awaitable[bool]]

_LOG_TAIL_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run, and how to see that it works.

    `orphan_signal` is what it gets when the launcher itself is killed. Without any of the `vital` processes
    the cluster is of no use to anyone.
    """

    name: str
    command: tuple[str, ...]
    ready: Probe
    env: Mapping[str, str] = field(default_factory=dict)
    orphan_signal: signal.Signals = signal.SIGTERM
    vital: bool = False


class ManagedProcess:
    """A process that was started and not yet forgotten; make one with `start`."""

    def __init__(
        self, spec: ProcessSpec, process: asyncio.subprocess.Process, log: Path, log_start: int
    ) -> None:
        self.spec = spec
        self._process = process
        self._log = log
        self._log_start = log_start

    @classmethod
    async def start(cls, spec: ProcessSpec, log_dir: Path) -> "ManagedProcess":
        """Start it in a session of its own, where a Ctrl-C in our terminal does not reach it."""
        log = log_dir / f"{spec.name}.log"
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *tethered(spec.command, signal=spec.orphan_signal),
                env={**os.environ, **spec.env},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            return cls(spec, process, log, output.tell())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> None:
        """Return when it has ended."""
        await self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal; SIGKILL also reaches what it started itself. Nothing happens when it has ended."""
        if not self.running:
            return
        if number == signal.SIGKILL:
            os.killpg(self.pid, number)
        else:
            self._process.send_signal(number)

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, and kill it when it has not by `grace_s` seconds."""
        self.send(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """End it now."""
        self.send(signal.SIGKILL)
        await self.wait()

    def obituary(self) -> str:
        """How it ended, and the last thing in its log that looks like a reason."""
        status = self._process.returncode
        assert status is not None, f"{self.spec.name} is still running"
        how = (
            f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        )
        last_words = self._last_words()
        return f"{how}: {last_words}" if last_words else how

    def _last_words(self) -> str:
        with self._log.open("rb") as log:
            log.seek(max(self._log_start, self._log.stat().st_size - _LOG_TAIL_BYTES))
            lines = [
                line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()
            ]
        errors = [line for line in lines if "error" in line.lower()]
        # A log of events says nothing about an end; whatever else it said last may be a reason.
        others = [line for line in lines if not line.startswith("{")]
        return (errors or others or [""])[-1]
