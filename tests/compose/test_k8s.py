"""What the Kubernetes manifests promise: they are valid, they fit together, and what they start is locked in and has our settings."""

import dataclasses
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import ValidationError

from decode_service.config import DecodeConfig
from paceline.runtime.config import load_config
from tests.architecture.documents import read
from tests.architecture.names import all_metrics
from tests.compose.files import BASE as COMPOSE_BASE
from tests.compose.files import COMPOSE, copy_of_compose, read_stack, services
from tests.compose.manifests import (
    AUTOSCALING,
    BASE,
    COMPONENT,
    GPU,
    K8S,
    Object,
    containers,
    labels,
    main_container,
    mounted,
    of_kind,
    port_of,
    render,
    selects,
    templates,
    words,
)
from tests.compose.test_files import CONFIGS, SECTIONS
from tests.compose.test_local import secrets_of
from tests.compose.test_monitoring import complaints

# The oldest with probes by gRPC for good, and the newest whose schema is here.
VERSIONS = ("1.27", kubernetes_validate.latest_version())
CLUSTER = render(BASE)
WHOLE = render(BASE, GPU, AUTOSCALING)
OURS = ("prefill", "decode", "router")
DOCUMENT = read("docs/kubernetes.md")


def settings_of(objects: list[Object], name: str, tmp_path: Path) -> Any:
    """A service's settings as its pod would start with them: its flags, and the files that they name."""
    template = templates(objects)[name]
    container = main_container(template)
    argv = words(container, f"{name}-0")
    module = argv[argv.index("-m") + 1]
    flags = argv[argv.index(module) + 1 :]
    texts = {
        "cluster.toml": of_kind(objects, "ConfigMap")["cluster"]["data"]["cluster.toml"],
        "redis_url": _created()["paceline-cluster"]["redis_url"],
    }
    for target, _, key in mounted(objects, template, container):
        if key in texts:
            (tmp_path / key).write_text(texts[key])
            flags = [each.replace(target, str(tmp_path / key)) for each in flags]
    return load_config(CONFIGS[module], flags, prog=module, section=SECTIONS[module], about="")


def adapter_rules() -> list[Object]:
    """What the Prometheus adapter is told."""
    rules: list[Object] = yaml.safe_load((K8S / "monitoring" / "adapter.yaml").read_text())["rules"]
    return rules


def asked_metrics(objects: list[Object]) -> dict[str, set[str]]:
    """What each autoscaler looks at."""
    return {
        name: {metric["pods"]["metric"]["name"] for metric in each["spec"]["metrics"]}
        for name, each in of_kind(objects, "HorizontalPodAutoscaler").items()
    }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("objects", [CLUSTER, WHOLE], ids=["base", "all"])
def test_kubernetes_knows_the_schema(objects: list[Object], version: str) -> None:
    """Every object is of a kind that this version has, and has no key that the kind does not have."""
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)


