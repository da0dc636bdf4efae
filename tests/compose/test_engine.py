"""The compose files for real, wherever a Docker or podman socket answers: images built, the cluster up, requests through the published port.

PACELINE_BASE_IMAGE and the other variables of .env.example, taken from the environment, say what to build from and which images of
others to use, where these do not come from their registries. The model is the default one.
"""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.client import PacelineClient
from paceline.client_error import PacelineRpcError
from paceline.launcher.probes import free_port
from tests.compose.files import BASE, ROOT, copy_of_compose, docker_compose, our_services, read_stack
from tests.compose.test_local import secrets_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SOCKETS = ("/var/run/docker.sock", "/run/podman/podman.sock")
START_S = 600.0
# Fails until the worker's prefix table takes what it publishes.
REACHES_REDIS = (
    "import urllib.request; page = urllib.request.urlopen('http://localhost:9100/metrics').read(); "
    "assert b'\\npaceline_index_reached 1.0' in page"
)
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass(frozen=True, slots=True)
class Project:
    """The files of one run, under a name that no other has."""

    directory: Path
    env: dict[str, str]

    def run(self, *arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Whatever compose can do; what it says is shown where it fails."""
        done = subprocess.run(
            [docker_compose(), *arguments],
            cwd=self.directory,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0 or not check, f"{arguments}: {done.stdout}{done.stderr}"
        return done

    def inside(self, service: str, *command: str) -> int:
        """The exit status of a command in a service's container."""
        return self.run("exec", "-T", service, *command, check=False).returncode

    async def until(self, service: str, probe: list[str]) -> None:
        """Returns when the container's own health check says yes. Not every engine runs it by itself: Debian's podman needs systemd."""
        async with asyncio.timeout(START_S):
            while await asyncio.to_thread(self.inside, service, *probe):  # noqa: ASYNC110 - another process has no event to wait for
                await asyncio.sleep(1)


def answers(address: str) -> bool:
    """Whether an engine is there."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(address)
        connection.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
        return b" 200 " in connection.recv(64)
    return False


@pytest.fixture
def engine() -> str:
    """The socket of one; without any the test says where it looked."""
    named = os.environ.get("DOCKER_HOST", "").removeprefix("unix://")
    sockets = (named,) if named else SOCKETS
    for address in sockets:
        if answers(address):
            return address
    pytest.skip(f"no Docker or podman answers at {', '.join(sockets)}")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What images are built from, and the directory with the files."""
    for name in (
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    ):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / ".dockerignore", tmp_path)
    return copy_of_compose(tmp_path)


@pytest.fixture
def project(engine: str, checkout: Path) -> Iterator[Project]:
    """Built and not started; nothing is left of it, its images aside."""
    env = {
        "PACELINE_TAG": "test",
        "PACELINE_PORT": str(free_port("127.0.0.1", 0)),
        **os.environ,
        "DOCKER_HOST": f"unix://{engine}",
        "COMPOSE_PROJECT_NAME": f"paceline-test-{secrets.token_hex(4)}",
        "COMPOSE_DISABLE_ENV_FILE": "1",
    }
    project = Project(checkout, env)
    try:
        yield project
    finally:
        project.run("down", "--volumes", "--timeout", "60", check=False)


@contextlib.asynccontextmanager
async def started(project: Project) -> AsyncIterator[None]:
    """Every process is healthy, in its container's own words."""
    await asyncio.to_thread(project.run, "build")
    await asyncio.to_thread(project.run, "up", "--detach", "--no-build")
    for name, service in our_services(read_stack((BASE,), project.directory)).items():
        await project.until(name, service["healthcheck"]["test"][1:])
    yield


async def test_the_cluster_comes_up_and_answers(project: Project) -> None:
    """A request with the key gets an answer through the published port, and one without it none; processes have no rights, and end by themselves."""
    key = secrets_of(project.directory)
    address = f"127.0.0.1:{project.env['PACELINE_PORT']}"
    async with (
        started(project),
        PacelineClient(address, api_key=key) as client,
        PacelineClient(address) as stranger,
    ):
        answer = await client.generate_text(MESSAGES, temperature=0, max_tokens=20)
        assert "Paris" in answer.text
        with pytest.raises(PacelineRpcError) as caught:
            await stranger.generate_text("Hello", max_tokens=1)
        assert caught.value.reason == "TENANT_UNKNOWN"
        for name in ("prefill-0", "decode-0"):
            await project.until(name, ["python", "-c", REACHES_REDIS])
        for name in ("router-0", "prefill-0", "decode-0"):
            assert project.inside(name, "sh", "-c", 'test "$(id -u)" = 10001') == 0
            assert project.inside(name, "touch", "/var/cache/paceline/x") != 0
            assert project.inside(name, "touch", "/opt/paceline/x") != 0
            assert project.inside(name, "touch", "/tmp/x") == 0
    await asyncio.to_thread(project.run, "stop")
    said = project.run("ps", "--all", "--format", "json").stdout
    ends = {each["Service"]: each["ExitCode"] for each in map(json.loads, said.splitlines())}
    assert {ends[name] for name in ("model", "router-0", "prefill-0", "decode-0")} == {0}
