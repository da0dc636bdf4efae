"""Addresses of our servers as they are written, `host:port` or `unix:/path`: which are well formed, and which say where to go."""

import re

from paceline.core.errors import ConfigError

_MAX_LENGTH = 255
_HOST_AND_PORT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Za-z:.%]{2,64}\]):([0-9]{1,5})")
_SOCKET = re.compile(r"unix:/[^\x00-\x1f\x7f]+")
# Where a server may listen, and nobody can go.
_ANYWHERE = ("0.0.0.0", "[::]")  # noqa: S104 - recognised here, bound nowhere


def is_address(text: str) -> bool:
    """Whether a server could be there: a name or an IP with a port, an IPv6 in brackets, or a socket's whole path."""
    if len(text) > _MAX_LENGTH:
        return False
    match = _HOST_AND_PORT.fullmatch(text)
    return 0 < int(match[2]) < 65536 if match else bool(_SOCKET.fullmatch(text))


def join_host(host: str, port: int) -> str:
    """host:port, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def require_reachable(address: str, why: str) -> None:
    """Raises ConfigError, which begins with why it is asked, for what tells nobody where to go."""
    if not is_address(address) or address.rpartition(":")[0] in _ANYWHERE:
        raise ConfigError(f"{why}, and {address} says nobody where to go; name host:port with --advertise")
