"""The connection of a client: TLS, how it stays alive, and the API key that goes with each call."""

import ipaddress
import json
from dataclasses import dataclass
from pathlib import Path

import grpc

# An answer may be silent for long while its prompt is computed; pings tell that from a dead connection after 30 s.
_OPTIONS = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # its default of a minute would win over the line above
    ("grpc.http2.max_pings_without_data", 0),
    # A server that has been away for long is found again within a second, not after two minutes as by default.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
_SERVICE = "paceline.v1.InferenceService"
# Calls go to each of the addresses in turn, and to none that cannot be reached or says that it takes no more. One that has
# been on its way there goes to another, unless its answer has begun.
_IN_TURN = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": _SERVICE},
    "methodConfig": [
        {
            "name": [{"service": _SERVICE}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 3,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}


_File = str | Path
_Options = tuple[tuple[str, int | str], ...]


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM, for a server that speaks TLS.

    `ca` has signed the server's certificate; without it the roots count that gRPC knows. `cert` and `key` are our own, where the server
    wants to see them. `server_name` is the name in the server's certificate, where that is not the host of its address.
    """

    ca: _File | None = None
    cert: _File | None = None
    key: _File | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        """Refuses half of a pair."""
        if (self.cert is None) != (self.key is None):
            raise ValueError("a certificate and its key go together; give both or neither")


def open_channel(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """A channel that connects when it is first used; to several servers, separated by commas, or to all that a `dns:` name has.

    Raises ValueError for a list that gRPC has no word for, and OSError for files that cannot be read.
    """
    options: _Options = _OPTIONS
    if "," in address or address.startswith("dns:"):
        address, options = _target(address), (*options, ("grpc.service_config", json.dumps(_IN_TURN)))
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(_read(tls.ca), _read(tls.key), _read(tls.cert))
    if tls.server_name:
        options = (*options, ("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(address, credentials, options=options)


def _read(file: _File | None) -> bytes | None:
    return None if file is None else Path(file).read_bytes()


def _target(address: str) -> str:
    if "," not in address or address.startswith(("ipv4:", "ipv6:")):
        return address
    parts = [part.strip() for part in address.split(",") if part.strip()]
    families = {_family(part.rpartition(":")[0].strip("[]")) for part in parts}
    if len(families) > 1 or None in families:
        raise ValueError(
            f"{address!r}: several servers are named by their IP addresses, all of one kind, such as "
            "10.0.0.1:50051,10.0.0.2:50051, or by one name, dns:NAME:PORT"
        )
    return f"ipv{families.pop()}:{','.join(parts)}"


def _family(host: str) -> int | None:
    try:
        return ipaddress.ip_address(host).version
    except ValueError:
        return None


def key_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """What each call says of its key; nothing without one. Raises ValueError, which does not show it."""
    if not api_key:
        return ()
    if not (api_key.isascii() and api_key.isprintable()) or " " in api_key:
        raise ValueError("the API key has characters that no key has; was it cut or pasted wrongly?")
    return (("authorization", f"Bearer {api_key}"),)
