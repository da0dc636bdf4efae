"""What the compose files promise: they are valid, what they start is locked in and bounded, and their settings are ours."""

import dataclasses
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from decode_service.config import DecodeConfig
from paceline.runtime.config import load_config
from prefill_service.config import PrefillConfig
from router.config import RouterConfig
from tests.compose.files import (
    BASE,
    COMPOSE,
    FLEET,
    GPU,
    OUR_MODULES,
    ROOT,
    STACKS,
    TLS,
    called,
    copy_of_compose,
    module_of,
    mounts,
    our_services,
    read_stack,
    services,
    variables,
)

CONFIGS: dict[str, type[Any]] = {
    "router": RouterConfig,
    "prefill_service": PrefillConfig,
    "decode_service": DecodeConfig,
}
SECTIONS = {"router": "router", "prefill_service": "prefill", "decode_service": "decode"}
each_stack = pytest.mark.parametrize("files", STACKS, ids="+".join)


def settings_of(config: dict[str, Any], name: str) -> Any:
    """A service's settings as it would start with them: its flags, and the file that it is told of."""
    service = services(config)[name]
    module = module_of(service)
    argv = service["command"][service["command"].index(module) + 1 :]
    for target, file in mounts(config, name):
        argv = [part.replace(target, str(file)) if part.startswith("--config=") else part for part in argv]
    return load_config(CONFIGS[module], argv, prog=module, section=SECTIONS[module], about="")


@each_stack
def test_docker_compose_takes_the_files(files: tuple[str, ...]) -> None:
    """Alone or one over the other, with routers and workers of both tiers in them."""
    found = {module_of(each) for each in our_services(read_stack(files)).values()}
    assert found == set(OUR_MODULES)


def test_a_wrong_key_is_refused(tmp_path: Path) -> None:
    """The check above can fail: a key that the schema does not have is named."""
    directory = copy_of_compose(tmp_path)
    file = directory / BASE
    file.write_text(file.read_text().replace("read_only: true", "readonly: true"))
    with pytest.raises(subprocess.CalledProcessError) as caught:
        read_stack((BASE,), directory)
    assert "readonly" in caught.value.stderr


@each_stack
def test_every_process_starts_with_its_settings(files: tuple[str, ...]) -> None:
    """Each router and worker takes its flags and its section of the file as they stand, on addresses that others reach."""
    config = read_stack(files)
    for name in our_services(config):
        assert settings_of(config, name).listen.startswith("0.0.0.0:")


@each_stack
def test_every_process_is_locked_in_and_bounded(files: tuple[str, ...]) -> None:
    """No rights, no place to write, bounds on memory and processes, a start after each end, and logs that do not grow."""
    for name, service in services(read_stack(files)).items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert {"memory", "pids"} <= service["deploy"]["resources"]["limits"].keys(), name
        assert service["logging"]["options"]["max-size"], name
        assert service["restart"] == ("no" if name == "model" else "unless-stopped"), name
        assert service.get("read_only", False) == (name != "grafana"), name
        assert not service.get("privileged"), name
        # The images of ours, and those of Prometheus and Grafana, have a user without rights by themselves.
        others = name in {"redis", "balancer"}
        assert service.get("user") == ("10001:10001" if others else None), name


@each_stack
def test_a_stop_lasts_longer_than_a_drain(files: tuple[str, ...]) -> None:
    """Docker kills nobody who is still within grace_s."""
    config = read_stack(files)
    for name, service in our_services(config).items():
        assert seconds(service["stop_grace_period"]) > settings_of(config, name).grace_s + 5, name


@each_stack
def test_every_process_says_how_it_is(files: tuple[str, ...]) -> None:
    """Routers and workers are asked by grpc health, where they listen, and once a question that has no answer is over."""
    config = read_stack(files)
    for name, service in our_services(config).items():
        settings = settings_of(config, name)
        probe = service["healthcheck"]
        assert probe["test"][:5] == ["CMD", "python", "-P", "-m", "paceline.health"], name
        listens = {settings.listen, getattr(settings, "plain_listen", "")}
        assert probe["test"][5].replace("127.0.0.1", "0.0.0.0") in {
            listen.replace("127.0.0.1", "0.0.0.0") for listen in listens
        }, name
        # As long as a question may take.
        assert 5 < seconds(probe["timeout"]) < seconds(probe["interval"]), name


