"""The connection of a client: how it stays alive, and the API key that goes with each call."""

import grpc

# An answer may be silent for long while its prompt is computed; pings tell that from a dead connection after 30 s.
_OPTIONS = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # its default of a minute would win over the line above
    ("grpc.http2.max_pings_without_data", 0),
)


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel that connects when it is first used."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)


def key_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """What each call says of its key; nothing without one. Raises ValueError, which does not show it."""
    if not api_key:
        return ()
    if not (api_key.isascii() and api_key.isprintable()) or " " in api_key:
        raise ValueError("the API key has characters that no key has; was it cut or pasted wrongly?")
    return (("authorization", f"Bearer {api_key}"),)
