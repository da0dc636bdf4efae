"""Reads the file of tenants again on SIGHUP. Requests under way are not touched, and a broken file changes nothing."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.core.errors import ConfigError
from paceline.runtime.log import get_logger
from router.tenants import Tenants

log = get_logger()


@contextmanager
def reloading(tenants: Tenants) -> Iterator[None]:
    """SIGHUP means a new reading until the end of the block; without a file it means what it did."""
    if not tenants.are_known:
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reload, tenants)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


def reload(tenants: Tenants) -> None:
    """Takes the file as it is now, or keeps what was read before."""
    try:
        tenants.read_again()
    except ConfigError as error:
        log.error("tenants_refused", problem=str(error))  # noqa: TRY400 - its text says all, and a traceback may hold a line of the file
        return
    log.info("tenants_loaded", num_tenants=tenants.num_tenants)
