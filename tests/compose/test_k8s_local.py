"""What the Kubernetes manifests start answers clients: one pod of each kind, its very command and settings, as a process of this machine."""

import asyncio
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline import health
from paceline.client import PacelineClient
from paceline.client_error import PacelineRpcError
from tests.compose.files import copy_of_compose
from tests.compose.local import Machine, running
from tests.compose.manifests import (
    AUTOSCALING,
    BASE,
    Object,
    Pods,
    main_container,
    of_kind,
    port_of,
    render,
    selects,
    templates,
)
from tests.compose.test_k8s import OURS, adapter_rules, asked_metrics
from tests.compose.test_local import CACHE, PROMPT, page_of, secrets_of

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
]


def files_of(compose: Path, objects: list[Object]) -> dict[tuple[str, str], Path]:
    """What is in the config map and, as `kubectl create secret` would put it there, in the secrets."""
    settings = compose / "cluster.toml"
    settings.write_text(of_kind(objects, "ConfigMap")["cluster"]["data"]["cluster.toml"])
    made = compose / "secrets"
    return {
        ("cluster", "cluster.toml"): settings,
        ("paceline-cluster", "cluster_token"): made / "cluster_token",
        ("paceline-cluster", "redis_url"): made / "redis_url",
        ("paceline-router", "cache_salt"): made / "cache_salt",
        ("paceline-router", "tenants"): made / "tenants.toml",
    }


def door(objects: list[Object], machine: Machine) -> str:
    """Where clients come in by the Service `paceline`."""
    spec = of_kind(objects, "Service")["paceline"]["spec"]
    ((name, template),) = [
        (name, each) for name, each in templates(objects).items() if selects(spec["selector"], each)
    ]
    (port,) = spec["ports"]
    return f"{machine.hosts[f'{name}-0']}:{port_of(main_container(template), port['targetPort'])}"


async def test_the_pods_are_a_cluster(tiny_tokenizer_dir: Path, tmp_path: Path) -> None:
    """Prompts are handed over, a stranger gets nothing, every probe is answered, and what autoscalers look at is exported by their pods."""
    compose = copy_of_compose(tmp_path)
    key = secrets_of(compose)
    objects = render(BASE, AUTOSCALING)
    stack = Pods(objects, files_of(compose, objects)).as_stack()
    fake = {"runner": "fake"}
    extra = {"router": {"disaggregate": "always"}, "prefill": fake, "decode": fake}
    machine = Machine.of(stack, tmp_path, {f"{CACHE}/model": tiny_tokenizer_dir}, extra)
    (compose / "secrets" / "redis_url").write_text(f"redis://{machine.hosts['redis-0']}:6379")
    address = door(objects, machine)
    async with (
        running(machine, redis="redis-0"),
        PacelineClient(address, api_key=key) as client,
        PacelineClient(address) as stranger,
    ):
        answer = await client.generate_text(PROMPT, max_tokens=4, temperature=0, ignore_eos=True)
        assert (answer.timeline.prefill_worker, answer.timeline.decode_worker) == ("prefill-0", "decode-0")
        info = await client.server_info()
        assert (info.index_mode, info.limiter_mode) == ("redis", "redis")
        with pytest.raises(PacelineRpcError) as caught:
            await stranger.generate_text(PROMPT, max_tokens=1)
        assert caught.value.reason == "TENANT_UNKNOWN"
        for name in OURS:
            await _probes_answer(objects, machine, name)
            await _metrics_are_there(objects, machine, name)


async def _probes_answer(objects: list[Object], machine: Machine, name: str) -> None:
    container = main_container(templates(objects)[name])
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked: Mapping[str, str] = container[kind]["grpc"]
        where = f"{machine.hosts[f'{name}-0']}:{asked['port']}"
        assert await asyncio.to_thread(health.main, [where, f"--service={asked.get('service', '')}"]) == 0


async def _metrics_are_there(objects: list[Object], machine: Machine, name: str) -> None:
    """On the port that Prometheus finds by its name: every series of the rules behind its autoscaler's metrics."""
    port = port_of(main_container(templates(objects)[name]), "metrics")
    page = await page_of(f"http://{machine.hosts[f'{name}-0']}:{port}/metrics")
    exported = set(re.findall(r"^(paceline_\w+)", page, re.MULTILINE))
    for rule in adapter_rules():
        if rule["name"]["as"] in asked_metrics(objects)[name]:
            assert set(re.findall(r"paceline_\w+", rule["seriesQuery"] + rule["metricsQuery"])) <= exported
