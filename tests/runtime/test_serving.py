"""Who may be served where."""

import pytest

from paceline.core.errors import ConfigError
from paceline.runtime.serving import check_open

PRIVATE = ["127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1", "::1:1", "unix:/tmp/x", "unix-abstract:x"]
OPEN = ["0.0.0.0:1", "[::]:1", ":::1", "10.0.0.1:1", "example.org:1", ":1", "[::ffff:10.0.0.1]:1"]


@pytest.mark.parametrize("listen", PRIVATE)
def test_this_machine_is_served_without_keys(listen: str) -> None:
    """On loopback, or a socket of this machine."""
    check_open(listen, "", allow_anonymous=False)


@pytest.mark.parametrize("listen", OPEN)
def test_other_machines_need_keys_or_a_word(listen: str) -> None:
    """Whoever opens the door to the network names tenants, or says that everybody may come."""
    with pytest.raises(ConfigError, match="--allow-anonymous"):
        check_open(listen, None, allow_anonymous=False)
    check_open(listen, "tenants.toml", allow_anonymous=False)
    check_open(listen, None, allow_anonymous=True)


def test_keys_for_everybody_and_for_nobody_contradict_each_other() -> None:
    """Neither setting is ignored."""
    with pytest.raises(ConfigError, match="contradicts"):
        check_open("127.0.0.1:1", "tenants.toml", allow_anonymous=True)
