"""Reads the file of tenants again. Requests under way are not touched, and a broken file changes nothing."""

from paceline.core.errors import ConfigError
from paceline.runtime.log import get_logger
from router.tenants import Tenants

log = get_logger()


def reload_tenants(tenants: Tenants) -> None:
    """Takes the file as it is now, or keeps what was read before."""
    try:
        tenants.read_again()
    except ConfigError as error:
        log.error("tenants_refused", problem=str(error))  # noqa: TRY400 - its text says all, and a traceback may hold a line of the file
        return
    log.info("tenants_loaded", num_tenants=tenants.num_tenants)
