"""`./run health`: what a probe learns of a process, from outside and by an exit status."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from paceline import health
from paceline.launcher.probes import free_port
from paceline.runtime.server import GrpcServer
from paceline.runtime.tls import CertificateSource, TlsFiles
from tests.certificates import Authority

SERVICE = "paceline.v1.InferenceService"


@asynccontextmanager
async def serving(files: TlsFiles | None = None) -> AsyncIterator[GrpcServer]:
    """A server that has started and does not serve yet."""
    credentials = CertificateSource(files).server_credentials() if files else None
    server = GrpcServer(f"localhost:{free_port('127.0.0.1', 0)}", credentials=credentials)
    await server.start([SERVICE])
    yield server
    await server.stop(grace_s=0)


async def asked(*argv: str) -> int:
    """The exit status; the question waits, so it is another thread's."""
    return await asyncio.to_thread(health.main, argv)


async def test_a_process_that_serves_is_a_status_of_zero(capsys: pytest.CaptureFixture[str]) -> None:
    """Alive from the start, ready only once it serves, each said in a word; no such service is no."""
    async with serving() as server:
        assert await asked(server.listen) == 1
        assert await asked(server.listen, "--service", "liveness") == 0
        await server.set_serving(serving=True)
        assert await asked(server.listen) == 0
        assert await asked(server.listen, "--service", SERVICE) == 0
        assert await asked(server.listen, "--service", "nobody") == 1
    said = capsys.readouterr().out.splitlines()
    assert said[:4] == ["NOT_SERVING", "SERVING", "SERVING", "SERVING"]
    assert said[4].startswith("NOT_FOUND")


async def test_nobody_there_is_no(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says why, and none of it is a traceback."""
    assert await asked(f"unix:{tmp_path}/nowhere", "--timeout", "5") == 1
    assert capsys.readouterr().out.startswith("UNAVAILABLE")


async def test_a_process_that_asks_for_certificates_is_asked_with_one(tmp_path: Path) -> None:
    """Mutual TLS as workers have it, with a name that is not the address's; without a certificate the answer is no."""
    authority = Authority(tmp_path)
    pair = authority.issue("worker", "worker.paceline.internal")
    files = TlsFiles(
        str(pair.cert),
        str(pair.key),
        str(authority.ca),
        "--cluster-tls",
        "--cluster-tls-ca",
        is_cluster=True,
    )
    trusting = ("--tls-ca", str(authority.ca), "--tls-name", "worker.paceline.internal")
    showing = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key))
    async with serving(files) as server:
        await server.set_serving(serving=True)
        assert await asked(server.listen, *trusting, *showing) == 0
        assert await asked(server.listen, *trusting, "--timeout", "5") == 1
        assert await asked(server.listen, "--timeout", "5") == 1


async def test_files_that_cannot_be_read_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the file's name; half of a pair is refused as any wrong option."""
    assert await asked("localhost:1", "--tls-ca", f"{tmp_path}/ca.pem") == 1
    assert capsys.readouterr().out == f"cannot read {tmp_path}/ca.pem: No such file or directory\n"
    with pytest.raises(SystemExit, match="2"):
        await asked("localhost:1", "--tls-cert", f"{tmp_path}/cert.pem")
