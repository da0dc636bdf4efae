"""The Kubernetes manifests: as kustomize renders them, and what each pod of theirs is and mounts.

Only what compose/k8s uses of kustomize is known here; where kubectl is installed a test compares the two.
"""

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.compose.files import COMPOSE, Config, Service

K8S = COMPOSE / "k8s"
BASE, AUTOSCALING, GPU = K8S / "base", K8S / "autoscaling", K8S / "gpu"
COMPONENT = "app.kubernetes.io/component"
# A manifest, or a part of one.
Object = dict[str, Any]


def render(base: Path, *components: Path) -> list[Object]:
    """All objects, with the components over them in this order."""
    objects = list(_objects(base))
    for component in components:
        objects += _objects(component)
        content = _kustomization(component)
        for patch in content.get("patches", ()):
            for each in objects:
                if _is_meant(patch["target"], each):
                    _apply(yaml.safe_load(patch["patch"]), each)
        for image in content.get("images", ()):
            _retag(objects, image["name"], image["newTag"])
    return objects


def of_kind(objects: list[Object], *kinds: str) -> dict[str, Object]:
    """Those of these kinds, by name."""
    return {each["metadata"]["name"]: each for each in objects if each["kind"] in kinds}


def templates(objects: list[Object]) -> dict[str, Object]:
    """What pods are made of, by the name of who makes them."""
    return {
        name: each["spec"]["template"]
        for name, each in of_kind(objects, "Deployment", "StatefulSet", "Job").items()
    }


def containers(template: Object) -> list[Object]:
    """All of a pod, also those that run before the others."""
    spec = template["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]


def main_container(template: Object) -> Object:
    """The one that serves."""
    (container,) = template["spec"]["containers"]
    found: Object = container
    return found


def labels(template: Object) -> dict[str, str]:
    """A pod's."""
    found: dict[str, str] = template["metadata"]["labels"]
    return found


def selects(selector: Mapping[str, str], template: Object) -> bool:
    """Whether all labels of a selector are the pod's."""
    return selector.items() <= labels(template).items()


def port_of(container: Object, port: "str | int") -> int:
    """A port's number, by its name or as it is."""
    numbers = {each["name"]: each["containerPort"] for each in container["ports"]}
    return port if isinstance(port, int) else int(numbers[port])


def mounted(objects: list[Object], template: Object, container: Object) -> Iterator[tuple[str, str, str]]:
    """Each file that a container sees of secrets and config maps: where, the object's name, and the key in it."""
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    for mount in container["volumeMounts"]:
        volume = volumes[mount["name"]]
        if "configMap" in volume:
            name = volume["configMap"]["name"]
            for key in of_kind(objects, "ConfigMap")[name]["data"]:
                yield f"{mount['mountPath']}/{key}", name, key
        for source in volume.get("projected", {}).get("sources", ()):
            for item in source["secret"]["items"]:
                yield f"{mount['mountPath']}/{item['path']}", source["secret"]["name"], item["key"]


def words(container: Object, pod: str) -> list[str]:
    """Its command, with the variables that Kubernetes puts in; a pod's address is its name here."""
    fields = {"metadata.name": pod, "status.podIP": pod}
    values = {
        each["name"]: each.get("value") or fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container.get("env", ())
    }
    return [re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], word) for word in container["command"]]


@dataclass(frozen=True, slots=True)
class Pods:
    """One pod of each Deployment and StatefulSet, told as docker compose would: `tests/compose/local.py` starts that.

    `files` has what is in secrets and config maps, by object and key.
    """

    objects: list[Object]
    files: Mapping[tuple[str, str], Path]

    def as_stack(self) -> Config:
        """Services with the names of pods, in a network where they are called as Services of Kubernetes call them."""
        made = of_kind(self.objects, "Deployment", "StatefulSet")
        services = {f"{name}-0": self._service(f"{name}-0", each) for name, each in made.items()}
        stores = {f"{name}/{key}": {"file": str(file)} for (name, key), file in self.files.items()}
        return {"services": services, "configs": stores, "secrets": {}}

    def _service(self, pod: str, maker: Object) -> Service:
        template = maker["spec"]["template"]
        container = main_container(template)
        files = mounted(self.objects, template, container)
        return {
            "command": words(container, pod),
            "environment": {
                each["name"]: each["value"] for each in container.get("env", ()) if "value" in each
            },
            "networks": {"cluster": {"aliases": self._names(template)}},
            "healthcheck": {"test": ["CMD", *probe_command(container, "readinessProbe")]},
            "configs": [{"target": target, "source": f"{name}/{key}"} for target, name, key in files],
            "volumes": [{"target": target} for target in _disks(template, container)],
        }

    def _names(self, template: Object) -> list[str]:
        found = of_kind(self.objects, "Service")
        return [name for name, each in found.items() if selects(each["spec"]["selector"], template)]


def probe_command(container: Object, name: str) -> list[str]:
    """What asks as the node does."""
    probe = container[name]
    if "grpc" not in probe:
        return ["valkey-cli", "-p", str(port_of(container, probe["tcpSocket"]["port"])), "ping"]
    asked = probe["grpc"]
    address = f"127.0.0.1:{asked['port']}"
    return ["python", "-P", "-m", "paceline.health", address, f"--service={asked.get('service', '')}"]


def _disks(template: Object, container: Object) -> list[str]:
    """Where volumes are that hold files of ours, those in memory left out."""
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    kept = {
        name
        for name, volume in volumes.items()
        if "persistentVolumeClaim" in volume
        or volume.get("emptyDir", {"medium": "Memory"}).get("medium") is None
    }
    return [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in kept]


def _kustomization(directory: Path) -> Object:
    content: Object = yaml.safe_load((directory / "kustomization.yaml").read_text())
    return content


def _objects(directory: Path) -> Iterator[Object]:
    for name in _kustomization(directory).get("resources", ()):
        # Anchors make one object of several, which a patch must not change all at once.
        yield from (deepcopy(each) for each in yaml.safe_load_all((directory / name).read_text()))


def _is_meant(target: Mapping[str, str], each: Object) -> bool:
    return target["kind"] == each["kind"] and target.get("name") in {None, each["metadata"]["name"]}


def _apply(operations: list[Object], each: Object) -> None:
    """A patch of RFC 6902, of which `add` and `remove` are used, on keys of objects and numbers or ends of lists."""
    for operation in operations:
        *parents, last = [part.replace("~1", "/") for part in operation["path"].split("/")[1:]]
        where: Any = each
        for part in parents:
            where = where[int(part)] if isinstance(where, list) else where[part]
        if operation["op"] == "remove":
            del where[last]
        else:
            assert operation["op"] == "add"
            # "-" is the end of a list.
            if last == "-":
                where.append(deepcopy(operation["value"]))
            else:
                where[last] = deepcopy(operation["value"])


def _retag(objects: list[Object], image: str, tag: str) -> None:
    for template in templates(objects).values():
        for container in containers(template):
            if container["image"].partition(":")[0] == image:
                container["image"] = f"{image}:{tag}"