@each_stack
def test_workers_are_told_where_they_are(files: tuple[str, ...]) -> None:
    """A worker's id and address are its container's name, and the routers' names for a tier lead to all workers of it."""
    config = read_stack(files)
    for name, service in our_services(config).items():
        if module_of(service) == "router":
            continue
        settings = settings_of(config, name)
        port = settings.listen.rpartition(":")[2]
        assert (settings.worker_id, settings.advertise) == (name, f"{name}:{port}")
    for router in (name for name in our_services(config) if name.startswith("router")):
        for tier, place in (
            ("prefill", settings_of(config, router).prefill),
            ("decode", settings_of(config, router).decode),
        ):
            found = called(config, router, place.split(":")[1])
            assert found == [name for name in our_services(config) if name.startswith(tier)]


@each_stack
def test_only_clients_doors_are_published(files: tuple[str, ...]) -> None:
    """The routers, or what stands before them; monitoring on this machine alone. Between the processes is a network of their own."""
    config = read_stack(files)
    published = {
        name: [port["host_ip"] for port in service["ports"]]
        for name, service in services(config).items()
        if service.get("ports")
    }
    door = "balancer" if FLEET in files else "router-0"
    assert published == {name: ["127.0.0.1"] for name in (door, "prometheus", "grafana")}
    opened = read_stack(files, env={"PACELINE_BIND": "0.0.0.0", "PACELINE_PORT": "7000"})
    ports = {name: each["ports"][0] for name, each in services(opened).items() if each.get("ports")}
    assert (ports[door]["host_ip"], ports[door]["published"]) == ("0.0.0.0", "7000")
    assert {ports[name]["host_ip"] for name in ("prometheus", "grafana")} == {"127.0.0.1"}
    assert config["networks"]["cluster"]["internal"]
    inside = [name for name in services(config) if name.startswith(("prefill", "decode", "redis"))]
    assert all(services(config)[name]["networks"].keys() == {"cluster"} for name in inside)


def test_every_choice_is_in_the_example() -> None:
    """.env.example has each variable of the files with the default that it has there, and nothing else."""
    used: dict[str, str] = {}
    for file in (BASE, FLEET, GPU, TLS):
        for name, default in variables((COMPOSE / file).read_text()).items():
            assert used.setdefault(name, default) == default, name
    lines = [line for line in (COMPOSE / ".env.example").read_text().splitlines() if line and line[0] != "#"]
    assert dict(line.split("=", 1) for line in lines) == used


def test_redis_is_a_cache_for_other_containers() -> None:
    """It takes calls that come from elsewhere, forgets the least used when it is full, and writes nothing to disk."""
    command = services(read_stack((BASE,)))["redis"]["command"]
    given = dict(zip(command[1::2], command[2::2], strict=True))
    assert (
        given.items()
        >= {
            "--protected-mode": "no",
            "--maxmemory-policy": "volatile-lru",
            "--save": "",
            "--appendonly": "no",
        }.items()
    )
    limit = int(services(read_stack((BASE,)))["redis"]["deploy"]["resources"]["limits"]["memory"])
    assert limit >= (int(given["--maxmemory"].removesuffix("mb")) << 20) * 5 // 4


def test_what_is_written_goes_to_volumes() -> None:
    """The model is read-only for all that serve; a worker's own cache is a volume, in a directory that the image gives to its user."""
    config = read_stack((BASE, FLEET))
    dockerfile = (COMPOSE / "Dockerfile").read_text()
    (given,) = re.findall(r"install --directory --owner paceline --group paceline (.*)", dockerfile)
    for name, service in our_services(config).items():
        volumes = {volume["target"]: volume.get("read_only", False) for volume in service["volumes"]}
        assert volumes.pop("/var/cache/paceline"), name
        assert all(target in given.split() and not read_only for target, read_only in volumes.items())
        cache = service.get("environment", {}).get("XDG_CACHE_HOME")
        assert {cache} - {None} == volumes.keys(), name


