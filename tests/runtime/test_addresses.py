"""Addresses as they are written."""

import pytest

from paceline.core.errors import ConfigError
from paceline.runtime.addresses import is_address, join_host, require_reachable


@pytest.mark.parametrize(
    "text",
    ["127.0.0.1:1", "worker-0.prefill.example:65535", "[::1]:7001", "[fe80::1%eth0]:7", "unix:/run/a b.sock"],
)
def test_what_a_server_can_listen_on_is_an_address(text: str) -> None:
    """Names, IPs of both families, and sockets by their whole path."""
    assert is_address(text)
    require_reachable(text, "somebody asks")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:0",
        "host:65536",
        "host:seven",
        "::1:7001",
        ":7001",
        "-x:1",
        "dns:///host:1",
        "xds:///host",
        "unix:relative.sock",
        "unix:/with\nlines",
        "a b:1",
        "host:1\n",
        "host:٣",
        "h" * 300 + ":1",
    ],
)
def test_what_nobody_can_listen_on_is_none(text: str) -> None:
    """Neither what gRPC would take for something else, nor what is no text of ours."""
    assert not is_address(text)


@pytest.mark.parametrize("text", ["0.0.0.0:7001", "[::]:7001", "127.0.0.1:0", "nonsense"])
def test_what_says_nobody_where_to_go_is_refused(text: str) -> None:
    """An address to listen on need not be one to call."""
    with pytest.raises(ConfigError, match=r"--register .* says nobody where to go; .* --advertise"):
        require_reachable(text, "--register tells routers an address")


def test_an_ipv6_address_has_brackets_before_its_port() -> None:
    """Others have none."""
    assert (join_host("::1", 7), join_host("10.0.0.1", 7)) == ("[::1]:7", "10.0.0.1:7")
