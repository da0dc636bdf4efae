"""What a process reads again on SIGHUP. What is broken changes nothing."""

import asyncio
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from paceline.core.errors import ConfigError
from paceline.runtime.log import get_logger

log = get_logger()


class Certificates(Protocol):
    """Of one side of a process."""

    def read_again(self) -> None:
        """Raises ConfigError, and then all stays as it was."""
        ...


@contextmanager
def reloading(actions: Iterable[Callable[[], None]]) -> Iterator[None]:
    """SIGHUP runs the actions, in order, until the end of the block; without any it means what it did."""
    actions = tuple(actions)
    if not actions:
        yield
        return

    def run() -> None:
        for action in actions:
            action()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, run)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


def reload_certificates(
    side: str, certificates: Certificates, then: Callable[[], None] = lambda: None
) -> None:
    """Takes the files as they are now, for connections from now on, or keeps what was read before."""
    try:
        certificates.read_again()
    except ConfigError as error:
        log.error("certificates_refused", side=side, problem=str(error))  # noqa: TRY400 - its text says all
        return
    then()
    log.info("certificates_loaded", side=side)
