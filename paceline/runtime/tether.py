"""`python tether.py PARENT SIGNAL COMMAND...`: becomes COMMAND, and gets SIGNAL when process PARENT dies.

So even a SIGKILLed launcher, or worker, leaves no orphan. It runs by its path, under `python -I -S`, and imports nothing of
ours: it costs a few milliseconds. Between fork and exec this could not be done safely, with grpc's threads around.
"""

import ctypes
import os
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def tethered(command: Sequence[str], *, signal: int) -> list[str]:
    """The command line that runs `command` on a tether to the calling process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(signal), *command]


def _main(parent: int, signal: int, command: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal)
    # It may have died before the line above.
    if os.getppid() != parent:
        sys.exit(1)
    os.execvp(command[0], command)  # noqa: S606 - becoming the command is what this is for


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