def test_workers_have_a_limit_above_their_kv_cache() -> None:
    """The container's memory holds the pool, and a gigabyte for weights and process."""
    config = read_stack((BASE,))
    for name in ("prefill-0", "decode-0"):
        pool = int(settings_of(config, name).kv_memory.removesuffix("MiB")) << 20
        assert int(services(config)[name]["deploy"]["resources"]["limits"]["memory"]) >= pool + (1 << 30)


def test_each_worker_has_a_gpu_of_its_own() -> None:
    """Every worker of the fleet names one, and no two the same."""
    config = read_stack((BASE, FLEET, GPU))
    ids = [
        device["device_ids"]
        for name, service in our_services(config).items()
        if not name.startswith("router")
        for device in service["deploy"]["resources"]["reservations"]["devices"]
    ]
    assert sorted(ids) == [["0"], ["1"], ["2"], ["3"]]


def test_a_worker_on_a_gpu_is_the_same_worker() -> None:
    """Its settings are those that it has without one, but for the device and what memory is meant."""
    plain, on_gpus = read_stack((BASE, FLEET)), read_stack((BASE, FLEET, GPU))
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        settings = settings_of(on_gpus, name)
        assert (settings.device, settings.gpu_memory_share) == ("cuda:0", 0.9)
        same = dataclasses.replace(settings, device="auto", kv_memory=settings_of(plain, name).kv_memory)
        assert same == settings_of(plain, name)


def test_what_gpus_compile_is_kept() -> None:
    """Triton's cache is on a volume that the worker may write, and the image has the compiler that Triton calls."""
    config = read_stack((BASE, FLEET, GPU))
    for name, service in our_services(config).items():
        if name.startswith("router"):
            continue
        writable = [each["target"] for each in service["volumes"] if not each.get("read_only")]
        cache = service["environment"]["TRITON_CACHE_DIR"]
        assert any(cache.startswith(f"{target}/") for target in writable), name
    (worker,) = re.findall(
        r"^FROM .* AS worker$(.*)", (COMPOSE / "Dockerfile").read_text(), re.MULTILINE | re.DOTALL
    )
    assert re.search(r"apt-get install .* g\+\+", worker)


def test_a_change_of_code_builds_a_small_layer() -> None:
    """In the images our code comes after all packages, and those are installed from files that rarely change."""
    dockerfile = (COMPOSE / "Dockerfile").read_text()
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM|\Z)", dockerfile, re.MULTILINE | re.DOTALL))
    assert re.findall(r"^COPY (.*)$", stages["skeleton"], re.MULTILINE) == [
        "pyproject.toml constraints.txt LICENSE ./"
    ]
    for image in ("router", "worker"):
        copied = re.findall(r"^COPY --from=(\S+)", stages[image], re.MULTILINE)
        assert copied == [f"{image}-packages", "code"]


def test_the_gpu_file_does_not_pretend() -> None:
    """As long as workers have no setting for a device, the file says that they use none; once they have one, it passes it on."""
    can_use_one = "device" in {field.name for field in dataclasses.fields(DecodeConfig)}
    text = (COMPOSE / GPU).read_text()
    assert ("NOTHING USES THEM YET" in text) == (not can_use_one)
    assert ("--device=" in text) == can_use_one


def test_the_image_has_all_packages_and_nothing_else() -> None:
    """The Dockerfile and .dockerignore name the packages of pyproject.toml, and a Python that it allows."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    dockerfile = (COMPOSE / "Dockerfile").read_text()
    (made,) = re.findall(r"mkdir (.*) \\", dockerfile)
    assert set(made.split()) == packages
    shown = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert shown == packages | {"pyproject.toml", "constraints.txt", "LICENSE", "README.md"}
    (image,) = re.findall(r"^ARG BASE_IMAGE=(.*)$", dockerfile, re.MULTILINE)
    assert image == variables((COMPOSE / BASE).read_text())["PACELINE_BASE_IMAGE"]
    assert re.search(r"python:3\.1[123]-", image)
    # The last word of each image is a user without rights.
    targets = re.split(r"^FROM .* AS (router|worker)$", dockerfile, flags=re.MULTILINE)[1:]
    assert [re.findall(r"^USER (.*)$", body, re.MULTILINE) for body in targets[1::2]] == [
        ["10001:10001"],
        ["10001:10001"],
    ]


def seconds(text: str) -> float:
    """A duration as docker compose writes it, such as 1m30s."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([hms])", text))
