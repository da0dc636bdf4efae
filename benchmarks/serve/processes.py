"""Processes of other servers: started in a group of their own, and ended by its id."""

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import IO

from paceline.core.errors import ConfigError

# In which a server ends by itself when it is asked to.
_GRACE_S = 20.0
_SHOWN_BYTES = 600


@dataclass(frozen=True, slots=True)
class StartedProcess:
    """A process, and what it has written to its standard error, or, with nobody who reads it, to its output."""

    process: asyncio.subprocess.Process
    log: IO[bytes]

    @property
    def has_ended(self) -> bool:
        return self.process.returncode is not None

    def last_words(self) -> str:
        """The end of its log, for an error's message."""
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - _SHOWN_BYTES))
        return self.log.read().decode(errors="replace").strip() or "it said nothing"


@asynccontextmanager
async def started(command: Sequence[str], *, piped: bool = False) -> AsyncIterator[StartedProcess]:
    """The command, until the block is left; `piped`: with its standard input and output at this end. Raises ConfigError."""
    with tempfile.TemporaryFile() as log:
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=pipe if piped else asyncio.subprocess.DEVNULL,
                stdout=pipe if piped else log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"cannot start {command[0]}: {error.strerror}") from error
        try:
            yield StartedProcess(process, log)
        finally:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Asks it to end; then nothing of its group is left, whatever its children do."""
    try:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _GRACE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
