"""`python -m paceline.engine.parallel FD NAME LEVEL`: a follower of a worker, which has started it and is at the other end of socket FD.

NAME is the worker's, and LEVEL the least that is logged.
"""

import signal
import socket
import sys

from transformers.utils.logging import disable_progress_bar

from paceline.engine.parallel.follower import follow
from paceline.engine.parallel.link import Link
from paceline.runtime.log import configure_logging, get_logger
from paceline.runtime.memory import keep_freed_memory

log = get_logger()


def main(argv: list[str]) -> int:
    """Runs until rank 0 ends it; gives the exit status."""
    # What is sent to all processes of a worker is for rank 0, which drains and needs us meanwhile.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    configure_logging("follower", argv[1], argv[2])
    keep_freed_memory()
    disable_progress_bar()  # type: ignore[no-untyped-call] # it has no annotations
    try:
        follow(Link(socket.socket(fileno=int(argv[0])), "rank 0"))
    except Exception as error:  # rank 0 ends when we do, and the reason has to stand in the log
        log.exception("follower_failed", error=type(error).__name__)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
