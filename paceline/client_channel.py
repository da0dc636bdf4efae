"""The connection of a client: TLS, how it stays alive, and the API key that goes with each call."""

from dataclasses import dataclass
from pathlib import Path

import grpc

# An answer may be silent for long while its prompt is computed; pings tell that from a dead connection after 30 s.
_OPTIONS = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # its default of a minute would win over the line above
    ("grpc.http2.max_pings_without_data", 0),
)
_File = str | Path


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
    """A channel that connects when it is first used. Raises OSError for files that cannot be read."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    credentials = grpc.ssl_channel_credentials(_read(tls.ca), _read(tls.key), _read(tls.cert))
    named = (("grpc.ssl_target_name_override", tls.server_name),) if tls.server_name else ()
    return grpc.aio.secure_channel(address, credentials, options=(*_OPTIONS, *named))


def _read(file: _File | None) -> bytes | None:
    return None if file is None else Path(file).read_bytes()


def key_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """What each call says of its key; nothing without one. Raises ValueError, which does not show it."""
    if not api_key:
        return ()
    if not (api_key.isascii() and api_key.isprintable()) or " " in api_key:
        raise ValueError("the API key has characters that no key has; was it cut or pasted wrongly?")
    return (("authorization", f"Bearer {api_key}"),)