def test_a_wrong_key_is_refused() -> None:
    """The check above can fail: on a key that does not exist, and on a value of another type."""
    (budget, *_) = of_kind(CLUSTER, "PodDisruptionBudget").values()
    for spec in ({**budget["spec"], "maxUnavailabel": 1}, {**budget["spec"], "selector": "prefill"}):
        with pytest.raises(ValidationError):
            kubernetes_validate.validate({**budget, "spec": spec}, VERSIONS[0], strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_renders_the_same(tmp_path: Path) -> None:
    """Where kubectl is: what the tests look at is what it would apply, alone and with all components."""
    here = Path(shutil.copytree(K8S, tmp_path / "k8s"))
    (here / "all").mkdir()
    (here / "all" / "kustomization.yaml").write_text(
        "resources: [../base]\ncomponents: [../gpu, ../autoscaling]\n"
    )
    for directory, ours in (("base", CLUSTER), ("all", WHOLE)):
        done = subprocess.run(
            ["kubectl", "kustomize", here / directory], capture_output=True, text=True, check=True
        )
        theirs = list(yaml.safe_load_all(done.stdout))
        assert sorted(theirs, key=_identity) == sorted(ours, key=_identity)


@pytest.mark.parametrize("name", OURS)
def test_every_process_starts_with_its_settings(name: str, tmp_path: Path) -> None:
    """Each takes its flags and its section of the file, listens where its ports and probes say, and exports metrics there."""
    settings = settings_of(CLUSTER, name, tmp_path)
    container = main_container(templates(CLUSTER)[name])
    assert settings.listen == f"0.0.0.0:{port_of(container, 'grpc')}"
    assert settings.metrics_port == port_of(container, "metrics")
    probes = {kind: container[f"{kind}Probe"]["grpc"] for kind in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in probes.values()} == {port_of(container, "grpc")}
    assert {kind: probe.get("service") for kind, probe in probes.items()} == {
        "startup": "liveness",
        "liveness": "liveness",
        "readiness": None,
    }


def test_a_wrong_flag_is_noticed(tmp_path: Path) -> None:
    """The check above can fail: a flag that a service does not have ends its start."""
    objects = render(BASE)
    main_container(templates(objects)["decode"])["command"].append("--gears=2")
    with pytest.raises(SystemExit):
        settings_of(objects, "decode", tmp_path)


def test_the_settings_are_those_of_compose() -> None:
    """One file of settings is not two."""
    text = of_kind(CLUSTER, "ConfigMap")["cluster"]["data"]["cluster.toml"]
    assert tomllib.loads(text) == tomllib.loads((COMPOSE / "cluster.toml").read_text())


def test_redis_is_that_of_compose() -> None:
    """The same image with the same bounds, where the secret says that it is."""
    container = main_container(templates(CLUSTER)["redis"])
    there = services(read_stack((COMPOSE_BASE,)))["redis"]
    assert (container["command"], container["image"]) == (there["command"], there["image"])
    url = _created()["paceline-cluster"]["redis_url"]
    (port,) = of_kind(CLUSTER, "Service")["redis"]["spec"]["ports"]
    assert url == f"redis://redis:{port['port']}"


@pytest.mark.parametrize("name", [*OURS, "redis"])
def test_selectors_find_their_pods(name: str) -> None:
    """Whatever chooses pods by labels chooses those that it is named after, and nobody else's."""
    made = of_kind(CLUSTER, "Deployment", "StatefulSet")[name]
    chosen: list[Object] = [made["spec"]["selector"]["matchLabels"]]
    chosen += [of_kind(CLUSTER, "Service")[name]["spec"]["selector"]]
    chosen += [of_kind(CLUSTER, "NetworkPolicy")[name]["spec"]["podSelector"]["matchLabels"]]
    spread = made["spec"]["template"]["spec"].get("topologySpreadConstraints", ())
    chosen += [each["labelSelector"]["matchLabels"] for each in spread]
    if name in OURS:
        chosen += [of_kind(CLUSTER, "PodDisruptionBudget")[name]["spec"]["selector"]["matchLabels"]]
        assert spread
    for selector in chosen:
        found = {other for other, template in templates(CLUSTER).items() if selects(selector, template)}
        assert found == {name}


def test_names_lead_to_ports_that_are_there() -> None:
    """Each Service has a pod behind it and names one of its ports; those that routers ask for all workers have no address of their own."""
    for name, service in of_kind(CLUSTER, "Service").items():
        spec = service["spec"]
        (template,) = [each for each in templates(CLUSTER).values() if selects(spec["selector"], each)]
        for port in spec["ports"]:
            # Without an address the name leads to pods themselves, and so to their own ports.
            assert port_of(main_container(template), port["targetPort"]) == port["port"]
        assert (spec.get("clusterIP") == "None") == (name in OURS)
    for name, each in of_kind(CLUSTER, "StatefulSet").items():
        assert each["spec"]["serviceName"] == name


def test_routers_look_where_workers_are(tmp_path: Path) -> None:
    """By the names of the workers' Services, on the port where they listen; each worker says its own name and address."""
    router = settings_of(CLUSTER, "router", tmp_path)
    for tier in ("prefill", "decode"):
        worker = settings_of(CLUSTER, tier, tmp_path)
        port = worker.listen.rpartition(":")[2]
        assert getattr(router, tier) == f"dns:{tier}:{port}"
        assert (worker.worker_id, worker.advertise) == (f"{tier}-0", f"{tier}-0:{port}")
        assert worker.redis == router.redis


def test_who_may_call_whom() -> None:
    """Workers take calls of routers and workers, Redis of the same, routers of everybody; metrics anybody in the cluster reads."""
    members = {
        "matchExpressions": [{"key": COMPONENT, "operator": "In", "values": ["router", "prefill", "decode"]}]
    }
    inside = [{"podSelector": members}]
    for name, policy in of_kind(CLUSTER, "NetworkPolicy").items():
        container = main_container(templates(CLUSTER)[name])
        allowed = {}
        for rule in policy["spec"]["ingress"]:
            (port,) = rule["ports"]
            assert port_of(container, port["port"])
            allowed[port["port"]] = rule.get("from")
        expected: Object = {"redis": inside} if name == "redis" else {"metrics": [{"namespaceSelector": {}}]}
        if name in OURS:
            expected["grpc"] = None if name == "router" else inside
        assert allowed == expected
    assert {labels(templates(CLUSTER)[name])[COMPONENT] for name in OURS} == set(OURS)


def test_every_container_is_locked_in_and_bounded() -> None:
    """No rights, no root, no place to write but volumes, a bound on memory, and no key to the cluster's own API."""
    for name, template in templates(WHOLE).items():
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"].items() >= {"runAsNonRoot": True, "runAsUser": 10001}.items()
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(template):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert container["resources"]["limits"]["memory"], name
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}, name
        memory = [volume["emptyDir"] for volume in spec["volumes"] if "emptyDir" in volume]
        assert all(volume["sizeLimit"] for volume in memory), name
    (namespace,) = of_kind(CLUSTER, "Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    inside = [each for each in WHOLE if each["kind"] != "Namespace"]
    assert {each["metadata"]["namespace"] for each in inside} == {namespace["metadata"]["name"]}


@pytest.mark.parametrize("name", OURS)
def test_a_stop_lasts_longer_than_a_drain(name: str, tmp_path: Path) -> None:
    """Kubernetes kills nobody who is still within grace_s, and what it waits before that counts."""
    template = templates(CLUSTER)[name]
    before = main_container(template).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
    waited = int(before[before.index("sleep") + 1]) if before else 0
    limit = template["spec"]["terminationGracePeriodSeconds"]
    assert limit > waited + settings_of(CLUSTER, name, tmp_path).grace_s + 5


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_workers_have_what_they_compute_with(name: str, tmp_path: Path) -> None:
    """The memory holds the KV pool and a gigabyte for weights and process; there is a processor for each thread."""
    settings = settings_of(CLUSTER, name, tmp_path)
    resources = main_container(templates(CLUSTER)[name])["resources"]
    pool = int(settings.kv_memory.removesuffix("MiB"))
    assert int(resources["limits"]["memory"].removesuffix("Gi")) * 1024 >= pool + 1024
    assert int(resources["requests"]["cpu"]) == settings.threads


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_the_documents_own_kustomization_is_taken(tmp_path: Path) -> None:
    """Where kubectl is: images, model and memory of the example come through, and the services take the flags that are added."""
    shutil.copytree(K8S, tmp_path / "paceline" / "compose" / "k8s")
    (tmp_path / "mine").mkdir()
    (block,) = DOCUMENT.blocks("yaml")
    (tmp_path / "mine" / "kustomization.yaml").write_text(block)
    done = subprocess.run(
        ["kubectl", "kustomize", tmp_path / "mine"], capture_output=True, text=True, check=True
    )
    objects = list(yaml.safe_load_all(done.stdout))
    for tier in ("prefill", "decode"):
        assert settings_of(objects, tier, tmp_path).kv_memory == "8GiB"
    images = {each["image"] for template in templates(objects).values() for each in containers(template)}
    assert {image for image in images if "paceline" in image} == {
        "registry.example/paceline-router:0.1.0",
        "registry.example/paceline-worker:0.1.0",
    }
    assert main_container(templates(objects)["model"])["command"][4:6] == [
        "fetch",
        "Qwen/Qwen2.5-1.5B-Instruct",
    ]


def test_every_volume_and_file_is_there() -> None:
    """Each mount has its volume, each volume its claim or config map, and each file of a secret is one that the document creates."""
    created = _created()
    stores: dict[str, Object] = {name: each["data"] for name, each in of_kind(WHOLE, "ConfigMap").items()}
    stores |= created
    for template in templates(WHOLE).values():
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        used = {mount["name"] for each in containers(template) for mount in each["volumeMounts"]}
        assert used == volumes.keys()
        for volume in volumes.values():
            claim = volume.get("persistentVolumeClaim", {}).get("claimName", "model")
            assert claim in of_kind(WHOLE, "PersistentVolumeClaim")
        for container in containers(template):
            for _, store, key in mounted(WHOLE, template, container):
                assert key in stores[store]
    named = {source["secret"]["name"] for source in _secret_sources()}
    assert named == created.keys()


def test_secrets_are_where_the_settings_look() -> None:
    """Each file of secrets that a service's flags and its section name is mounted into its pod, and nothing else is."""
    sections = tomllib.loads(of_kind(CLUSTER, "ConfigMap")["cluster"]["data"]["cluster.toml"])
    for name in OURS:
        template = templates(CLUSTER)[name]
        container = main_container(template)
        said = f"{words(container, name)} {sections[name]}"
        seen = {target for target, *_ in mounted(CLUSTER, template, container) if "/secrets/" in target}
        assert set(re.findall(r"/run/secrets/\w+", said)) == seen


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_files_of_secrets_are_made(tmp_path: Path) -> None:
    """`make_secrets` makes each file that the document puts into a secret."""
    compose = copy_of_compose(tmp_path)
    secrets_of(compose)
    files = {value for keys in _created().values() for value in keys.values() if value.startswith("secrets/")}
    assert files
    assert all((compose / file).is_file() for file in files)


def test_autoscalers_ask_for_what_the_adapter_serves() -> None:
    """Each metric of an autoscaler is a rule's; each rule asks for gauges of ours, in words that Prometheus takes."""
    served = {rule["name"]["as"]: rule for rule in adapter_rules()}
    assert set.union(*asked_metrics(WHOLE).values()) == served.keys()
    gauges = {metric.name for metric in all_metrics() if metric.kind == "gauge"}
    for rule in served.values():
        series = re.sub(r"\{.*\}", "", rule["seriesQuery"])
        query = rule["metricsQuery"].replace("<<.Series>>", series).replace("<<.GroupBy>>", "instance")
        query = query.replace("<<.LabelMatchers>>", 'instance=~"a|b"')
        assert complaints(query) == []
        assert {series, *re.findall(r"paceline_\w+", query)} <= gauges
        assert rule["resources"]["overrides"] == {each: {"resource": each} for each in ("namespace", "pod")}


def test_a_metric_that_nobody_serves_is_noticed() -> None:
    """The check above can fail: an autoscaler that asks for another name asks for what no rule has."""
    objects = render(BASE, AUTOSCALING)
    metric = of_kind(objects, "HorizontalPodAutoscaler")["decode"]["spec"]["metrics"][0]
    metric["pods"]["metric"]["name"] = "paceline_breakaways"
    served = {rule["name"]["as"] for rule in adapter_rules()}
    assert set.union(*asked_metrics(objects).values()) - served == {"paceline_breakaways"}


def test_autoscalers_decide_alone() -> None:
    """Each scales something that is there and whose number of pods nobody else sets, looks at a queue, and takes away one at a time."""
    for name, scaler in of_kind(WHOLE, "HorizontalPodAutoscaler").items():
        spec = scaler["spec"]
        target = of_kind(WHOLE, spec["scaleTargetRef"]["kind"])[spec["scaleTargetRef"]["name"]]
        assert (target["metadata"]["name"], "replicas" in target["spec"]) == (name, False)
        assert of_kind(CLUSTER, "Deployment", "StatefulSet")[name]["spec"]["replicas"] == spec["minReplicas"]
        (down,) = spec["behavior"]["scaleDown"]["policies"]
        assert down["value"] == 1


def test_prometheus_finds_every_process() -> None:
    """By the name of the port that each of ours has, and under the names that rules, dashboard and adapter know."""
    (job,) = yaml.safe_load((K8S / "monitoring" / "prometheus.yaml").read_text())["scrape_configs"]
    (keep,) = [each for each in job["relabel_configs"] if each.get("action") == "keep"]
    assert keep["source_labels"] == ["__meta_kubernetes_pod_container_port_name"]
    has_it = {
        name
        for name, template in templates(CLUSTER).items()
        if keep["regex"] in {port["name"] for port in main_container(template).get("ports", ())}
    }
    assert has_it == set(OURS)
    given = {
        each["target_label"]: each["source_labels"]
        for each in job["relabel_configs"]
        if "target_label" in each
    }
    assert given["job"] == [f"__meta_kubernetes_pod_label_{re.sub(r'[./]', '_', COMPONENT)}"]
    assert given.keys() == {"job", "instance", "namespace", "pod"}
    (namespaces,) = [each["namespaces"]["names"] for each in job["kubernetes_sd_configs"]]
    assert namespaces == list(of_kind(CLUSTER, "Namespace"))


def test_images_are_the_dockerfiles() -> None:
    """Each of ours is one of its targets; the worker's runs whatever needs torch or the launcher."""
    targets = re.findall(r"^FROM .* AS (router|worker)$", (COMPOSE / "Dockerfile").read_text(), re.MULTILINE)
    for name, template in templates(CLUSTER).items():
        if name == "redis":
            continue
        (image,) = {container["image"] for container in containers(template)}
        assert image.removeprefix("paceline-").removesuffix(":local") in targets
        assert image.startswith("paceline-router") == (name == "router")


def test_the_gpu_component_does_not_pretend() -> None:
    """Each worker asks for one GPU; as long as workers have no setting for a device, the file says that they use none."""
    can_use_one = "device" in {field.name for field in dataclasses.fields(DecodeConfig)}
    text = (GPU / "kustomization.yaml").read_text()
    assert ("NOTHING USES THEM YET" in text) == (not can_use_one)
    assert ("--device=" in text) == can_use_one
    for tier in ("prefill", "decode"):
        container = main_container(templates(WHOLE)[tier])
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
        (cache,) = [each["value"] for each in container["env"] if each["name"] == "TRITON_CACHE_DIR"]
        writable = [each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")]
        assert any(cache.startswith(f"{path}/") for path in writable)


def _created() -> dict[str, dict[str, str]]:
    """The secrets that the document's commands create: their keys, and the file or the text that each is."""
    found: dict[str, dict[str, str]] = {}
    for block in DOCUMENT.blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            parts = shlex.split(line, comments=True)
            if parts[3:6] == ["create", "secret", "generic"]:
                given = [part.partition("=")[2].partition("=") for part in parts[7:]]
                found[parts[6]] = {key: value for key, _, value in given}
    return found


def _secret_sources() -> list[Object]:
    return [
        source
        for template in templates(WHOLE).values()
        for volume in template["spec"]["volumes"]
        for source in volume.get("projected", {}).get("sources", ())
    ]


def _identity(each: Object) -> tuple[str, str]:
    return each["kind"], each["metadata"]["name"]
