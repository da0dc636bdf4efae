"""Where a router looks for the workers of a tier, as `--prefill` and `--decode` say it.

    127.0.0.1:50061,unix:/run/prefill-0.sock      addresses, separated by commas
    dns:prefill.example:50061                     every address that the name has, whenever it is looked up
    redis                                         those that have registered in --redis

They may stand side by side.
"""

from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import ConfigError
from paceline.runtime.addresses import is_address


@dataclass(frozen=True, slots=True)
class Place:
    """One of them; the address of `dns` is a name and a port."""

    kind: Literal["address", "dns", "redis"]
    address: str = ""


def parse_places(text: str, flag: str) -> tuple[Place, ...]:
    """Raises ConfigError, which names the flag."""
    return tuple(_place(part.strip(), flag) for part in text.split(",") if part.strip())


def _place(part: str, flag: str) -> Place:
    if part == "redis":
        return Place("redis")
    if not part.startswith("dns:"):
        return Place("address", part)
    address = part.removeprefix("dns:").removeprefix("///")
    if not is_address(address) or address.startswith("unix:"):
        raise ConfigError(f"{flag} {part} is not of the form dns:NAME:PORT")
    return Place("dns", address)
