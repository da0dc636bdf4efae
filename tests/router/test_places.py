"""Where a router is told to look for workers."""

import pytest

from paceline.core.errors import ConfigError
from router.config import RouterConfig
from router.places import Place, parse_places


def test_a_list_of_addresses_is_what_it_was() -> None:
    """Separated by commas, with or without blanks; empty is nowhere."""
    assert parse_places("127.0.0.1:1, unix:/run/x.sock,", "--decode") == (
        Place("address", "127.0.0.1:1"),
        Place("address", "unix:/run/x.sock"),
    )
    assert parse_places("", "--decode") == ()


def test_names_and_the_table_may_stand_beside_addresses() -> None:
    """A name in DNS is told from one that is resolved once by its prefix, which may be written as gRPC writes it."""
    assert parse_places("redis,dns:decode.example:7001,dns:///other:1,10.0.0.1:7", "--decode") == (
        Place("redis"),
        Place("dns", "decode.example:7001"),
        Place("dns", "other:1"),
        Place("address", "10.0.0.1:7"),
    )


@pytest.mark.parametrize("text", ["dns:", "dns:name", "dns:name:0", "dns:unix:/run/x", "dns:a b:1"])
def test_a_name_without_a_port_is_refused(text: str) -> None:
    """With the flag and the form that it should have."""
    with pytest.raises(ConfigError, match=r"--prefill dns:.* is not of the form dns:NAME:PORT"):
        RouterConfig(model="m", decode="d:1", prefill=text)


def test_registered_workers_need_a_redis() -> None:
    """Without one there is nothing to look into."""
    with pytest.raises(ConfigError, match="--redis"):
        RouterConfig(model="m", decode="redis")
    RouterConfig(model="m", decode="redis", redis="redis://host")
